"""Statistics of runs and their intervals."""

import dataclasses

import numpy as np
import pytest

from launch.evaluation import intervals
from launch.evaluation.intervals import Unit, log_interval, summarize


def speedup_interval(units):
  return summarize(units)["speedup_ci"]


def interval(numerators, denominators, **limits):
  return intervals.ratio("x", numerators, denominators, **limits)["x_ci"]


def unit(**changes) -> Unit:
  base = Unit(
    num_tokens=12, num_target_calls=4, num_drafted=12, num_accepted=8,
    expected_accepted=7.5, total_variation=0.0, seconds=2.0,
    baseline_num_tokens=12, baseline_num_target_calls=12, baseline_seconds=3.0,
  )  # fmt: skip
  return dataclasses.replace(base, **changes)


def test_rates_are_ratios_of_totals():
  units = [unit(), unit(num_tokens=3, num_target_calls=3, num_accepted=0)]
  summary = summarize(units)
  assert summary["block_efficiency"] == 15 / 7
  assert summary["acceptance_rate"] == 8 / 24
  assert summary["expected_acceptance_rate"] == 15 / 24
  assert summary["tokens_per_second"] == 15 / 4
  assert summary["baseline_tokens_per_second"] == 24 / 6
  assert summary["speedup"] == (15 / 4) / 4


def test_pairing_removes_variance_shared_by_units():
  # Units differ tenfold in length, but each is sped up by exactly 2.
  units = [
    unit(seconds=float(s), baseline_seconds=2.0 * s, num_tokens=n,
         baseline_num_tokens=n)
    for s, n in zip(range(1, 11), range(10, 110, 10), strict=True)
  ]  # fmt: skip
  np.testing.assert_allclose(speedup_interval(units), 2.0)


@pytest.mark.parametrize("count", [2, 3, 6, 16, 50])
@pytest.mark.parametrize("lengths", ["equal", "uniform", "log-normal"])
def test_intervals_have_nominal_coverage(lengths, count):
  """4,000 runs of units of different length, speed and speed-up.

  A percentile bootstrap holds the truth in 50%, 71%, 84%, 91% and 94% of them.
  """
  rng = np.random.default_rng(count)
  noise = lambda spread: np.exp(spread * rng.standard_normal((4000, count)))
  tokens = {
    "equal": lambda: np.full((4000, count), 128.0),
    "uniform": lambda: rng.integers(8, 129, (4000, count)).astype(float),
    "log-normal": lambda: 30 * noise(1.0),
  }[lengths]()
  baseline_seconds = tokens * noise(0.3)
  seconds = baseline_seconds / noise(0.22)
  low, high = log_interval([tokens, baseline_seconds], [seconds, tokens])
  truth = np.exp(-(0.22**2) / 2)  # one over the mean of seconds
  assert 0.935 <= np.mean((low <= truth) & (truth <= high)) <= 0.975
  one = [
    unit(num_tokens=n, seconds=s, baseline_num_tokens=n, baseline_seconds=b)
    for n, s, b in zip(tokens[0], seconds[0], baseline_seconds[0], strict=True)
  ]
  if count >= intervals.LEAST:
    assert speedup_interval(one) == pytest.approx((low[0], high[0]))
  else:
    assert speedup_interval(one) is None


@pytest.mark.parametrize("count", range(1, 8))
def test_intervals_require_five_nonzero_units(count):
  told = count >= 5
  ones, values = [1.0] * count, [1.0 + i for i in range(count)]
  assert (interval([values], [ones]) is not None) == told
  assert (summarize([unit()] * count)["speedup_ci"] is not None) == told
  # What is zero has no logarithm, and says little of a ratio.
  with_zeros = interval([[0.0, 0.0, *values]], [[1.0, 1.0, *ones]])
  assert (with_zeros is not None) == told


def test_units_sharing_a_prompt_are_merged():
  groups = intervals.groups_of(["ab", "c", "bd", "e", "dc", "f"])
  assert groups == [0, 0, 0, 1, 0, 2]
  units = [unit(num_tokens=n) for n in range(6)]
  merged = intervals.merged(units, groups)
  assert [one.num_tokens for one in merged] == [7, 3, 5]
  assert merged[0].seconds == 8.0
  alone = [unit(baseline_seconds=None, baseline_num_tokens=None)] * 2
  assert intervals.merged(alone, [0, 0])[0].baseline_seconds is None
