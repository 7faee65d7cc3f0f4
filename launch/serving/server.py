"""Builds a server from a config, over one process or several, and runs it.

With several processes, the leader decides and all do the same. Every iteration
starts with an array of fixed size, in which the leader broadcasts its orders.
An idle leader sends empty iterations: silence means that it has been lost.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import ml_collections
import uvicorn

from launch import processes
from launch.assembly import pair
from launch.assembly.drafting import with_tokens
from launch.serving import control, http, objectives
from launch.serving.control import Control, Report
from launch.serving.http import Service
from launch.serving.metrics import Metrics
from launch.serving.scheduler import Scheduler
from launch.serving.schemas import Defaults
from launch.serving.slots import Slots, widths_to
from specjax import types
from specjax.decode import Decoder

POLICIES = ("whole", *objectives.POLICIES)
# Time to send the last answers after decoding has ended.
_LAST_SECONDS = 5


def make_slots(
  config: ml_collections.ConfigDict,
  loaded: pair.Models,
  *,
  num_slots: int,
  max_prompt: int,
  share_prefixes: bool = True,
  depth_policy: str = "whole",
  rows: str = "all",
  log: Callable[[str], None] = lambda text: None,
) -> Slots:
  """Makes the slots of a pair, with programs for the first request.

  On a mesh, it makes all programs. Rounds compute "all" `rows` or only
  "running" ones. `log` reports progress. ValueError for ladders, online drafts,
  a `depth_policy` that the draft does not support, and "running" on a mesh.
  """
  models = pair.assemble(config, loaded)
  if models.ladder or models.lesson:
    raise ValueError("ladder and online are not served: see depth_policy")
  if rows == "running" and models.mesh is not None:
    raise ValueError("rounds of running rows alone are for one device: no mesh")
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
    by_running=rows == "running",
    mesh=models.mesh,
    cache_specs=models.layout and models.layout.cache_specs(),
  )
  slots.compile(lambda what: log(f"compiling {what}"))
  if models.mesh is not None:
    slots.compile_rest(lambda what: log(f"compiling {what}"))
  if processes.several():  # compiles the broadcast on all processes
    _broadcast(slots, _no_orders(slots))
  return slots


def _shallower(config, loaded, models) -> dict[int, Decoder]:
  """Decoders with shallower drafts than the config's, by depth.

  A drafter with a state must see every round, so it drafts at least one token.
  """
  drafter = models.decoder.drafter
  depth = drafter.tree.max_depth
  if not drafter.tree.is_chain or depth < 2:
    raise ValueError(
      "a depth policy needs a chain of several tokens: give config.drafter "
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
def compiling_rest(slots: Slots, log: Callable[[str], None]):
  """A context that compiles the missing programs in the background."""
  stop = threading.Event()
  compile_rest = lambda: slots.compile_rest(
    lambda what: log(f"compiling in the background: {what}"), stop
  )
  thread = threading.Thread(target=compile_rest, name="compilation")
  thread.start()
  try:
    yield
  finally:  # exiting while XLA compiles may crash
    stop.set()
    thread.join()


# ---------------------------------------------------------- several processes


def on_all_processes(slots: Slots) -> Callable[[Control], Report]:
  """`slots.iterate` on all processes at once."""
  if not processes.several():
    return slots.iterate

  def iterate(control: Control) -> Report:
    _broadcast(slots, control)
    return slots.iterate(control)  # the last one does nothing

  return iterate


def follow(slots: Slots) -> None:
  """Follows the leader's iterations until its last."""
  control = _no_orders(slots)
  while not control.is_last:
    control = _broadcast(slots, control)
    slots.iterate(control)


def _no_orders(slots: Slots) -> Control:
  return Control(depth=slots.depth, rounds=0)


def _broadcast(slots: Slots, orders: Control) -> Control:
  from jax.experimental import multihost_utils

  array = orders.encode(control.most_bytes(slots.num_slots, slots.longest))
  return Control.decode(
    multihost_utils.broadcast_one_to_all(array, is_source=processes.is_chief())
  )


