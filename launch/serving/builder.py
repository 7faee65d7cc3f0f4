"""Builds the slots of a server from a config, over one process or several.

Of several processes the leader decides, and all do the same. Every iteration
begins with one array from the leader, always of the same size, from which each
process reads what to do. An idle leader sends iterations that do nothing: a
process that hears nothing has lost it.
"""

import contextlib
import threading
from collections.abc import Callable

import ml_collections

from launch import processes
from launch.assembly import pair
from launch.assembly.drafting import with_tokens
from launch.serving import control, objectives
from launch.serving.control import Control, Report
from launch.serving.slots import Slots, widths_to
from specjax import types
from specjax.decode import Decoder

POLICIES = ("whole", *objectives.POLICIES)


def make_slots(
  config: ml_collections.ConfigDict,
  loaded: pair.Models,
  *,
  num_slots: int,
  max_prompt: int,
  share_prefixes: bool = True,
  depth_policy: str = "whole",
  say: Callable[[str], None] = lambda text: None,
) -> Slots:
  """The slots of a pair, with programs for the first request.

  On a mesh all programs are compiled: its processes must have the same ones.

  Args:
    config: its `batch_size` is not read.
    loaded: its models.
    num_slots: requests that are decoded at a time.
    max_prompt: tokens of the longest prompt.
    share_prefixes: whether a prompt that begins as an earlier text reads only
      the rest.
    depth_policy: one of `POLICIES`.
    say: is told what takes time.

  Raises:
    ValueError: for `max_new_tokens` that leave no room, or a depth policy of a
      draft that has no shallower form.
  """
  models = pair.assemble(config, loaded)
  longest = min(max_prompt, models.room(config.max_new_tokens))
  decoders = {models.decoder.drafter.tree.max_depth: models.decoder}
  if depth_policy != "whole":
    decoders |= _shallower(config, loaded, models)
  slots = Slots(
    decoders,
    models.params,
    num_slots=num_slots,
    widths=widths_to(longest),
    longest=longest,
    max_length=longest + config.max_new_tokens,
    stop_tokens=models.stop_tokens,
    share_prefixes=share_prefixes,
    mesh=models.mesh,
    cache_specs=models.layout and models.layout.cache_specs(),
  )
  slots.compile(lambda what: say(f"compiling {what}"))
  if models.mesh is not None:
    slots.compile_rest(lambda what: say(f"compiling {what}"))
  if processes.several():  # what sends orders is compiled on all processes
    _broadcast(slots, _nothing(slots))
  return slots


def _shallower(config, loaded, models) -> dict[int, Decoder]:
  """Decoders by the depths of shallower drafts than the config's.

  A drafter with a state must see every round, so it drafts one token at least.
  """
  drafter = models.decoder.drafter
  depth = drafter.tree.max_depth
  if not drafter.tree.is_chain or depth < 2:
    raise ValueError(
      "a depth policy is of a chain of several tokens: give config.drafter "
      "tokens of 2 or more, and no tree"
    )
  least = [0] if drafter.init is types.no_state else []
  powers = [1 << i for i in range(depth.bit_length()) if 1 << i < depth]
  shallow = {k: with_tokens(models.drafting, k) for k in (*least, *powers)}
  return {
    level: pair.assemble(config, loaded, drafting=drafting).decoder
    for level, drafting in shallow.items()
  }


@contextlib.contextmanager
def compiling_rest(slots: Slots, say: Callable[[str], None]):
  """Compiles the programs that are still missing, beside what is done here."""
  stop = threading.Event()
  compile_rest = lambda: slots.compile_rest(
    lambda what: say(f"compiling beside requests: {what}"), stop
  )
  thread = threading.Thread(target=compile_rest, name="compilation")
  thread.start()
  try:
    yield
  finally:  # a process that ends while XLA compiles may crash
    stop.set()
    thread.join()


# ---------------------------------------------------------- several processes


def leading(slots: Slots) -> Callable[[Control], Report]:
  """`slots.iterate` on all processes at once."""
  if not processes.several():
    return slots.iterate

  def iterate(control: Control) -> Report:
    _broadcast(slots, control)
    return slots.iterate(control)  # the last one does nothing

  return iterate


def follow(slots: Slots) -> None:
  """Makes the leader's iterations until its last."""
  control = _nothing(slots)
  while not control.is_last:
    control = _broadcast(slots, control)
    slots.iterate(control)


def _nothing(slots: Slots) -> Control:
  return Control(depth=slots.depth, rounds=0)


def _broadcast(slots: Slots, orders: Control) -> Control:
  from jax.experimental import multihost_utils

  array = orders.encode(control.most_bytes(slots.num_slots, slots.longest))
  return Control.decode(
    multihost_utils.broadcast_one_to_all(array, is_source=processes.is_chief())
  )
