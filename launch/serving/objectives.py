"""Choice of draft depths for latency objectives, then goodput.

A row whose tokens are accepted with probability a emits 1 + a + .. + a^k tokens
of a round that drafts k for it. What a round takes is measured. With weight w_r
of each row, depths are chosen for the largest

  sum of w_r E_r(k_r) / seconds(deepest, all fed tokens)

with all weights 1 this is goodput, tokens a second. A row that is later than
its objective gets a larger weight, as a Lagrange multiplier does, until it
keeps it or cannot. An objective is of a whole answer: what has been waited for
leaves less time for the rest (`left`), and one that no depth can keep any more
counts for nothing beside those that can be kept. Depths are set between
iterations, from rounds that are over, so that every lossless rule stays so.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence

from launch.serving.scheduler import Ticket

# What a round takes: `(deepest draft, tokens that all rows feed) -> seconds`.
Cost = Callable[[int, int], float]

_STEPS = 12  # of raising weights
_POLISHED = 2  # candidates that are made better step by step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """Acceptance and objective of a row.

  Attributes:
    acceptance: probability that a drafted token is accepted, if those before it
      are.
    objective: seconds that each token may take from here on, or None.
  """

  acceptance: float
  objective: float | None = None

  def tokens(self, depth: int) -> float:
    """Expected tokens of a round."""
    if self.acceptance == 1:
      return depth + 1
    return (1 - self.acceptance ** (depth + 1)) / (1 - self.acceptance)


def left(
  objective: float, *, elapsed: float, emitted: int, budget: int
) -> float:
  """Seconds that each token still to come may take, for a mean of `objective`.

  Args:
    objective: seconds of each token after the first.
    elapsed: seconds since the first one.
    emitted: tokens so far, at least one.
    budget: tokens of the whole answer, if nothing ends it before.
  """
  rest = max(budget - emitted, 1)
  return (objective * (emitted - 1 + rest) - elapsed) / rest


def seconds_of(depths: Sequence[int], cost: Cost) -> float:
  """Seconds of a round of these depths."""
  return cost(max(depths), sum(depths) + len(depths))


def goodput(
  rows: Sequence[Row],
  depths: Sequence[int],
  cost: Cost,
  weights: Sequence[float] | None = None,
) -> float:
  """Tokens a second, each counted with its row's weight."""
  weights = weights or [1.0] * len(rows)
  tokens = sum(
    weight * row.tokens(depth)
    for row, depth, weight in zip(rows, depths, weights, strict=True)
  )
  return tokens / seconds_of(depths, cost)


def shortfall(rows: Sequence[Row], depths: Sequence[int], cost: Cost) -> float:
  """Sum of the relative excesses over the objectives' times."""
  seconds = seconds_of(depths, cost)
  return sum(
    max(0.0, seconds / row.tokens(depth) / row.objective - 1)
    for row, depth in zip(rows, depths, strict=True)
    if row.objective is not None
  )


def ragged(
  rows: Sequence[Row],
  cost: Cost,
  depth: int,
  weights: Sequence[float] | None = None,
) -> list[int]:
  """The best depth of each row.

  With the deepest draft and the number of tokens given, the best are the
  tokens of the largest weight times survival; survival falls along a row, so
  that these are whole beginnings of rows. All such choices are compared.
  """
  weights = weights or [1.0] * len(rows)
  best = [0] * len(rows)
  most = goodput(rows, best, cost, weights)
  for deepest in range(1, depth + 1):
    gains = sorted(
      (
        (-weight * row.acceptance**level, level, number)
        for number, (row, weight) in enumerate(zip(rows, weights, strict=True))
        for level in range(1, deepest + 1)
      )
    )
    depths = [0] * len(rows)
    tokens, fed, top = sum(weights), len(rows), 0
    for gain, level, number in gains:
      depths[number] = level
      tokens, fed, top = tokens - gain, fed + 1, max(top, level)
      if (value := tokens / cost(top, fed)) > most:
        best, most = list(depths), value
  return best


