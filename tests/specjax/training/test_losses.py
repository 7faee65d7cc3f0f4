"""Objectives against their definitions, and acceptance against the rules."""

import itertools

import jax
import numpy as np
import pytest

from specjax import exact, rules
from specjax.training import losses
from specjax.tree import chain

RNG = np.random.default_rng(0)
STUDENT, TEACHER = RNG.standard_normal((2, 2, 6, 5)).astype(np.float32)
LABELS = RNG.integers(0, 5, (2, 6))
ONES = np.ones((2, 6), np.float32)
P = np.asarray(jax.nn.softmax(STUDENT))
Q = np.asarray(jax.nn.softmax(TEACHER))


@pytest.mark.parametrize(
  "name, expected",
  [
    ("next_token", -np.log(np.take_along_axis(P, LABELS[..., None], 2)).mean()),
    ("forward_kl", (Q * np.log(Q / P)).sum(2).mean()),
    ("reverse_kl", (P * np.log(P / Q)).sum(2).mean()),
    ("total_variation", np.abs(P - Q).sum(2).mean() / 2),
    (
      "next_token_and_tv",
      -0.1 * np.log(np.take_along_axis(P, LABELS[..., None], 2)).mean()
      + 0.9 * np.abs(P - Q).sum(2).mean(),
    ),
  ],
)
def test_losses_match_their_definitions(name, expected):
  actual = losses.get(name)(STUDENT, TEACHER, LABELS, ONES)
  assert float(actual) == pytest.approx(expected, rel=1e-5)


def test_zero_probability_tokens_contribute_nothing():
  """Of a teacher that was truncated, or a head of few words."""
  cut = np.where(np.arange(5) < 2, -np.inf, TEACHER)
  rest = np.asarray(jax.nn.softmax(cut))[..., 2:]
  expected = (rest * np.log(rest / P[..., 2:])).sum(2).mean()
  actual = losses.get("forward_kl")(STUDENT, cut, LABELS, ONES)
  assert float(actual) == pytest.approx(expected, rel=1e-5)
  actual = losses.get("reverse_kl")(cut, STUDENT, LABELS, ONES)
  assert float(actual) == pytest.approx(expected, rel=1e-5)
  infinite = losses.get("forward_kl")(cut, STUDENT, LABELS, ONES.copy())
  assert infinite == np.inf
  nowhere = losses.get("forward_kl")(cut, STUDENT, LABELS, 0 * ONES)
  assert nowhere == 0


@pytest.mark.parametrize("name", losses.OBJECTIVES)
def test_zero_weight_positions_are_ignored(name):
  weights = ONES.copy()
  weights[1] = 0
  some = losses.get(name)(STUDENT, TEACHER, LABELS, weights)
  alone = losses.get(name)(STUDENT[:1], TEACHER[:1], LABELS[:1], ONES[:1])
  assert float(some) == pytest.approx(float(alone), rel=1e-6)


@pytest.mark.parametrize(
  "name", ["forward_kl", "reverse_kl", "total_variation", "acceptance"]
)
def test_losses_are_optimal_at_teacher_and_stop_its_gradient(name):
  objective = losses.get(name)
  best = float(objective(TEACHER, TEACHER, LABELS, ONES))
  assert best == pytest.approx(-1 if name == "acceptance" else 0, abs=1e-6)
  assert float(objective(STUDENT, TEACHER, LABELS, ONES)) > best
  to_teacher = jax.grad(objective, argnums=1)(STUDENT, TEACHER, LABELS, ONES)
  np.testing.assert_array_equal(to_teacher, 0)
  to_student = jax.grad(objective)(STUDENT, TEACHER, LABELS, ONES)
  assert np.isfinite(to_student).all()
  assert np.abs(to_student).max() > 0


def test_acceptance_loss_matches_token_rule_acceptance():
  """Summed over all texts with their probability under the target."""
  vocab, block = 3, 2
  rng = np.random.default_rng(1)
  laws = {
    context: rng.dirichlet(np.ones(vocab), 2)
    for n in range(block + 1)
    for context in itertools.product(range(vocab), repeat=n)
  }
  draft = lambda c: laws[c[1:]][0]
  target = lambda c: laws[c[1:]][1]
  objective = losses.acceptance(block)
  total = 0.0
  for text in itertools.product(range(vocab), repeat=block):
    contexts = [text[:i] for i in range(block)]
    p, q = (
      np.log(np.array([[laws[c][k] for c in contexts]], np.float32))
      for k in (0, 1)
    )
    labels = np.array([text])
    weight = np.prod(
      [laws[c][1][x] for c, x in zip(contexts, text, strict=True)]
    )
    total += weight * float(objective(p, q, labels, np.ones((1, block))))
  with jax.enable_x64(True):
    law = exact.block_law(rules.get("token"), chain(block), draft, target)
  assert -total * block == pytest.approx(law.expected_accepted, abs=1e-6)


def test_block_acceptance_matches_acceptance_on_split_blocks():
  cut = lambda x: np.reshape(x, (-1, 3, *np.shape(x)[2:]))
  whole = losses.acceptance(3)(STUDENT, TEACHER, LABELS, ONES)
  given = map(cut, (STUDENT, TEACHER, LABELS, ONES))
  assert float(losses.block_acceptance(3)(*given)) == float(whole)


def test_smooth_l1_is_quadratic_below_one_and_linear_above():
  actual = np.zeros((1, 2, 2), np.float32)
  wanted = np.array([[[0.5, -3.0], [7.0, 7.0]]], np.float32)
  weights = np.array([[1.0, 0.0]], np.float32)
  away = losses.smooth_l1(actual, wanted, weights)
  assert float(away) == pytest.approx((0.5**2 / 2 + 3.0 - 0.5) / 2)
  to_wanted = jax.grad(losses.smooth_l1, argnums=1)(actual, wanted, weights)
  np.testing.assert_array_equal(to_wanted, 0)


def test_confidence_loss_is_cross_entropy_with_acceptance():
  log_odds = RNG.standard_normal((2, 6)).astype(np.float32)
  accepted = 1 - np.abs(P - Q).sum(2) / 2
  np.testing.assert_allclose(
    1 - losses.distance(STUDENT, TEACHER), accepted, rtol=1e-5
  )
  c = 1 / (1 + np.exp(-log_odds))
  expected = -(accepted * np.log(c) + (1 - accepted) * np.log(1 - c))[0].mean()
  weights = ONES.copy()
  weights[1] = 0
  actual = losses.confidence(log_odds, accepted, weights)
  assert float(actual) == pytest.approx(expected, rel=1e-5)
