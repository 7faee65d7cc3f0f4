"""Acceptance against closed forms and hand-computed values, all exact."""

import acceptances
import instances
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instances import P, Q

from specjax import exact, rules
from specjax import tree as tree_lib
from specjax.rules import kseq
from specjax.siblings import GREEDY, HUB, IID, TOP_K, WITHOUT_REPLACEMENT

pytestmark = pytest.mark.usefixtures("x64")


def accepted(name, p, q, count, siblings=IID):
  actual, _ = instances.at_one_position(
    rules.get(name), np.atleast_2d(p), np.atleast_2d(q), count, siblings
  )
  return actual


@pytest.mark.parametrize(
  ("name", "siblings", "value"),
  [
    ("match", IID, 0.2 * 0.75 + 0.3 * 0.51 + 0.5 * 0.36),
    ("recursive", IID, 0.76),
    ("batch", IID, 0.76),
    ("kseq", IID, 0.791355),
    ("transport", IID, 0.86),
    ("recursive", WITHOUT_REPLACEMENT, 0.82),
    ("greedy_draft", GREEDY, 0.90),
    ("match", TOP_K, 0.5),
  ],
)
def test_two_draft_acceptance_matches_hand_computed_values(
  name, siblings, value
):
  assert accepted(name, P, Q, 2, siblings)[0] == pytest.approx(value, abs=1e-6)


def test_hub_reaches_optimum_for_its_draft_distribution():
  p, q = instances.random_laws(15, 4, seed=6)
  actual = accepted("hub", p, q, 2, HUB)
  pairs = np.array([(a, b) for a in range(4) for b in range(4)])
  for draft, target, value in zip(p, q, actual, strict=True):
    first = np.log(np.tile(draft, (len(pairs), 1)))
    second = HUB.child(jnp.asarray(first), jnp.asarray(pairs[:, :1]), 2)
    probs = draft[pairs[:, 0]]
    probs = probs * np.exp(np.asarray(second))[np.arange(16), pairs[:, 1]]
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    best, _ = acceptances.plan(pairs, probs, target)
    assert value == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("count", [2, 8])
