"""The joint optimum: by hand, and never below what rules accept."""

import itertools
from fractions import Fraction

import jax
import numpy as np
import pytest
from scipy import optimize

from specjax import exact, rules
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.theory import joint
from specjax.theory.optimum import iid_optimum


def same(*law):
  """One law after every context."""
  return lambda context: np.array(law, float)


A = same(2 / 3, 1 / 3), same(1 / 3, 2 / 3)
B = (
  same(1 / 2, 1 / 2),
  lambda context: np.array([0.5, 0.5] if len(context) == 1 else [1.0, 0.0]),
)
C = same(0.5, 0.3, 0.2), same(0.2, 0.3, 0.5)


def random_laws(seed, vocab, concentration=1.0):
  """Draft and target, which depend on the whole context."""

  def law(which):
    return lambda context: np.random.default_rng(
      [seed, which, *context]
    ).dirichlet(np.full(vocab, concentration))

  return law(0), law(1)


def accepted(rule, tree, draft, target, siblings=siblings_lib.IID):
  """Acceptance of a rule, summed over all drafts."""
  with jax.enable_x64(True):
    law = exact.block_law(
      rules.get(rule), tree, draft, target, siblings=siblings
    )
  return law.expected_accepted


HAND = [
  (A, 2, 1, Fraction(11, 9)),
  (A, 2, 2, Fraction(131, 81)),
  (B, 2, 1, Fraction(3, 2)),
  (B, 2, 2, Fraction(7, 4)),
  (C, 1, 2, Fraction(86, 100)),
  (C, 2, 2, Fraction(15608, 10000)),
]


@pytest.mark.parametrize("laws, length, count, expected", HAND)
def test_linear_program_matches_hand_computed_values(
  laws, length, count, expected
):
  actual = joint.any_tree(tree_lib.paths(length, count), *laws)
  assert actual.expected_accepted == pytest.approx(float(expected), abs=1e-12)
  assert actual.acceptance[0] == 1
  total = sum(a.sum() for a in actual.acceptance[1:])
  assert actual.expected_accepted == pytest.approx(total, abs=1e-12)


def test_single_path_optimum_matches_block_verification():
  for seed in range(5):
    draft, target = random_laws(seed, 3)
    block = accepted("block", tree_lib.chain(2), draft, target)
    best = joint.any_tree(tree_lib.chain(2), draft, target)
    assert best.expected_accepted == pytest.approx(block, abs=1e-12)


def test_depth_one_optimum_matches_optimal_transport():
  for seed, count in itertools.product(range(5), (1, 2, 3)):
    draft, target = random_laws(seed, 4)
    best = joint.any_tree(tree_lib.paths(1, count), draft, target)
    expected = iid_optimum(draft((0,)), target((0,)), count)
    assert best.expected_accepted == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
  "rule, siblings",
  [
    ("transport", "iid"),
    ("traversal", "without_replacement"),
    ("greedy_draft", "greedy"),
    ("hub", "hub"),
  ],
)
def test_no_rule_exceeds_the_joint_optimum(rule, siblings):
  tree, siblings = tree_lib.k_ary(2, 2), siblings_lib.get(siblings)
  away = []
  for seed in range(4):
    draft, target = random_laws(seed, 3)
    actual = accepted(rule, tree, draft, target, siblings)
    best = joint.any_tree(tree, draft, target, siblings=siblings)
    away.append(best.expected_accepted - actual)
  assert min(away) > -1e-10
  assert max(away) > 1e-4  # the node by node rules leave something


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 + 1e-6])
def test_solution_contradicting_its_dual_raises(monkeypatch, factor):
  real = optimize.linprog

  def broken(*args, **options):
    actual = real(*args, **options)
    actual.x = actual.x * factor
    return actual

  monkeypatch.setattr(optimize, "linprog", broken)
  with pytest.raises(ArithmeticError, match="its dual by"):
    joint.any_tree(tree_lib.paths(2, 2), *A)
