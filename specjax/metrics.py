"""What a run reports, and how sure it can be.

Counts are summed over rows before they are divided (a ratio of totals, not a
mean of ratios); intervals come from a bootstrap over the units that were
decoded together, with baseline and speculative times paired inside a unit.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
  """One prompt, or one batch of prompts decoded (and timed) together.

  Attributes:
    num_tokens: emitted tokens.
    num_target_calls, num_drafted, num_accepted, expected_accepted,
      total_variation: sums over the unit's rows of `specjax.types.Counters`.
    seconds: wall-clock time, prompt pass included, compilation excluded.
    baseline_num_tokens, baseline_num_target_calls, baseline_seconds: the same
      for plain autoregressive decoding of the same prompts, or None.
  """

  num_tokens: int
  num_target_calls: int
  num_drafted: int
  num_accepted: int
  expected_accepted: float
  total_variation: float
  seconds: float
  baseline_num_tokens: int | None = None
  baseline_num_target_calls: int | None = None
  baseline_seconds: float | None = None


def ratio_interval(
  numerators: Sequence[float],
  denominators: Sequence[float],
  *,
  confidence: float = 0.95,
  num_resamples: int = 2000,
  seed: int = 0,
) -> tuple[float, float] | None:
  """Percentile-bootstrap interval of a ratio of sums over units.

  Args:
    numerators, denominators: one entry a unit.
    confidence: coverage aimed at.
    num_resamples: bootstrap resamples.
    seed: of the resampling.

  Returns:
    Low and high end, or None with fewer than two units or no denominator.
  """
  top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
  if len(top) < 2 or bottom.sum() <= 0:
    return None
  rng = np.random.default_rng(seed)
  pick = rng.integers(len(top), size=(num_resamples, len(top)))
  low_sums = bottom[pick].sum(1)
  ratios = top[pick].sum(1)[low_sums > 0] / low_sums[low_sums > 0]
  tail = (1 - confidence) / 2
  low, high = np.quantile(ratios, [tail, 1 - tail])
  return float(low), float(high)


def speedup_interval(
  units: Sequence[Unit],
  *,
  confidence: float = 0.95,
  num_resamples: int = 2000,
  seed: int = 0,
) -> tuple[float, float] | None:
  """Bootstrap interval of the paired speed-up; None with fewer than two units.

  A resample draws whole units, so that a unit's two times stay together.
  """
  if len(units) < 2:
    return None
  rng = np.random.default_rng(seed)
  pick = rng.integers(len(units), size=(num_resamples, len(units)))
  column = lambda name: np.array([getattr(u, name) for u in units])[pick].sum(1)
  ratios = (column("num_tokens") / column("seconds")) / (
    column("baseline_num_tokens") / column("baseline_seconds")
  )
  tail = (1 - confidence) / 2
  low, high = np.quantile(ratios, [tail, 1 - tail])
  return float(low), float(high)


def _ratio(top: float, bottom: float) -> float | None:
  return float(top / bottom) if bottom else None


def summarize(units: Sequence[Unit]) -> dict:
  """The report of a run.

  Args:
    units: at least one; baseline fields are given for all of them or for none.

  Returns:
    A JSON-able dictionary. `block_efficiency` is emitted tokens per target
    call, `acceptance_rate` accepted over drafted tokens,
    `expected_acceptance_rate` its Rao-Blackwellised twin, `total_variation` the
    mean over emitted tokens of the exact distance between a token's law and
    the target's (0 for a lossless rule), rates are tokens per
    second, `speedup` the ratio of the two rates; `_ci` are 95% intervals.
    Entries that cannot be computed are None.
  """
  total = lambda name: sum(getattr(u, name) for u in units)
  column = lambda name: [getattr(u, name) for u in units]
  paired = all(u.baseline_seconds is not None for u in units)
  rate = _ratio(total("num_tokens"), total("seconds"))
  baseline = None
  if paired:
    baseline = _ratio(total("baseline_num_tokens"), total("baseline_seconds"))
  return {
    "num_tokens": total("num_tokens"),
    "num_target_calls": total("num_target_calls"),
    "num_drafted": total("num_drafted"),
    "num_accepted": total("num_accepted"),
    "block_efficiency": _ratio(total("num_tokens"), total("num_target_calls")),
    "block_efficiency_ci": ratio_interval(
      column("num_tokens"), column("num_target_calls")
    ),
    "acceptance_rate": _ratio(total("num_accepted"), total("num_drafted")),
    "acceptance_rate_ci": ratio_interval(
      column("num_accepted"), column("num_drafted")
    ),
    "expected_acceptance_rate": _ratio(
      total("expected_accepted"), total("num_drafted")
    ),
    "total_variation": _ratio(total("total_variation"), total("num_tokens")),
    "seconds": total("seconds"),
    "tokens_per_second": rate,
    "baseline_num_tokens": total("baseline_num_tokens") if paired else None,
    "baseline_num_target_calls": total("baseline_num_target_calls")
    if paired
    else None,
    "baseline_seconds": total("baseline_seconds") if paired else None,
    "baseline_tokens_per_second": baseline,
    "speedup": rate / baseline if rate and baseline else None,
    "speedup_ci": speedup_interval(units) if paired else None,
    "num_units": len(units),
  }
