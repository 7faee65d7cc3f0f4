"""Chooses the draft length by latency objectives first, then by goodput.

A row with acceptance a emits 1 + a + .. + a^k tokens in a round with draft
length k, and round times are measured. A batch's round takes as long as its
deepest row, so no row gains from a shorter draft, and all rows share a length.
The candidates are the lengths with compiled programs.

An objective covers a whole answer: waiting leaves less time for the rest, and
an objective that no length can still meet is ignored. Lengths are set between
iterations, from finished rounds, so every lossless rule stays lossless.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence

from launch.serving.scheduler import Ticket

# Seconds of a round by draft length.
Cost = Callable[[int], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """Acceptance and objective of a row.

  Attributes:
    acceptance: probability that a drafted token is accepted if those before it
      are.
    objective: seconds that each further token may take, or None.
  """

  acceptance: float
  objective: float | None = None

  def tokens(self, depth: int) -> float:
    """Expected tokens of a round."""
    return sum(self.acceptance**level for level in range(depth + 1))


def goodput(rows: Sequence[Row], depth: int, cost: Cost) -> float:
  """Expected tokens per second."""
  return sum(row.tokens(depth) for row in rows) / cost(depth)


def decide(rows: Sequence[Row], cost: Cost, depths: Sequence[int]) -> int:
  """The depth that misses objectives least; goodput breaks ties."""
  fastest = lambda row: min(cost(k) / row.tokens(k) for k in depths)
  kept = [
    row
    for row in rows
    if row.objective is not None and row.objective >= fastest(row)
  ]

  def worth(depth):
    excess = lambda row: cost(depth) / row.tokens(depth) / row.objective - 1
    missed = sum(max(0.0, excess(row)) for row in kept)
    # Ignore differences within rounding.
    return round(missed, 9), -goodput(rows, depth, cost)

  return min(depths, key=worth)


def smartspec(rows: Sequence[Row], cost: Cost, depths: Sequence[int]) -> int:
  """SmartSpec: one acceptance for all rows, and a bonus for not drafting."""
  pooled = sum(row.acceptance for row in rows) / len(rows)
  alike = [Row(acceptance=0.65 if pooled < 0.3 else pooled)]
  value = lambda k: goodput(alike, k, cost) * (1.1 if k == 0 else 1.0)
  return max(depths, key=value)


Policy = Callable[[Sequence[Row], Cost, Sequence[int]], int]
POLICIES = {"objectives": decide, "smartspec": smartspec}


# ----------------------------------------------------------------- estimation

# Rounds after which an observation counts for half.
_HALF_LIFE = 32.0
# The prior acceptance, and the number of tokens that it counts as.
_PRIOR, _PRIOR_TOKENS = 0.7, 4.0


@dataclasses.dataclass
class History:
  """Acceptance of recent draft tokens, with exponential decay.

  Attributes:
    accepted: accepted tokens.
    trials: accepted tokens, and the first rejected one of each round.
  """

  accepted: float = 0.0
  trials: float = 0.0

  def learn(self, counts: Sequence[int], depth: int) -> None:
    """Learns from rounds."""
    self.decay(sum(counts))
    accepted = sum(number * count for number, count in enumerate(counts))
    self.accepted += accepted
    self.trials += accepted + sum(counts[:depth])

  def decay(self, rounds: int) -> None:
    """Decays earlier observations.

    Rounds without drafts count too, so that drafting is retried after a while.
    """
    keep = 0.5 ** (rounds / _HALF_LIFE)
    self.accepted, self.trials = keep * self.accepted, keep * self.trials

  def estimate(self, prior: float = _PRIOR) -> float:
    """The acceptance, shrunk toward the prior while there is little data."""
    tokens = self.trials + _PRIOR_TOKENS
    return (self.accepted + _PRIOR_TOKENS * prior) / tokens


# --------------------------------------------------------------- the controller


class Controller:
  """The scheduler's `choose_depth`."""

  def __init__(self, policy: Policy, depths: Sequence[int], cost: Cost):
    """Starts without observations.

    Args:
      policy: one of `POLICIES`.
      depths: draft lengths with programs, ascending.
      cost: current seconds of a round by depth.
    """
    self._policy, self._depths, self._cost = policy, depths, cost
    self._all = History()
    # Observations of each ticket, and its `accept_counts` so far.
    self._known: weakref.WeakKeyDictionary[Ticket, tuple[History, list[int]]]
    self._known = weakref.WeakKeyDictionary()

  def __call__(
    self,
    tickets: Sequence[Ticket | None],
    ended: Sequence[Ticket],
    drafted: int,
  ) -> int:
    """Chooses the depth of all slots."""
    now = [ticket for ticket in tickets if ticket is not None]
    self._learn([*now, *ended], drafted)
    if any(ticket.seeded for ticket in now):
      return self._depths[-1]
    if not now:
      return self._depths[0]
    prior = self._all.estimate()
    rows = [
      Row(
        acceptance=self._known[ticket][0].estimate(prior),
        objective=_left(ticket),
      )
      for ticket in now
    ]
    return self._policy(rows, self._cost, self._depths)

  def _learn(self, tickets: Sequence[Ticket], drafted: int) -> None:
    learned = False
    for ticket in tickets:
      counts = ticket.accept_counts
      history, old = self._known.get(ticket, (History(), []))
      old = old or [0] * len(counts)
      new = [a - b for a, b in zip(counts, old, strict=True)]
      self._known[ticket] = (history, list(counts))
      if drafted and any(new):
        history.learn(new, drafted)
        self._all.learn(new, drafted)
        learned = True
    if not learned:
      for history in (self._all, *(self._known[one][0] for one in tickets)):
        history.decay(1)


def _left(ticket: Ticket) -> float | None:
  """Seconds that each further token of a ticket may take; None if no objective.

  The objective is for the mean of all tokens after the first; the answer is
  assumed to use its whole budget.
  """
  if ticket.objective is None or ticket.first is None or ticket.last is None:
    return ticket.objective
  rest = max(ticket.request.max_new_tokens - ticket.num_tokens, 1)
  allowed = ticket.objective * (ticket.num_tokens - 1 + rest)
  return (allowed - (ticket.last - ticket.first)) / rest
