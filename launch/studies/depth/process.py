"""The process that recorded rounds are most like, and the best rule for it."""

import numpy as np

from launch.studies.depth.machine import without_levels
from launch.studies.depth.traces import Traces
from specjax.adaptive import estimates
from specjax.adaptive.estimates import BINS
from specjax.theory import stopping
from specjax.theory.stopping import Costs, Process

_POINTS = 257


def process_of(traces: Traces) -> Process:
  """The chain of bins that the traces are most like.

  Tokens count for their survival: those behind a rejection are of no text.
  """
  accept = traces.accept[traces.there].astype(np.float64)
  bins = np.sum(
    traces.top[traces.there][..., None] >= np.array(estimates.EDGES),
    axis=-1,
  )
  before = np.cumprod(
    np.concatenate([np.ones_like(accept[:, :1]), accept[:, :-1]], axis=1), 1
  )
  seen, kept = np.zeros(BINS), np.zeros(BINS)
  np.add.at(seen, bins, before)
  np.add.at(kept, bins, before * accept)
  following = np.zeros((BINS, BINS))
  np.add.at(following, (bins[:, :-1], bins[:, 1:]), before[:, 1:])
  first = np.bincount(bins[:, 0], minlength=BINS).astype(float)
  unseen = following.sum(axis=1) == 0
  following[unseen] = first
  return Process(
    first=first / first.sum(),
    following=following / following.sum(axis=1, keepdims=True),
    acceptance=kept / np.where(seen > 0, seen, 1),
  )


def optimum(
  process: Process, costs: Costs, width: int
) -> tuple[np.ndarray, float]:
  """The best rule for a process at a width, and the rate it has there.

  Args:
    process: of the bins.
    costs: of a batch; the target's pass is as wide whatever is drafted.
    width: tokens at most.

  Returns:
    `f[width, BINS + 1]` limits of survival, see `depth.table`, and tokens per
    second of a row.
  """
  fixed = Costs(draft=costs.draft, verify=without_levels(costs, width))
  limits = np.zeros((width, BINS + 1))
  guess = _by_limits(process, fixed, limits)
  for _ in range(20):  # Dinkelbach, from the static depth
    better = stopping.thresholds(process, fixed, guess, width, points=_POINTS)
    found = _by_limits(process, fixed, better)
    if found <= guess * (1 + 1e-9):
      break
    guess, limits = found, better
  return limits, guess


def _by_limits(process: Process, costs: Costs, limits: np.ndarray) -> float:
  """The rate of a rule of limits, on a grid of survivals."""
  grid = np.linspace(0, 1, _POINTS)
  count = len(process.acceptance)
  chances = process.ahead(np.array([*range(count), stopping.ROOT]))
  kept = grid * process.acceptance[:, None]  # [X, points]
  tokens, levels = np.zeros((2, count + 1, _POINTS))

  def at(values):
    return np.stack([np.interp(kept[x], grid, values[x]) for x in range(count)])

  for limit in limits[::-1]:
    goes = grid > limit[:, None]  # [X + 1, points]
    tokens = np.where(goes, chances @ (kept + at(tokens)), 0)
    levels = np.where(goes, 1 + chances @ at(levels), 0)
  gained, drafted = tokens[count, -1], levels[count, -1]
  return float((1 + gained) / (costs.of_round(0) + drafted * costs.draft))
