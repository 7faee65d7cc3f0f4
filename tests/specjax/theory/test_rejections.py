"""Theorems 1 to 3 and the limit, against brute force and closed forms."""

import numpy as np
import pytest
from instances import P, Q

from specjax import exact, rules
from specjax import tree as tree_lib
from specjax.theory import markov, rejections

pytestmark = pytest.mark.usefixtures("x64")


def context_laws(pair):
  """The chains as laws of contexts, behind a prompt of one token."""
  steps = {
    "draft": (pair.draft_initial, pair.draft),
    "target": (pair.target_initial, pair.target),
  }

  def law(name, context):
    first, after = steps[name]
    place = len(context) - 1
    if place > len(after):  # after the horizon
      return np.full(len(first), 1 / len(first))
    return first if place == 0 else after[place - 1, context[-1]]

  return (lambda c: law("draft", c)), (lambda c: law("target", c))


def by_hand(pair, num_drafts):
  """The recursion of Theorem 3 over all prefixes."""
  draft, target = context_laws(pair)

  def total(prefix, fresh, mass):
    if len(prefix) == pair.horizon + 1:
      return 0.0
    p, q = draft(prefix), target(prefix)
    excess = np.maximum(q - p, 0)
    scale = 0.0
    for _ in range(num_drafts):
      scale += np.maximum(q - scale * p, 0).sum()
    rest = np.maximum(q - scale * p, 0)
    here = mass * excess.sum() - fresh * (excess.sum() - rest.sum())
    return here + sum(
      total(
        (*prefix, x), fresh * rest[x] + (mass - fresh) * excess[x], mass * q[x]
      )
      for x in range(len(q))
    )

  return total((0,), 1.0, 1.0)


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5])
def test_dynamic_program_matches_recursion_over_prefixes(num_drafts):
  for seed in range(3):
    pair = markov.random_pair(seed, vocab_size=3, horizon=4)
    actual = rejections.theorem3(pair, num_drafts)
    assert float(actual) == pytest.approx(by_hand(pair, num_drafts), abs=1e-12)


def expected_rejections(
  rule, make_tree, draft, target, *, horizon, prefix=(0,)
):
  """Rejections until `horizon` tokens, enumerated; a round drafts the rest."""
  if horizon == 0:
    return 0.0
  law = exact.block_law(rule, make_tree(horizon), draft, target, prefix=prefix)
  total = law.expected_rejections
  for mass in law.emitted[: horizon - 1]:
    for tokens in zip(*np.nonzero(mass), strict=True):
      total += mass[tokens] * expected_rejections(
        rule, make_tree, draft, target, horizon=horizon - len(tokens),
        prefix=prefix + tuple(map(int, tokens)),
      )  # fmt: skip
  return total


@pytest.mark.parametrize(
  "rule, num_drafts, horizon",
  [("token", 1, 3), ("batch", 1, 3), ("batch", 2, 3), ("batch", 3, 2)],
)
def test_rule_rejections_match_theorem_3(rule, num_drafts, horizon):
  pair = markov.random_pair(5, vocab_size=2, horizon=horizon)
  actual = expected_rejections(
    rules.get(rule),
    lambda missing: tree_lib.paths(missing, num_drafts),
    *context_laws(pair),
    horizon=horizon,
  )
  expected = float(rejections.theorem3(pair, num_drafts))
  assert actual == pytest.approx(expected, abs=1e-10)


def test_theorem_3_with_one_draft_equals_theorem_1():
  pair = markov.random_pair(1, vocab_size=4, horizon=6)
  mass, total = pair.target_initial, 0.0
  total += np.maximum(pair.target_initial - pair.draft_initial, 0).sum()
  for draft, target in zip(pair.draft, pair.target, strict=True):
    total += mass @ np.maximum(target - draft, 0).sum(-1)
    mass = mass @ target
  for actual in (rejections.theorem1(pair), rejections.theorem3(pair, 1)):
    assert float(actual) == pytest.approx(total, abs=1e-12)


def repeated(draft, target, horizon):
  """The pair whose every token has the law `draft` or `target`."""
  tile = lambda law: np.tile(law, (horizon - 1, len(law), 1))
  return markov.make_pair(
    draft_initial=draft, target_initial=target, draft=tile(draft),
    target=tile(target),
  )  # fmt: skip


def test_rejections_match_hand_computed_example():
  pair = repeated(P, Q, 2)
  assert float(rejections.theorem1(pair)) == pytest.approx(0.6, abs=1e-12)
  assert float(rejections.theorem3(pair, 2)) == pytest.approx(0.5256, abs=1e-12)
  for count, value in ((1, 0.3), (2, 0.24), (3, 0.192), (4, 0.1536)):
    actual, left = rejections.batch_rejection(P, Q, count)
    assert float(actual) == pytest.approx(value, abs=1e-12)
    assert float(left.sum()) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("count", range(1, 7))
def test_batch_rejection_matches_closed_forms(count):
  for u, v in ((0.3, 0.8), (0.9, 0.4), (0.5, 0.5)):
    actual, _ = rejections.batch_rejection(
      np.array([1 - u, u]), np.array([1 - v, v]), count
    )
    closed = rejections.bernoulli(u, v, count)
    assert float(actual) == pytest.approx(closed, abs=1e-12)
  for size, target_size in ((5, 2), (4, 4), (6, 1)):
    p = np.full(size, 1 / size)
    q = (np.arange(size) < target_size) / target_size
    actual, _ = rejections.batch_rejection(p, q, count)
    closed = rejections.uniform(size, target_size, count)
    assert float(actual) == pytest.approx(closed, abs=1e-12)


def test_mass_outside_draft_support_is_always_rejected():
  p, q = np.array([0.6, 0.4, 0.0]), np.array([0.2, 0.5, 0.3])
  actual, _ = rejections.batch_rejection(p, q, 400)
  assert float(actual) == pytest.approx(0.3, abs=1e-9)
  pair = repeated(p, q, 1)
  assert float(rejections.limit(pair)) == pytest.approx(0.3, abs=1e-12)


def test_invalid_chains_are_rejected():
  good = dict.fromkeys(("draft_initial", "target_initial"), np.full(2, 0.5))
  good |= dict.fromkeys(("draft", "target"), np.full((2, 2, 2), 0.5))
  markov.make_pair(**good)
  for name, wrong in (
    ("draft_initial", np.array([0.5, 0.6])),
    ("target", np.full((2, 2, 2), np.nan)), ("target", np.full((1, 2, 2), 0.5)),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=r"sum to 1|shape"):
      markov.make_pair(**good | {name: wrong})