def decide(rows: Sequence[Row], cost: Cost, depth: int) -> list[int]:
  """Depths that miss objectives least, and of those the best goodput.

  Args:
    rows: those that are decoded, at least one.
    cost: of a round.
    depth: G, the most.
  """
  rows = [_to_be_kept(row, cost, depth, len(rows)) for row in rows]
  candidates = [[level] * len(rows) for level in range(depth + 1)]
  weights = [1.0] * len(rows)
  for _ in range(_STEPS):
    depths = ragged(rows, cost, depth, weights)
    candidates.append(depths)
    seconds = seconds_of(depths, cost)
    late = [
      row.objective is not None and seconds / row.tokens(d) > row.objective
      for row, d in zip(rows, depths, strict=True)
    ]
    if not any(late):
      break
    weights = [
      w * (2.0 if is_late else 1.0)
      for w, is_late in zip(weights, late, strict=True)
    ]
  # What differs by less than rounding does not decide.
  worth = lambda depths: (
    round(shortfall(rows, depths, cost), 9),
    -goodput(rows, depths, cost),
  )
  unlike = {tuple(depths): worth(depths) for depths in candidates}
  first = sorted(unlike, key=lambda depths: unlike[depths])[:_POLISHED]
  return min((_polished(d, worth, depth) for d in first), key=worth)


def _to_be_kept(row: Row, cost: Cost, depth: int, num_rows: int) -> Row:
  """The row, without an objective that it misses at any depth."""
  fastest = min(
    cost(level, level + num_rows) / row.tokens(level)
    for level in range(depth + 1)
  )
  if row.objective is None or row.objective >= fastest:
    return row
  return dataclasses.replace(row, objective=None)


def _polished(
  depths: Sequence[int],
  worth: Callable[[Sequence[int]], tuple[float, float]],
  depth: int,
) -> list[int]:
  """Depths that no step of one row makes better (less is better)."""
  best, least = list(depths), worth(depths)
  for _ in range(_STEPS):
    steps = [
      [*best[:row], best[row] + step, *best[row + 1 :]]
      for row in range(len(best))
      for step in (-1, 1)
      if 0 <= best[row] + step <= depth
    ]
    if not steps or (value := worth(other := min(steps, key=worth))) >= least:
      return best
    best, least = other, value
  return best


# ----------------------------------------------------- others, for comparison


def smartspec(rows: Sequence[Row], cost: Cost, depth: int) -> list[int]:
  """SmartSpec's: one acceptance for all rows, and a bonus for not drafting."""
  pooled = sum(row.acceptance for row in rows) / len(rows)
  pooled = 0.65 if pooled < 0.3 else pooled
  alike = [Row(acceptance=pooled)] * len(rows)
  value = lambda level: (
    goodput(alike, [level] * len(rows), cost) * (1.1 if level == 0 else 1.0)
  )
  return [max(range(depth + 1), key=value)] * len(rows)


def adaspec(rows: Sequence[Row], cost: Cost, depth: int) -> list[int]:
  """AdaSpec's gates: draft only if one token pays, and deeper while it does.

  It estimates survival by the draft's own probabilities, which are not known
  between rounds; here it is estimated as everywhere.
  """
  values = [goodput(rows, [k] * len(rows), cost) for k in range(depth + 1)]
  if depth == 0 or values[1] <= values[0]:
    return [0] * len(rows)
  level = 1
  for before, after in itertools.pairwise(values[1:]):
    if after < before:
      break
    level += 1
  return [level] * len(rows)


Policy = Callable[[Sequence[Row], Cost, int], Sequence[int]]
POLICIES = {"objectives": decide, "smartspec": smartspec, "adaspec": adaspec}


# ----------------------------------------------------------------- estimation

# Rounds after which what was seen counts half as much.
_HALF_LIFE = 32.0
# Drafted tokens that what is assumed beforehand counts as.
_PRIOR_TOKENS = 4.0
PRIOR = 0.7


