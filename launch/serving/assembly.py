"""Builds the slots of a server from a config, over one process or several.

Of several processes the leader decides, and all do the same. Every iteration
begins with one array from the leader, of the same size always, from which each
process reads what to do. Nothing else is sent, so that all issue the same
programs in the same order. An idle leader sends iterations that do nothing: a
process that hears nothing has lost it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping

import ml_collections
import numpy as np

from launch import processes
from launch.assembly import pair
from launch.assembly.drafting import with_tokens
from launch.serving import objectives
from launch.serving.control import Control, Report
from launch.serving.slots import Slots, widths_to
from specjax import types
from specjax.decode import Decoder

# Policies that `Sizes.depth_policy` may name.
POLICIES = ("whole", *objectives.POLICIES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes and settings of a server, beside its models.

  Attributes:
    slots: requests that are decoded at a time.
    queue: requests that may wait.
    max_prompt: tokens of the longest prompt.
    gap: the longest iteration while prompts are read, in rounds, see `Slots`.
    share_prefixes: whether a prompt that begins as an earlier text reads only
      the rest.
    rounds: of an iteration on the device, at most.
    answer_seconds: how long an answer may take.
    depth_policy: one of `POLICIES`.
    name: the model's, or None for that of its checkpoint.
    token: the bearer token, or None.
    names: what requests may call the server by, or None for anything.
    chat_template: Jinja, in place of the target's own, or None.
    classes: objectives by name, seconds a token.
  """

  slots: int = 8
  queue: int = 64
  max_prompt: int = 1024
  gap: float = 2.5
  share_prefixes: bool = True
  rounds: int = 8
  answer_seconds: float = 600.0
  depth_policy: str = "whole"
  name: str | None = None
  token: str | None = None
  names: frozenset[str] | None = None
  chat_template: str | None = None
  classes: Mapping[str, float] = dataclasses.field(default_factory=dict)


def decoders_of(
  config: ml_collections.ConfigDict, loaded: pair.Models, sizes: Sizes
) -> dict[int, Decoder]:
  """Decoders by the depths of their drafts: the config's, and shallower ones.

  A drafter with a state must see every round, so it drafts one token at least.

  Raises:
    ValueError: if the config's draft has no shallower form.
  """
  made = pair.assemble(config, loaded)
  whole = made.decoder
  drafter = whole.drafter
  depth = drafter.tree.max_depth
  if sizes.depth_policy == "whole":
    return {depth: whole}
  if not drafter.tree.is_chain or depth < 2:
    raise ValueError(
      "a depth policy is of a chain of several tokens: give config.drafter "
      "tokens of 2 or more, and no tree"
    )
  least = [0] if drafter.init is types.no_state else []
  powers = [1 << i for i in range(depth.bit_length()) if 1 << i < depth]
  decoders = {depth: whole}
  for level in (*least, *powers):
    shallow = with_tokens(made.drafting, level)
    decoders[level] = pair.assemble(config, loaded, drafting=shallow).decoder
  return decoders


def make_slots(
  config: ml_collections.ConfigDict,
  loaded: pair.Models,
  sizes: Sizes,
  say: Callable[[str], None] = lambda text: None,
) -> Slots:
  """The slots of a pair, compiled.

  Args:
    config: its `batch_size` is not read.
    loaded: its models.
    sizes: of the server.
    say: is told what takes time.

  Raises:
    ValueError: for sizes that do not fit.
  """
  models = pair.assemble(config, loaded)
  longest = min(sizes.max_prompt, models.room(config.max_new_tokens))
  slots = Slots(
    decoders_of(config, loaded, sizes),
    models.params,
    num_slots=sizes.slots,
    widths=widths_to(longest),
    longest=longest,
    gap=sizes.gap,
    max_length=longest + config.max_new_tokens,
    stop_tokens=models.stop_tokens,
    max_rounds=sizes.rounds,
    share_prefixes=sizes.share_prefixes,
    mesh=models.mesh,
    cache_specs=models.layout and models.layout.cache_specs(),
    scores=True,
  )
  number, count = itertools.count(1), slots.num_programs
  slots.compile(
    lambda what: say(f"compiling {next(number)} of {count}: {what}")
  )
  if sizes.depth_policy != "whole" or math.isfinite(sizes.gap):
    slots.measure()
  for depth, seconds in slots.seconds_of_round.items():
    say(f"a round with drafts of {depth}: {1000 * seconds:.1f} ms")
  greet(slots)
  for width, seconds in slots.seconds_of_pass.items():
    if width and math.isfinite(seconds):
      say(f"reading {width} tokens of a prompt: {1000 * seconds:.1f} ms more")
  return slots


# ---------------------------------------------------------- several processes


def leading(slots: Slots) -> Callable[[Control], Report]:
  """`slots.iterate` on all processes at once."""
  if not processes.several():
    return slots.iterate

  def iterate(control: Control) -> Report:
    _broadcast(control.encode(slots.longest))
    return slots.iterate(control)  # the last one does nothing

  return iterate


def follow(slots: Slots) -> None:
  """Makes the leader's iterations until its last."""
  shape = slots.idle().encode(slots.longest).shape
  while True:
    control = Control.decode(_broadcast(np.zeros(shape, np.int32)))
    slots.iterate(control)
    if control.is_last:
      return


def greet(slots: Slots) -> None:
  """The first array: what sends it is compiled with it, on all processes."""
  if processes.several():
    _broadcast(slots.idle().encode(slots.longest))


def _broadcast(array: np.ndarray) -> np.ndarray:
  from jax.experimental import multihost_utils

  return np.asarray(
    multihost_utils.broadcast_one_to_all(array, is_source=processes.is_chief())
  )
