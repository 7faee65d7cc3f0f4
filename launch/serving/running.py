"""The server as a process: it listens, and drains when it is told to end."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from launch.serving import http, limits
from launch.serving.http import Service

# For a request's head, on a connection that was made or kept.
_HEAD_SECONDS = 30.0
_BACKLOG = 1024
# Each may hold a body in memory.
_CONNECTIONS = 1000
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
  """Drains on the first signal, ends at once on the second, and returns."""

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
    super().__init__(
      uvicorn.Config(
        http.application(service),
        http=limits.patient(head_seconds),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,  # its own would close the log that there is
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        timeout_keep_alive=max(1, round(head_seconds)),
        limit_concurrency=connections,
        backlog=_BACKLOG,
      )
    )
    self._scheduler = service.scheduler
    self._scheduler.when_dead = self._stop

  def _stop(self) -> None:
    self.should_exit = True

  def handle_exit(self, sig: int, frame) -> None:
    """Takes no more requests; what was taken is answered."""
    self._scheduler.close(at_once=self.should_exit)
    super().handle_exit(sig, frame)

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
  found = socket.socket(family)
  try:
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((host, port))
  except (OSError, OverflowError) as error:
    found.close()
    raise ValueError(f"cannot listen on {host}:{port}: {error}") from None
  return found


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
