"""What parts of a round cost, from what was timed."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from launch.evaluation import costs as timings
from specjax.theory.stopping import Costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """What parts of a round cost, linear in the rows of a batch.

  Attributes:
    level: seconds of a drafted level and of what goes with it, of no rows and
      of each.
    verify: of a target pass by the tokens of a row, the same two.
    rest: of all else in a round, the same two.
  """

  level: tuple[float, float]
  verify: dict[int, tuple[float, float]]
  rest: tuple[float, float]

  def costs(self, rows: int) -> Costs:
    """Of a batch of so many rows."""
    at = lambda line: max(line[0] + rows * line[1], 1e-9)
    widths = sorted(self.verify)
    seconds = [at(self.verify[w]) + at(self.rest) for w in widths]
    # Beyond the widest that was timed, as the last two rise.
    last = (seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2])

    def verify(fed: int) -> float:
      if fed > widths[-1]:
        return seconds[-1] + (fed - widths[-1]) * max(last, 0.0)
      return float(np.interp(fed, widths, seconds))

    return Costs(draft=at(self.level), verify=verify)


def machine_of(timed: Sequence[timings.Costs]) -> Machine:
  """The machine that costs at one or two batch sizes tell.

  Args:
    timed: of one pair and one machine at different batch sizes. One alone
      says nothing of other batches: all costs are then as at its own.

  Raises:
    ValueError: if there is none, or they are of one batch size.
  """
  found = {
    one.batch_size: {"level": one.level, "rest": one.rest, **one.target}
    for one in timed
  }
  if not found or len(found) != len(timed):
    raise ValueError(
      "costs must be of different batch sizes, got "
      f"{[one.batch_size for one in timed]}"
    )
  (one, low), *more = sorted(found.items())
  if not more:
    line = lambda name: (low[name], 0.0)
  else:
    other, high = more[-1]

    def line(name):
      slope = (high[name] - low[name]) / (other - one)
      return low[name] - one * slope, slope

  widths = [
    w
    for w in low
    if isinstance(w, int) and all(w in part for part in found.values())
  ]
  return Machine(
    level=line("level"),
    rest=line("rest"),
    verify={w: line(w) for w in sorted(widths)},
  )


def without_levels(costs: Costs, width: int) -> float:
  """Seconds of a round that has room for so many tokens and drafts none."""
  return costs.of_round(width) - width * costs.draft
