"""What a run reports."""

import dataclasses

import numpy as np
import pytest

from specjax.metrics import Unit, ratio_interval, speedup_interval, summarize


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


def test_equal_units_have_a_speedup_without_spread():
  low, high = speedup_interval([unit() for _ in range(5)])
  assert low == pytest.approx(1.5)
  assert high == pytest.approx(1.5)


def test_pairing_removes_the_spread_that_units_share():
  # Units differ tenfold in length, but each is sped up by exactly 2.
  units = [
    unit(seconds=float(s), baseline_seconds=2.0 * s, num_tokens=n,
         baseline_num_tokens=n)
    for s, n in zip(range(1, 11), range(10, 110, 10), strict=True)
  ]  # fmt: skip
  np.testing.assert_allclose(speedup_interval(units), 2.0)


def test_the_interval_covers_as_often_as_it_says():
  rng = np.random.default_rng(0)
  hits = 0
  for trial in range(300):
    calls = rng.integers(5, 20, 60)
    tokens = rng.binomial(4 * calls, 0.6)
    low, high = ratio_interval(tokens, calls, num_resamples=400, seed=trial)
    hits += low <= 2.4 <= high
  assert 0.90 < hits / 300 < 0.99


def test_what_cannot_be_computed_is_none():
  alone = summarize([unit(baseline_seconds=None, baseline_num_tokens=None)])
  for name in ("speedup", "speedup_ci", "baseline_tokens_per_second"):
    assert alone[name] is None
  plain = summarize([unit(num_drafted=0, num_accepted=0)] * 2)
  assert plain["acceptance_rate"] is None
  assert plain["acceptance_rate_ci"] is None
