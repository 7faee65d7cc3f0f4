"""Builds the HTTP service over slots, and runs it as a process that drains.

What only decodes in slots (`launch.tools.self_data`) needs `builder` alone,
and none of the packages of a server.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import ml_collections
import uvicorn

from launch import processes
from launch.assembly import pair
from launch.serving import builder, http, limits, objectives
from launch.serving.builder import Sizes
from launch.serving.http import Service
from launch.serving.limits import Limits
from launch.serving.metrics import Metrics
from launch.serving.scheduler import Scheduler
from launch.serving.schemas import Defaults
from launch.serving.slots import Slots

# For a request's head, on a connection that was made or kept.
_HEAD_SECONDS = 30.0
# For what is cut off to say so.
_LAST_SECONDS = 2
_BACKLOG = 1024
# Each may hold a body in memory.
_CONNECTIONS = 1000
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def make_service(
  config: ml_collections.ConfigDict,
  loaded: pair.Models,
  slots: Slots,
  sizes: Sizes,
) -> Service:
  """The service over these slots; its scheduler is not started.

  Args:
    config, loaded, sizes: as of `builder.make_slots`.
    slots: of `builder.make_slots`.
  """
  models = pair.assemble(config, loaded)
  tokenizer = models.tokenizer
  if sizes.chat_template is not None:
    tokenizer = dataclasses.replace(
      tokenizer, chat_template=sizes.chat_template
    )
  name = sizes.name or os.path.basename(os.path.normpath(config.target))
  metrics = Metrics(model=name, num_slots=slots.num_slots, depth=slots.depth)
  adapts = sizes.depth_policy != "whole"
  pace, controller = slots.pace(), None
  if adapts:
    policy = objectives.POLICIES[sizes.depth_policy]
    controller = objectives.Controller(
      policy, slots.depths, pace.seconds_of_round
    )
  scheduler = Scheduler(
    builder.leading(slots),
    num_slots=slots.num_slots,
    depth=slots.depth,
    max_rounds=slots.max_rounds,
    queue_length=sizes.queue,
    metrics=metrics,
    pace=pace,
    choose_depth=controller,
    place=slots.place,
    keeps_in_touch=processes.several(),
  )
  return Service(
    scheduler=scheduler,
    metrics=metrics,
    tokenizer=tokenizer,
    defaults=Defaults(
      model=name,
      temperature=config.temperature,
      top_k=config.top_k,
      top_p=config.top_p,
      min_p=config.min_p,
      vocab_size=models.decoder.vocab_size,
      max_new_tokens=config.max_new_tokens,
      longest_prompt=slots.longest,
      max_length=slots.max_length,
      most=slots.num_slots + sizes.queue,
      scores=slots.scores,
      has_objectives=adapts,
      classes=sizes.classes,
    ),
    limits=Limits(
      answer_seconds=sizes.answer_seconds, token=sizes.token, names=sizes.names
    ),
    about={
      "model": name,
      "drafter": models.decoder.drafter.name,
      "rule": models.decoder.rule.name,
      "depth_policy": sizes.depth_policy,
      "slots": slots.num_slots,
      "is_chat": tokenizer.chat_template is not None,
    },
  )


class Server(uvicorn.Server):
  """Drains on the first signal, cuts off on the second, and returns."""

  def __init__(
    self,
    service: Service,
    *,
    drain_seconds: float,
    head_seconds: float = _HEAD_SECONDS,
    connections: int = _CONNECTIONS,
  ):
    """Listens on nothing yet.

    Args:
      service: what answers.
      drain_seconds: for requests that are being answered when it is to end.
      head_seconds: for a request's head.
      connections: so many at a time are too many: requests get 503.
    """
    self._application = http.application(service)
    self._drain_seconds, self._connections = drain_seconds, connections
    self._at_once = False
    super().__init__(
      uvicorn.Config(
        self._answer,
        http=limits.patient(head_seconds),
        interface="asgi3",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,  # its own would close the log that there is
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(drain_seconds) + 2 * _LAST_SECONDS,
        timeout_keep_alive=max(1, round(head_seconds)),
        backlog=_BACKLOG,
      )
    )
    self._scheduler = service.scheduler
    self._scheduler.when_dead = self._stop

  def _stop(self) -> None:
    self.should_exit = True

  def handle_exit(self, sig: int, frame) -> None:
    """Refuses further requests; those accepted are answered."""
    del sig, frame
    self._at_once = self.should_exit
    self._scheduler.close(at_once=self._at_once)
    self.should_exit = True

  async def _answer(self, scope, receive, send) -> None:
    """The application, unless there are too many connections."""
    is_full = len(self.server_state.connections) >= self._connections
    await (http.crowded if is_full else self._application)(scope, receive, send)

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    """As uvicorn's, but requests without an answer by the end are told so."""
    cutting = asyncio.ensure_future(self._cut())
    try:
      await super().shutdown(sockets)
    finally:
      cutting.cancel()

  async def _cut(self) -> None:
    """Cancels what is not over in time, while it can still say so."""
    end = time.monotonic() + self._drain_seconds
    while time.monotonic() < end and not self._at_once:
      await asyncio.sleep(0.1)
    state = self.server_state
    for connection in list(state.connections):
      if connection.flow.write_paused:  # who reads nothing hears nothing
        connection.transport.abort()
    await asyncio.sleep(0.1)
    for task in list(state.tasks):
      task.cancel()
    await asyncio.sleep(_LAST_SECONDS)
    for connection in list(state.connections):
      connection.transport.abort()

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    """As uvicorn's, but a drained server has ended well: nothing is raised."""
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    before = {sig: signal.signal(sig, self.handle_exit) for sig in _SIGNALS}
    try:
      yield
    finally:
      for sig, handler in before.items():
        signal.signal(sig, handler)


def listening(host: str, port: int) -> socket.socket:
  """A socket that is bound, and refuses until it listens; port 0 is any.

  Raises:
    ValueError: if it cannot be had.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  bound = socket.socket(family)
  try:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
  except (OSError, OverflowError) as error:
    bound.close()
    raise ValueError(f"cannot listen on {host}:{port}: {error}") from None
  return bound


def run(
  service: Service,
  where: socket.socket,
  *,
  drain_seconds: float,
  ready: Callable[[], None] = lambda: None,
) -> bool:
  """Serves until a signal, or until the scheduler's thread has died.

  Args:
    service: what answers; its scheduler runs.
    where: from `listening`.
    drain_seconds: see `Server`.
    ready: called once it listens.

  Returns:
    Whether it ended as it was told to.
  """
  server = Server(service, drain_seconds=drain_seconds)
  where.listen(_BACKLOG)  # who is told so may connect at once
  ready()
  server.run(sockets=[where])
  scheduler = service.scheduler
  scheduler.close(at_once=True)  # whoever asked has left, or was told to
  ended = scheduler.join(drain_seconds + 5)
  return ended and scheduler.error is None