@dataclasses.dataclass
class Seen:
  """Drafted tokens lately.

  Attributes:
    accepted: of them.
    tried: accepted ones, and those that were rejected first in their round.
  """

  accepted: float = 0.0
  tried: float = 0.0

  def learn(self, counts: Sequence[int], depth: int) -> None:
    """Learns from rounds.

    Args:
      counts: how many of them accepted 0, 1, .. tokens.
      depth: how many they drafted; a round that accepted all has rejected none.
    """
    rounds = sum(counts)
    accepted = sum(number * count for number, count in enumerate(counts))
    rejected = sum(counts[:depth])
    keep = 0.5 ** (rounds / _HALF_LIFE)
    self.accepted = keep * self.accepted + accepted
    self.tried = keep * self.tried + accepted + rejected

  def forget(self) -> None:
    """Lets old rounds fade after an iteration that drafted nothing.

    So that drafting is tried again after a while where it did not pay.
    """
    keep = 0.5 ** (1 / _HALF_LIFE)
    self.accepted, self.tried = keep * self.accepted, keep * self.tried

  def estimate(self, prior: float) -> float:
    """The acceptance, drawn to what is assumed while little was seen."""
    tokens = self.tried + _PRIOR_TOKENS
    return (self.accepted + _PRIOR_TOKENS * prior) / tokens


# --------------------------------------------------------------- the controller


class Controller:
  """The scheduler's `choose_depth`.

  A round takes as long as its deepest row makes it, for all slots together: the
  arrays are rectangles, and there is a program for each of a few depths. So the
  cost that the policy is given is that of the next such depth.
  """

  def __init__(
    self,
    policy: Policy,
    depths: Sequence[int],
    seconds_of_round: Callable[[int], float],
  ):
    """Knows nothing of any row yet.

    Args:
      policy: one of `POLICIES`.
      depths: those that there are programs of, ascending.
      seconds_of_round: what a round of one of them takes, as of now.
    """
    self._policy, self._depths = policy, depths
    self._seconds_of_round = seconds_of_round
    self._all = Seen()
    # What was seen of each ticket, and its `accept_counts` up to there.
    self._known: weakref.WeakKeyDictionary[Ticket, tuple[Seen, list[int]]]
    self._known = weakref.WeakKeyDictionary()

  def cost(self, deepest: int, fed: int) -> float:
    """Seconds of a round; padding is fed too, whatever the rows need."""
    del fed
    return self._seconds_of_round(self._program(deepest))

  def __call__(
    self,
    tickets: Sequence[Ticket | None],
    over: Sequence[Ticket],
    drafted: int,
  ) -> int:
    """The depth of all slots.

    Args:
      tickets: what each slot decodes, or None.
      over: what ended in the last iteration.
      drafted: the depth of that.
    """
    now = [ticket for ticket in tickets if ticket is not None]
    self._learn([*now, *over], drafted)
    if any(ticket.seeded for ticket in now):
      return self._depths[-1]
    if not now:
      return self._depths[0]
    prior = self._all.estimate(PRIOR)
    rows = [
      Row(
        acceptance=self._known[ticket][0].estimate(prior),
        objective=_left(ticket),
      )
      for ticket in now
    ]
    return self._program(max(self._policy(rows, self.cost, self._depths[-1])))

  def _program(self, depth: int) -> int:
    return min(one for one in self._depths if one >= depth)

  def _learn(self, tickets: Sequence[Ticket], drafted: int) -> None:
    learned = False
    for ticket in tickets:
      counts = ticket.accept_counts
      seen, old = self._known.get(ticket, (Seen(), [0] * len(counts)))
      old = old or [0] * len(counts)
      new = [a - b for a, b in zip(counts, old, strict=True)]
      self._known[ticket] = (seen, list(counts))
      if drafted and any(new):
        seen.learn(new, drafted)
        self._all.learn(new, drafted)
        learned = True
    if not learned:
      self._all.forget()
      for ticket in tickets:
        self._known[ticket][0].forget()


def _left(ticket: Ticket) -> float | None:
  """Seconds that each token of a ticket may still take; None if it has none."""
  if ticket.objective is None or ticket.first is None or ticket.last is None:
    return ticket.objective
  return left(
    ticket.objective,
    elapsed=ticket.last - ticket.first,
    emitted=ticket.num_tokens,
    budget=ticket.asked.max_new_tokens,
  )
