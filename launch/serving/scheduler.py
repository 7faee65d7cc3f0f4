"""The scheduler of slots and rounds, on the one thread that owns the device.

Its decisions do not change completions: tokens depend only on a request's
prompt, settings and seed, not on slot, neighbors or rounds per iteration (up
to rounding, which depends on how a text is prefilled).
"""

import collections
import dataclasses
import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from launch.serving.control import Control, CostModel, Report, Request, Scores
from launch.serving.slots import Slots
from specjax.runtime.stopping import Watch
from specjax.state import StopReason

_log = logging.getLogger(__name__)

_IDLE_SECONDS = 2.0  # between idle iterations for other processes


class Finish(enum.Enum):
  """How a completion ended: OpenAI's finish reason, or why it failed."""

  STOP = "stop"
  LENGTH = "length"
  CANCELLED = "cancelled"
  NAN = "nan"
  LATE = "late"
  UNREADABLE = "unreadable"  # its text could not be decoded
  BROKEN = "broken"  # the scheduler's loop has ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
  """New tokens of a completion, from one iteration.

  Attributes:
    origins, log_probs: each token's `Origin`, and its target log-probability.
    likeliest: top tokens and log-probabilities of each; empty if not requested.
    cached: tokens of its prompt from the prefix cache.
    drafted: tokens drafted for it so far.
    scores: scores of its prompt, once, if requested.
    finish: why it ended, or None.
    cut: whether a stop string ended it.
  """

  token_ids: Sequence[int] = ()
  origins: Sequence[int] = ()
  log_probs: Sequence[float] = ()
  likeliest: Sequence[Sequence[tuple[int, float]]] = ()
  cached: int = 0
  drafted: int = 0
  scores: Scores | None = None
  finish: Finish | None = None
  cut: bool = False


@dataclasses.dataclass(kw_only=True, eq=False)
class Ticket:
  """A requested completion and its progress; the scheduler's thread writes it.

  Attributes:
    deliver: receives `Update` on the scheduler's thread; must not block.
    watch: checks new tokens and may end it (`specjax.runtime.stopping`), or
      None.
    deadline: when it ends at the latest, by the scheduler's clock, or None.
    objective: seconds that it may take per token, or None.
    seeded: whether its tokens must be reproducible from its seed, and so must
      not depend on the draft length.
    arrived, admitted, first, last: when it was queued, admitted, and emitted
      its first and newest tokens.
    drafts, drafted, accept_counts: see `specjax.state.Counters`, as of the last
      iteration.
    cached: tokens of its prompt from the prefix cache.
    cancelled: set, by any thread, to cancel it.
  """

  request: Request
  deliver: Callable[[Update], None]
  watch: Watch | None = None
  deadline: float | None = None
  objective: float | None = None
  seeded: bool = False
  arrived: float = 0.0
  admitted: float | None = None
  first: float | None = None
  last: float | None = None
  num_tokens: int = 0
  drafts: int = 0
  drafted: int = 0
  accept_counts: list[int] = dataclasses.field(default_factory=list)
  cached: int = 0
  cancelled: threading.Event = dataclasses.field(
    default_factory=threading.Event
  )


_FINISHES = {
  StopReason.STOP_TOKEN: Finish.STOP,
  StopReason.LENGTH: Finish.LENGTH,
  StopReason.NAN_LOGITS: Finish.NAN,
}

# Chooses the draft length, given the slots' tickets (or None), the tickets that
# ended in the last iteration, and its draft length.
ChooseDepth = Callable[[Sequence[Ticket | None], Sequence[Ticket], int], int]


class FullError(Exception):
  """The queue has no room."""


class ClosedError(Exception):
  """The scheduler is closed: the server is stopping, or the loop has died."""


