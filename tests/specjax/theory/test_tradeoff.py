"""Theorems 4 and 5, against a linear program and the shipped rules."""

import instances
import jax
import numpy as np
import pytest
from scipy import optimize

from specjax import exact, rules
from specjax.theory import tradeoff
from specjax.tree import chain

P, Q = instances.P, instances.Q


def least_loss(p, q, b):
  """`min_P TV(q, b p + Z P)` as a linear program over P and |differences|."""
  size = len(p)
  z = float(np.sum((1 - b) * p))
  eye = np.eye(size)
  above = np.block([[z * eye, -eye], [-z * eye, -eye]])
  limits = np.concatenate([q - b * p, b * p - q])
  actual = optimize.linprog(
    np.concatenate([np.zeros(size), np.full(size, 0.5)]),
    A_ub=above, b_ub=limits,
    A_eq=np.concatenate([np.ones(size), np.zeros(size)])[None], b_eq=[1.0],
  )  # fmt: skip
  return actual.fun


def cases(count, seed):
  rng = np.random.default_rng(seed)
  p, q = instances.random_laws(count, 5, seed=seed)
  return zip(p, q, rng.uniform(size=p.shape), strict=True)


def test_theorem_4_matches_linear_program():
  for p, q, b in cases(20, 0):
    actual = tradeoff.best_loss(p, q, b)
    assert actual == pytest.approx(least_loss(p, q, b), abs=1e-9)
    left = np.maximum(q - b * p, 0)
    residual = left / left.sum()
    assert tradeoff.loss(p, q, b, residual) == pytest.approx(actual, abs=1e-12)
    assert tradeoff.loss(p, q, b, q) >= actual - 1e-12


def test_theorem_5_rejection_plus_loss_equals_distance():
  for p, q, u in cases(20, 1):
    least = np.minimum(1, q / p)
    b = least + u * (1 - least)
    z = tradeoff.rejection(p, b)
    distance = np.abs(p - q).sum() / 2
    assert z + tradeoff.best_loss(p, q, b) == pytest.approx(distance, abs=1e-12)
    under = b * 0.9  # not over-acceptance: above the line
    assert (
      tradeoff.rejection(p, under) + tradeoff.best_loss(p, q, under) > distance
    )


def test_opt_and_uno_match_hand_computed_example():
  np.testing.assert_allclose(tradeoff.over_acceptance(P, Q, 0.1), [0.6, 1, 1])
  assert tradeoff.decoding_opt(P, Q, 0.1) == pytest.approx((0.2, 0.1))
  assert tradeoff.decoding_uno(P, Q, 0.1) == pytest.approx((0.2, 0.2))
  assert tradeoff.decoding_opt(P, Q, 0.0) == pytest.approx((0.3, 0.0))
  assert tradeoff.decoding_uno(P, Q, 0.0)[1] > 0


def test_only_distributions_between_p_and_q_are_on_the_front():
  assert tradeoff.known_target(P, Q, (P + Q) / 2) == pytest.approx((0.15, 0.15))
  assert tradeoff.known_target(P, Q, Q) == pytest.approx((0.3, 0))
  # Below both at the second token, above both at the third.
  assert tradeoff.known_target(P, Q, [0.3, 0.1, 0.6]) == pytest.approx(
    (0.4, 0.2)
  )


@pytest.mark.parametrize("name", ["opt", "uno"])
def test_rule_loss_and_rejection_match_theory(name):
  predict = getattr(tradeoff, f"decoding_{name}")
  for p, q, _ in cases(5, 2):
    for epsilon in (0.0, 0.05, 0.3):
      with jax.enable_x64(True):
        law = exact.block_law(
          rules.get(f"decoding_{name}(epsilon={epsilon})"), chain(1),
          lambda c: p, lambda c: q,  # noqa: B023
        )  # fmt: skip
      actual = (1 - law.expected_accepted, law.total_variation)
      assert actual == pytest.approx(predict(p, q, epsilon), abs=1e-12)
