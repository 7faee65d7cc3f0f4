"""The throughput formula and its relatives."""

import numpy as np
import pytest

from specjax.theory import throughput as theory
from specjax.tree import chain, k_ary, paths


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 0.999999, 1.0])
def test_expected_accepted_matches_recursion_and_series(acceptance):
  for most in range(12):
    value = 0.0
    for k in range(most, -1, -1):
      assert theory.expected_accepted(most - k, acceptance) == pytest.approx(
        value, abs=1e-9
      )
      value = acceptance * (1 + value)
    by_sum = sum(acceptance**i for i in range(1, most + 1))
    assert theory.expected_accepted(most, acceptance) == pytest.approx(
      by_sum, abs=1e-9
    )


def test_expected_calls_count_the_truncated_last_call():
  joint = [0.75, 0.5, 0.25]  # 0, 1, 2 or 3 accepted, a quarter each
  calls = [theory.expected_calls(joint, length) for length in range(6)]
  assert calls[:5] == [0, 1, 1.25, 1.5625, 1.953125]
  assert calls[5] == 1 + sum(calls[1:5]) / 4
  assert theory.expected_calls([1.0, 1.0], 7) == 3
  assert theory.expected_calls([0.0, 0.0], 7) == 7
  rate = 1000 / theory.expected_calls(joint, 1000)
  assert rate == pytest.approx(theory.exact_tokens(joint), rel=1e-3)
  assert rate < theory.exact_tokens(joint)


@pytest.mark.parametrize(
  "acceptance, num_tokens, operations, speed",
  [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44),
   (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86)],
)  # fmt: skip
def test_leviathan_table_is_reproduced(
  acceptance, num_tokens, operations, speed
):
  tokens = theory.tokens_per_cycle(num_tokens, acceptance)
  factors = (
    (num_tokens + 1) / tokens,
    theory.throughput(num_tokens, acceptance, 0.0, 1.0),
  )
  assert factors == pytest.approx((operations, speed), abs=0.006)


@pytest.mark.parametrize(
  "acceptance, cost_ratio, best",
  [(0.5, 0.1, 2), (0.7, 0.05, 6), (0.8, 0.05, 8), (0.9, 0.01, 24)],
)
def test_best_draft_length_maximizes_throughput(acceptance, cost_ratio, best):
  assert theory.best_num_tokens(acceptance, cost_ratio, 1.0) == best
  rates = theory.throughput(np.arange(60), acceptance, cost_ratio, 1.0)
  rising = np.diff(rates) > 0
  assert rising[:best].all()
  assert not rising[best:].any()


def test_growing_verify_cost_shortens_best_draft_length():
  free = theory.best_num_tokens(0.8, 0.05, 1.0, most=15)
  curve = theory.verify_curve({1: 1.0, 4: 1.3, 16: 4.0})
  assert curve(2) == pytest.approx(1.1)
  dear = theory.best_num_tokens(0.8, 0.05, curve, most=15)
  assert 0 < dear < free
  with pytest.raises(ValueError, match=r"measured for 1\.\.16 tokens"):
    curve(17)


def test_break_even_acceptance_covers_cycle_cost():
  least = theory.break_even(4, 0.1, 1.2, 1.0)
  cycle = 4 * 0.1 + 1.2
  assert theory.tokens_per_cycle(4, least) == pytest.approx(cycle, rel=1e-9)
  assert theory.break_even(4, 0.0, 0.9, 1.0) == 0
  assert theory.break_even(1, 1.0, 1.5, 1.0) == np.inf
  # With verification at the price of one token, alpha > c pays (Leviathan).
  assert theory.break_even(1, 0.3, 1.0, 1.0) == pytest.approx(0.3)


def test_exact_tokens_needs_no_independence():
  assert theory.exact_tokens([0.8, 0.7, 0.6]) == pytest.approx(3.1)
  powers = 0.7 ** np.arange(1, 6)
  assert theory.exact_tokens(powers) == pytest.approx(
    float(theory.tokens_per_cycle(5, 0.7))
  )
  with pytest.raises(ValueError, match="do not increase"):
    theory.exact_tokens([0.5, 0.6])


def test_tree_tokens_for_chains_trees_and_paths():
  assert theory.tree_tokens(chain(4), [0.7]) == pytest.approx(
    float(theory.tokens_per_cycle(4, 0.7))
  )
  assert theory.tree_tokens(k_ary(2, 2), [0.6, 0.2]) == pytest.approx(
    1 + 0.8 + 0.8 * 0.8
  )
  # Each of two paths may be taken at the root, and below it there is one.
  assert theory.tree_tokens(paths(3, 2), [0.7, 0.2]) == pytest.approx(
    1 + 0.9 * (1 + 0.7 + 0.49)
  )


def test_out_of_range_inputs_are_rejected():
  for tokens, acceptance in ((-1, 0.5), (2, 1.1), (1.5, 0.5)):
    with pytest.raises(ValueError, match=r"must be|whole numbers"):
      theory.tokens_per_cycle(tokens, acceptance)
