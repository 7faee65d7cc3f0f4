"""Tickets: completions on their way through the scheduler."""

import dataclasses
import enum
import threading
from collections.abc import Callable, Sequence

from launch.serving.control import Asked, Scores
from specjax.runtime.stopping import Watch


class Finish(enum.Enum):
  """Why a completion ended; the values are OpenAI's words where it has one."""

  STOP = "stop"
  LENGTH = "length"
  CANCELLED = "cancelled"
  NAN = "nan"
  LATE = "late"
  UNREADABLE = "unreadable"  # its text could not be watched
  BROKEN = "broken"  # the loop has ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class News:
  """New tokens of a completion, from one visit.

  Attributes:
    token_ids: new ones.
    origins: an `Origin` for each.
    log_probs: the target's own of each.
    likeliest: tokens in the place of each, the likeliest first, with their
      log-probabilities; empty if they were not asked for.
    cached: tokens of its prompt that were not read, since a slot had them.
    drafted: tokens that were drafted for it so far.
    scores: of its prompt, once, if they were asked for.
    finish: why it ended with them, or None.
    cut: whether it ended in the middle of its text, with a stop string.
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
    asked: what is decoded.
    deliver: hears the `News`, on the scheduler's thread, and must not wait.
    watch: looks at new tokens and may end it (`specjax.runtime.stopping`), or
      None.
    deadline: when it ends whatever it has, by the scheduler's clock, or None.
    objective: seconds a token that it may take, or None.
    seeded: whether its tokens must follow from its seed, so that how deep it
      is drafted for may not change them.
    arrived, began, first, last: when it was queued, admitted, and emitted its
      first and its newest tokens.
    num_tokens: emitted.
    drafts, drafted, accept_counts: see `specjax.state.Counters`, as of the last
      visit.
    learned: `accept_counts` when `objectives` last looked.
    cached: tokens of its prompt that were not read.
    accepted, tried: drafted tokens lately, see `objectives.Seen`.
    cancelled: set, by any thread, once it is not wanted any more.
  """

  asked: Asked
  deliver: Callable[[News], None]
  watch: Watch | None = None
  deadline: float | None = None
  objective: float | None = None
  seeded: bool = False
  arrived: float = 0.0
  began: float | None = None
  first: float | None = None
  last: float | None = None
  num_tokens: int = 0
  drafts: int = 0
  drafted: int = 0
  accept_counts: list[int] = dataclasses.field(default_factory=list)
  learned: list[int] = dataclasses.field(default_factory=list)
  cached: int = 0
  accepted: float = 0.0
  tried: float = 0.0
  cancelled: threading.Event = dataclasses.field(
    default_factory=threading.Event
  )
