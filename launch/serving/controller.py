"""Sets the draft depth of each slot between visits, from its acceptance."""

from collections.abc import Callable, Mapping, Sequence

from launch.serving import objectives
from launch.serving.objectives import Row, Seen
from launch.serving.ticket import Ticket

Policy = Callable[[Sequence[Row], objectives.Cost, int], Sequence[int]]


class Controller:
  """The scheduler's `Depths`.

  A round takes as long as its deepest row makes it, for all slots together: the
  arrays are rectangles, and there is a program for each of a few depths. So the
  cost that the policy is given is that of the next such depth.
  """

  def __init__(self, policy: Policy, seconds_of_round: Mapping[int, float]):
    """Knows nothing of any row yet.

    Args:
      policy: see `objectives`.
      seconds_of_round: by the depths that there are programs of.
    """
    self._policy = policy
    self._seconds = dict(sorted(seconds_of_round.items()))
    self._depth = max(self._seconds)
    self._least = min(self._seconds)
    self._all = Seen()
    self._last: list[int] = []

  def cost(self, deepest: int, fed: int) -> float:
    """Seconds of a round; padding is fed too, whatever the rows need."""
    del fed
    return next(s for depth, s in self._seconds.items() if depth >= deepest)

  def __call__(
    self, tickets: Sequence[Ticket | None], over: Sequence[Ticket] = ()
  ) -> Sequence[int]:
    """The depth of each slot.

    Args:
      tickets: what each slot decodes, or None.
      over: what ended in the last visit, of which something is to be learned.
    """
    self._learn([*tickets, *over])
    prior = self._all.estimate(objectives.PRIOR)
    taken = [number for number, t in enumerate(tickets) if t is not None]
    rows = [
      Row(
        acceptance=Seen(t.accepted, t.tried).estimate(prior),
        objective=_left(t),
      )
      for t in tickets
      if t is not None
    ]
    depths = [self._least] * len(tickets)
    if any(t is not None and t.seeded for t in tickets):
      depths = [self._depth] * len(tickets)
    elif rows:
      chosen = self._policy(rows, self.cost, self._depth)
      for number, depth in zip(taken, chosen, strict=True):
        depths[number] = max(depth, self._least)
    # The deepest row pays for all: the others draft as deep for nothing.
    deepest = next(d for d in self._seconds if d >= max(depths))
    self._last = [deepest] * len(tickets)
    return self._last

  def _learn(self, tickets: Sequence[Ticket | None]) -> None:
    drafted = max(self._last, default=self._depth)
    learned = False
    for ticket in tickets:
      if ticket is None or not ticket.accept_counts:
        continue
      old = ticket.learned or [0] * len(ticket.accept_counts)
      new = [a - b for a, b in zip(ticket.accept_counts, old, strict=True)]
      ticket.learned = list(ticket.accept_counts)
      if drafted and any(new):
        seen = Seen(ticket.accepted, ticket.tried)
        seen.learn(new, drafted)
        ticket.accepted, ticket.tried = seen.accepted, seen.tried
        self._all.learn(new, drafted)
        learned = True
    if not learned:
      self._all.forget()
      for ticket in tickets:
        if ticket is not None:
          seen = Seen(ticket.accepted, ticket.tried)
          seen.forget()
          ticket.accepted, ticket.tried = seen.accepted, seen.tried


def _left(ticket: Ticket) -> float | None:
  """Seconds that each token of a ticket may still take; None if it has none."""
  if ticket.objective is None or ticket.first is None or ticket.last is None:
    return ticket.objective
  return objectives.left(
    ticket.objective,
    elapsed=ticket.last - ticket.first,
    emitted=ticket.num_tokens,
    budget=ticket.asked.max_new_tokens,
  )