# --------------------------------------------------------------- over HTTP


def make_service(
  config: ml_collections.ConfigDict,
  loaded: pair.Models,
  slots: Slots,
  *,
  queue: int = 64,
  depth_policy: str = "whole",
  name: str | None = None,
  chat_template: str | None = None,
  **more,
) -> Service:
  """Makes the service for slots of `make_slots`, without starting it.

  `queue` requests may wait for a slot; name and chat template default to the
  checkpoint's; `more` are other fields of `Service`.
  """
  models = pair.assemble(config, loaded)
  tokenizer = models.tokenizer
  if chat_template is not None:
    tokenizer = dataclasses.replace(tokenizer, chat_template=chat_template)
  name = name or os.path.basename(os.path.normpath(config.target))
  metrics = Metrics(model=name, num_slots=slots.num_slots, depth=slots.depth)
  adapts = depth_policy != "whole"
  cost_model, controller = slots.cost_model(), None
  if adapts:
    controller = objectives.Controller(
      objectives.POLICIES[depth_policy],
      slots.depths,
      cost_model.seconds_of_round,
    )
  scheduler = Scheduler(
    slots, on_all_processes(slots), queue_length=queue, metrics=metrics,
    cost_model=cost_model, choose_depth=controller,
    heartbeat=processes.several(),
  )  # fmt: skip
  warp = ("temperature", "top_k", "top_p", "min_p")
  defaults = Defaults(
    model=name,
    warp={setting: config[setting] for setting in warp},
    vocab_size=models.decoder.vocab_size,
    max_new_tokens=config.max_new_tokens,
    longest_prompt=slots.longest,
    max_length=slots.max_length,
    most=slots.num_slots + queue,
    scores=slots.scores,
    has_objectives=adapts,
  )
  return Service(
    scheduler=scheduler, metrics=metrics, tokenizer=tokenizer,
    defaults=defaults, **more,
  )  # fmt: skip


def make_server(service: Service) -> uvicorn.Server:
  """The web server of a service; excess connections get 503."""
  config = uvicorn.Config(
    http.application(service), ws="none", lifespan="off",
    log_config=None,  # its default would replace the existing logging
    log_level="warning", access_log=False, server_header=False,
    limit_concurrency=1000, timeout_keep_alive=30,
    timeout_graceful_shutdown=_LAST_SECONDS,
  )  # fmt: skip
  return uvicorn.Server(config)


def bind(host: str, port: int) -> socket.socket:
  """Binds a socket without listening yet; port 0 picks a free one."""
  bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
  try:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
  except (OSError, OverflowError) as error:
    bound.close()
    raise ValueError(f"cannot listen on {host}:{port}: {error}") from None
  return bound


def run(
  service: Service,
  listener: socket.socket,
  *,
  drain_seconds: float,
  ready: Callable[[], None] = lambda: None,
) -> bool:
  """Serves until a signal, or until the scheduler's thread dies.

  Then new requests get 503 and running ones are finished; on a second signal,
  or after `drain_seconds`, they get 503 too.
  """
  signals: list[int] = []
  for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, lambda number, frame: signals.append(number))
  server, scheduler = make_server(service), service.scheduler
  # Outside the main thread, uvicorn does not handle signals.
  thread = threading.Thread(
    target=server.run, kwargs={"sockets": [listener]}, daemon=True
  )
  listener.listen(1024)  # clients may connect as soon as `ready` reports it
  thread.start()
  ready()
  while scheduler.is_alive() and thread.is_alive() and not signals:
    time.sleep(0.05)
  scheduler.close()
  end = time.monotonic() + drain_seconds
  while scheduler.is_alive() and len(signals) < 2 and time.monotonic() < end:
    time.sleep(0.05)
  scheduler.close(at_once=True)
  ended = scheduler.join(_LAST_SECONDS)
  server.should_exit = True
  thread.join(2 * _LAST_SECONDS)
  return ended and scheduler.error is None