def test_kseq_scale_is_accurate_in_float32_at_128k_vocab(count):
  """A root to rounding, on the valid side of it up to rounding."""
  for seed, noise in ((0, 1.0), (1, 0.01), (2, 0.0)):
    p, q = instances.random_laws(1, 128_000, seed=seed)
    q = p * np.exp(noise * np.log(q / p))
    p, q = p[0], q[0] / q.sum()
    scale = float(
      kseq.solve(
        jnp.asarray(q, jnp.float32), jnp.asarray(p, jnp.float32),
        jnp.int32(count), most=count,
      )
    )  # fmt: skip
    one = np.minimum(p, q / scale).sum()
    tries = 1 - (1 - one) ** count
    assert -1e-5 < scale - tries / one < 2e-5
    # Of near-equal laws the root is flat, and scales differ more than this.
    exact_root = kseq.solve(
      jnp.asarray(q), jnp.asarray(p), jnp.int32(count), most=count
    )
    best = 1 - (1 - np.minimum(p, q / float(exact_root)).sum()) ** count
    assert tries == pytest.approx(best, abs=2e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_greedy_draft_reaches_optimum_for_its_distribution(count):
  p, q = instances.random_laws(10, 4, seed=4)
  actual = accepted("greedy_draft", p, q, count, GREEDY)
  for i in range(len(p)):
    top = set(np.argsort(-p[i])[: count - 1])
    rest = p[i] * np.array([x not in top for x in range(4)])
    rest /= rest.sum()
    covered = lambda s: rest[list(s)].sum() if top <= set(s) else 0.0  # noqa: B023
    assert actual[i] == pytest.approx(
      acceptances.set_optimum(q[i], covered), abs=1e-12
    )
    outside = np.array([x not in top for x in range(4)])
    closed = q[i][~outside].sum() + np.minimum(q[i], rest)[outside].sum()
    assert actual[i] == pytest.approx(closed, abs=1e-12)


def test_kseq_scale_is_the_root_and_smallest_valid_scale():
  p, q = instances.random_laws(200, 5, seed=6)
  for count in (1, 2, 4):
    scale = np.asarray(
      jax.vmap(lambda q, p: kseq.solve(q, p, np.int32(count), most=4))(q, p)  # noqa: B023
    )[:, None]
    assert (scale >= 1).all()
    assert (scale <= count).all()
    one = np.minimum(p, q / scale).sum(1)
    value = 1 - (1 - one) ** count
    gap = scale[:, 0] * one - value
    assert (gap > -1e-12).all()
    inside = scale[:, 0] > 1 + 1e-9
    assert np.abs(gap[inside]).max(initial=0) < 1e-10
    # At the root, acceptance is 1 - R(scale); the residual just fits.
    reject = np.maximum(q - scale * p, 0).sum(1)
    np.testing.assert_allclose(value[inside], (1 - reject)[inside], atol=1e-9)
    less = scale * (1 - 1e-3)
    one = np.minimum(p, q / less).sum(1, keepdims=True)
    taken = np.minimum(p, q / less) * (1 - (1 - one) ** count) / one
    assert ((q - taken).min(1)[inside] < 0).all()


def test_deterministic_draft_acceptance_equals_target_mass():
  # EAGLE's rule of one-hot drafts has the law and acceptance of `match`.
  p, q = instances.random_laws(20, 4, seed=9)
  top = np.sort(np.argsort(-p, axis=1)[:, :2], axis=1)
  expected = np.take_along_axis(q, top, axis=1).sum(1)
  for name in ("recursive", "match"):
    np.testing.assert_allclose(
      accepted(name, p, q, 2, TOP_K), expected, atol=1e-12
    )


# ------------------------------------------------------------- paths and trees


def test_token_and_block_match_paper_example():
  # p = (2/3, 1/3), q = (1/3, 2/3), two steps: 10/9 and 11/9.
  p, q = np.array([2, 1]) / 3, np.array([1, 2]) / 3
  for name, value in (("token", 10 / 9), ("block", 11 / 9)):
    law = exact.block_law(
      rules.get(name), tree_lib.chain(2), lambda c: p, lambda c: q
    )
    assert law.expected_accepted == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("match", 82 / 81), ("recursive", 4 / 3), ("transport", 128 / 81),
    ("traversal", 38 / 27), ("multipath_block", 131 / 81),
  ],
)  # fmt: skip
def test_two_path_acceptance_matches_hand_computed_values(name, value):
  p, q = np.array([2, 1]) / 3, np.array([1, 2]) / 3
  law = exact.block_law(
    rules.get(name), tree_lib.paths(2, 2), lambda c: p, lambda c: q
  )
  assert law.expected_accepted == pytest.approx(value, abs=1e-9)


def markov_laws(seed, vocab=3):
  """Context-dependent laws: a function of the last token and the length."""
  rng = np.random.default_rng(seed)
  p = rng.dirichlet(np.ones(vocab), (4, vocab))
  q = rng.dirichlet(np.ones(vocab), (4, vocab))
  law = lambda table: lambda c: table[len(c) % 4, c[-1]]
  return law(p), law(q)


@pytest.mark.parametrize(
  "name", ["traversal", "multipath_block", "score_block"]
)
def test_tree_rules_on_a_chain_match_block_verification(name):
  for seed in range(3):
    p, q = markov_laws(seed)
    block = exact.block_law(rules.get("block"), tree_lib.chain(3), p, q)
    actual = exact.block_law(rules.get(name), tree_lib.chain(3), p, q)
    np.testing.assert_allclose(
      actual.accepted_at_least, block.accepted_at_least, atol=1e-12
    )