def rounds_of_iteration(*, free: int, waiting: int, max_rounds: int) -> int:
  """The maximum rounds of an iteration, given free slots and the queue.

  An iteration ends with the first row that is done, so many rounds do not delay
  requests that wait for a slot. With a free slot, a new request should not
  wait. Otherwise rounds bound the delay of streamed tokens.
  """
  if waiting:
    return max_rounds
  return 1 if free else max(1, max_rounds // 2)


class Scheduler:
  """A queue, the slots, and the thread between them."""

  def __init__(
    self,
    slots: Slots,
    iterate: Callable[[Control], Report],
    *,
    queue_length: int,
    metrics: Any,
    cost_model: CostModel,
    choose_depth: ChooseDepth | None = None,
    heartbeat: bool = False,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Does not start the thread yet.

    Args:
      slots: the slots; `iterate` is their `iterate`, on all processes.
      cost_model: estimates durations, and limits prefill while rows decode.
      choose_depth: chooses the draft length; None for the maximum.
      heartbeat: whether to make idle iterations for other processes.
      clock: returns seconds.
    """
    self._iterate, self._max_rounds = iterate, slots.max_rounds
    self._place, self._costs = slots.texts.place, cost_model
    self._depth, self._choose_depth = slots.depth, choose_depth
    self._queue_length, self._metrics = queue_length, metrics
    self._heartbeat, self._clock = heartbeat, clock
    self._rows: list[Ticket | None] = [None] * slots.num_slots
    # Tickets that ended in the last iteration, and its draft length.
    self._just_ended: list[Ticket] = []
    self._drafted = slots.depth
    self._ended: set[int] = set()  # rows that the next iteration ends
    self._queue: collections.deque[Ticket] = collections.deque()
    self._wake = threading.Condition()
    self._closed = self._stopped = False
    self.error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name="device")
    self._thread.daemon = True

  # ------------------------------------------------------------- other threads

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def submit(self, tickets: Sequence[Ticket]) -> None:
    """Queues tickets, all or none."""
    with self._wake:
      if self._closed or self.error is not None:
        raise ClosedError
      free = self._rows.count(None)
      if len(self._queue) + len(tickets) > self._queue_length + free:
        raise FullError
      for ticket in tickets:
        ticket.arrived = self._clock()
      self._queue.extend(tickets)
      self._metrics.set_waiting(len(self._queue))
      self._wake.notify()

  def cancel(self, tickets: Sequence[Ticket]) -> None:
    """Cancels tickets; their slots are free in the next iteration."""
    for ticket in tickets:
      ticket.cancelled.set()
    with self._wake:
      self._wake.notify()

  def close(self, *, at_once: bool = False) -> None:
    """Closes the queue; ends when all requests are done, or at once."""
    with self._wake:
      self._closed = True
      self._stopped |= at_once
      self._wake.notify()

  def join(self, seconds: float | None = None) -> bool:
    """Waits for the thread; returns True if it has ended."""
    self._thread.join(seconds)
    return not self._thread.is_alive()

  @property
  def is_closed(self) -> bool:
    """True if no more requests are accepted."""
    return self._closed

  def is_alive(self) -> bool:
    """True if the thread runs without error."""
    return self._thread.is_alive() and self.error is None

  def load(self) -> tuple[int, int]:
    """Numbers of slots in use and of waiting requests."""
    with self._wake:
      used = len(self._rows) - self._rows.count(None)
      return used, len(self._queue)

  # ---------------------------------------------------------------- the thread

  def _run(self) -> None:
    try:
      while self._wait():
        self._iteration()
      if self._heartbeat:
        self._iterate(self._control([], 0, is_last=True))
    except BaseException as error:  # every waiting client gets an error
      self.error = error
      raise
    finally:
      with self._wake:
        self._closed = True
        left = [t for t in (*self._rows, *self._queue) if t is not None]
        self._queue.clear()
        self._rows = [None] * len(self._rows)
      self._count()
      for ticket in left:
        self._finish(ticket, Update(finish=Finish.BROKEN))

  def _wait(self) -> bool:
    """Waits for work; returns False if there will be none."""
    with self._wake:
      while not self._stopped:
        if any(self._rows) or self._queue:
          return True
        if self._closed:
          return False
        if not self._wake.wait(_IDLE_SECONDS) and self._heartbeat:
          return True
      return False

  def _iteration(self) -> None:
    now = self._clock()
    with self._wake:
      self._drop_expired(now)
      admitted = [*self._admit(now)]
      rounds = rounds_of_iteration(
        free=self._rows.count(None),
        waiting=len(self._queue),
        max_rounds=self._max_rounds,
      )
    if not any(self._rows):
      if not (self._heartbeat or self._ended):
        return
      rounds = 0
    control = self._control(admitted, rounds)
    report = self._iterate(control)
    self._ended.clear()
    self._costs.learn(report)
    self._drafted = report.depth
    self._deliver(report)
    self._count()

  def _control(self, admitted, rounds, is_last=False) -> Control:
    depth = self._depth
    if self._choose_depth is not None:
      depth = self._choose_depth(self._rows, self._just_ended, self._drafted)
    self._just_ended = []
    return Control(
      admissions=admitted, ended=sorted(self._ended), depth=depth,
      rounds=rounds, shares=self._costs.shares(depth), is_last=is_last,
    )  # fmt: skip

  def _drop_expired(self, now: float) -> None:
    """Ends cancelled and late tickets in slots and queue."""

    def verdict(ticket):
      if ticket.cancelled.is_set():
        return Finish.CANCELLED
      late = ticket.deadline is not None and now >= ticket.deadline
      return Finish.LATE if late else None

    for row, ticket in enumerate(self._rows):
      if ticket is not None and (finish := verdict(ticket)):
        self._rows[row] = None
        self._ended.add(row)
        self._finish(ticket, Update(finish=finish))
    for ticket in list(self._queue):
      if finish := verdict(ticket):
        self._queue.remove(ticket)
        self._finish(ticket, Update(finish=finish))

  def _admit(self, now: float):
    """Gives free slots to the tickets that have waited longest."""
    while self._queue and None in self._rows:
      ticket = self._queue.popleft()
      ticket.admitted = now
      free = [row for row, one in enumerate(self._rows) if one is None]
      row = self._place(free, ticket.request)
      self._rows[row] = ticket
      self._ended.discard(row)
      self._metrics.count_admission(ticket)
      yield row, ticket.request

  def _count(self) -> None:
    self._metrics.set_waiting(len(self._queue))
    self._metrics.set_running(len(self._rows) - self._rows.count(None))

  def _deliver(self, report: Report) -> None:
    now = self._clock()
    for row, ticket in enumerate(self._rows):
      if ticket is None:
        continue
      self._metrics.count_rounds(ticket, report, row)
      count = int(report.length[row] - report.start[row])
      reason = StopReason(int(report.reason[row]))
      finish, cut = _FINISHES.get(reason), False
      ids = report.tokens[row, :count].tolist()
      if ticket.watch is not None and ids:
        try:
          end = ticket.watch(ids)
        except Exception:  # must not affect other requests
          _log.exception("ending a completion whose text cannot be decoded")
          end, finish = None, Finish.UNREADABLE
        if end is not None:
          count, finish, cut = end, Finish.STOP, True
      if count:
        self._metrics.count_tokens(ticket, count, now)
      if finish is not None:
        self._rows[row] = None
        self._just_ended.append(ticket)
        if reason == StopReason.RUNNING:
          self._ended.add(row)
      update = Update(
        token_ids=ids[:count],
        origins=report.origins[row, :count].tolist(),
        log_probs=report.log_probs[row, :count].tolist(),
        likeliest=_likeliest(report, row, count, ticket.request.num_likeliest),
        cached=int(report.cached[row]),
        drafted=int(report.num_drafted[row]),
        scores=report.scores.get(row),
        finish=finish,
        cut=cut,
      )
      if finish is not None:
        self._finish(ticket, update)
      elif count or update.scores is not None:
        ticket.deliver(update)

  def _finish(self, ticket: Ticket, update: Update) -> None:
    self._metrics.count_finish(ticket, update.finish, self._clock())
    ticket.deliver(update)


def _likeliest(report: Report, row: int, count: int, most: int) -> list:
  """Top log-probabilities of a row's new tokens, for `Update`."""
  if not most or report.likeliest is None:
    return []
  tokens, values = (x[row, :count, :most].tolist() for x in report.likeliest)
  return [[*zip(*one, strict=True)] for one in zip(tokens, values, strict=True)]
