"""Paths selected by scores: hand values, large vocabularies, broken twins."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from instances import P, Q, log

from specjax import exact, rules
from specjax.rules import block_transport, ratio_types, score_transport
from specjax.siblings import IID, WITHOUT_REPLACEMENT
from specjax.tree import Form, Tree, paths
from specjax.types import Draft

RULE = rules.get("block_transport")


in_bins = functools.cache(block_transport.rule)


def summed(rule, tree, p, q):
  """Accepted tokens and the error of the output law, laws being functions."""
  law = exact.block_law(rule, tree, p, q)
  expected = exact.target_block_law(q, length=tree.max_depth + 1)
  return law.expected_accepted, np.abs(law.output - expected).max()


A = (np.array([2, 1]) / 3, np.array([1, 2]) / 3)
B = (np.array([1, 1]) / 2, np.array([1, 1]) / 2, np.array([1, 0]))
C = (P, Q)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
  ("laws", "depth", "count", "bins", "value"),
  [
    (A, 2, 2, 64, 207 / 128),
    (A, 2, 2, 1, 11 / 9),  # nothing to select by: block verification
    (B, 2, 2, 64, 7 / 4),  # the joint optimum
    (C, 1, 2, 10, 0.86),  # the optimum of `transport`
    (C, 2, 3, 64, 1.8006069181),
  ],
)
def test_acceptance_matches_hand_computed_examples(
  laws, depth, count, bins, value
):
  p, q, *later = laws
  target = lambda text: later[0] if later and len(text) > 1 else q
  actual, error = summed(
    in_bins(bins), paths(depth, count), lambda _: p, target
  )
  assert actual == pytest.approx(value, abs=1e-9)
  assert error < 1e-12


def handed_out(node):
  """The laws of the scores that types get, `f32[C, N]`."""
  return score_transport.mixture(node) @ jnp.diff(node.within)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("vocab", [3, 6])
def test_type_score_distributions_sum_to_all_scores(vocab):
  rng = np.random.default_rng(vocab)
  scores, masses = rng.dirichlet(np.ones(8), 20), rng.dirichlet(
    np.ones(vocab), 20
  )  # fmt: skip
  weights = np.sort(rng.gamma(1, size=(20, 8)), axis=1)
  weights /= (scores * weights).sum(1, keepdims=True)
  wanted = np.sort(rng.gamma(1, size=(20, vocab)), axis=1)
  wanted /= (masses * wanted).sum(1, keepdims=True)

  @jax.jit
  def hand_out(*problem):
    node = score_transport.make_node(*problem)
    return handed_out(node), jnp.diff(node.goal)

  edges = np.cumsum(np.pad(scores, ((0, 0), (1, 0))), axis=1)
  handed, goal = map(np.asarray, hand_out(edges, weights, masses, wanted))
  assert (handed > -1e-15).all()
  np.testing.assert_allclose(handed.sum(2), 1, atol=1e-12)
  total = (masses[:, :, None] * handed).sum(1)
  np.testing.assert_allclose(total, scores, atol=1e-12)
  # The selected law is the one that was aimed at.
  law = masses * (handed * weights[:, None]).sum(2)
  np.testing.assert_allclose(law, goal, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_coarse_ratio_types_accept_less_but_stay_lossless():
  """The way of large vocabularies: less is accepted, and nothing is off."""
  p, q = toys.context_laws(3, seed=5, warp_settings={}, zeros=True)
  tree = Tree((-1, 0, 0, 1))
  best, _ = summed(RULE, tree, p, q)
  with mock.patch.object(ratio_types, "_MOST_TOKENS", 0):
    actual, error = summed(block_transport.rule(types=3), tree, p, q)
  assert error < 1e-10
  assert actual < best - 1e-4


def test_float32_matches_float64_at_large_vocabulary():
  vocab, tree = 131_072, paths(2, 2)
  rng = np.random.default_rng(0)
  p = rng.dirichlet(np.full(vocab, 0.05), 2)
  q = p ** rng.uniform(0.7, 1, (2, 1)) * np.exp(rng.normal(size=p.shape) / 2)
  q /= q.sum(1, keepdims=True)
  tokens = np.array([[0, *rng.choice(vocab, 2, p=p[0]), 0, 0]])
  tokens[0, 3:] = rng.choice(vocab, 2, p=p[1])
  depth = np.maximum(tree.depth - 1, 0)

  @jax.jit
  def ask(tokens, p, q):
    draft = Draft(tree=tree, siblings=IID, tokens=tokens, log_probs=p)
    actual = RULE.verify(draft, draft.topology(), q)
    after = [actual.next_log_probs(jnp.array([n])) for n in (0, 1)]
    emitted = actual.node_probs[:, :2].T[..., None] * jnp.exp(jnp.stack(after))
    return actual.node_probs, emitted

  def at(dtype):
    laws = (log(p)[depth][None], log(q)[np.minimum(tree.depth, 1)][None])
    laws = (x.astype(dtype) for x in laws)
    return map(np.asarray, ask(jnp.asarray(tokens, jnp.int32), *laws))

  single = [*at(jnp.float32)]
  with jax.enable_x64(True):
    double = [*at(jnp.float64)]
  assert all(x.dtype == np.float32 and np.isfinite(x).all() for x in single)
  np.testing.assert_allclose(single[0].sum(1), 1, atol=1e-6)
  np.testing.assert_allclose(single[0], double[0], atol=2e-5)
  assert (np.abs(single[1] - double[1]).sum(-1) / 2 < 2e-5).all()


def test_ratios_overflowing_float32_give_finite_types():
  """As of a denormal p, which a CPU takes for 0; hence a q of 5."""
  q, p = log([[0.3, 5.0]]), log([[0.6, 1.2e-38]])
  q, p = jnp.asarray(q, jnp.float32), jnp.asarray(p, jnp.float32)
  assert jnp.isinf(jnp.exp(q) / jnp.exp(p)).any()
  types = ratio_types.types_of(q, p)
  parts = ratio_types.parts(jnp.exp(q), jnp.exp(p), types.knots)
  for actual in (types.knots, types.masses, types.excess, parts):
    assert np.isfinite(actual).all()
  np.testing.assert_allclose(parts.sum(-1), 1, atol=1e-6)
  np.testing.assert_allclose(types.excess, 5, rtol=1e-6)


def test_masked_branches_and_non_iid_siblings_are_rejected():
  masked = Tree((-1, 0, 0), form=Form.MASKED)
  RULE.check(Tree((-1, 0, 1), form=Form.MASKED), IID)
  with pytest.raises(ValueError, match="form is fixed, got one that is masked"):
    RULE.check(masked, IID)
  with pytest.raises(ValueError, match="needs siblings='iid'"):
    RULE.check(paths(2, 2), WITHOUT_REPLACEMENT)
