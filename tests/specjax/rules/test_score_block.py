"""`score_block`: lossless where it is taken, and near the optimum."""

import acceptances
import instances
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import exact, rules
from specjax.rules import score_block
from specjax.siblings import GREEDY, IID, WITHOUT_REPLACEMENT
from specjax.tree import Form, Tree, k_ary, paths

pytestmark = pytest.mark.usefixtures("x64")
RULE = rules.get("score_block")


def test_levels_of_one_size_are_one_program():
  def loops(tree):
    rows = jax.ShapeDtypeStruct((1, tree.num_nodes, 5), jnp.float64)
    tokens = jax.ShapeDtypeStruct((1, tree.num_nodes), jnp.int32)

    def ask(tokens, draft, target):
      draft = instances.make_draft(tree, WITHOUT_REPLACEMENT, tokens, draft)
      return RULE.verify(draft, draft.topology(), target).node_probs

    text = jax.jit(ask).lower(tokens, rows, rows).as_text()
    return text.count("stablehlo.while")

  assert 0 < loops(paths(3, 2)) == loops(paths(6, 2))
  assert loops(k_ary(2, 2, 2)) > loops(k_ary(2, 2))


def test_one_token_is_accepted_nearly_as_often_as_pairs_can_be():
  p, q = instances.random_laws(40, 4, seed=6)
  actual, output = instances.at_one_position(RULE, p, q, 2, WITHOUT_REPLACEMENT)
  assert np.abs(output - q).max() < 1e-12
  best = [
    acceptances.set_optimum(target, lambda s, draft=draft: pairs_in(s, draft))
    for draft, target in zip(p, q, strict=True)
  ]
  share = actual / np.array(best)
  assert (share < 1 + 1e-12).all()
  assert share.mean() > 0.997
  assert share.min() > 0.98


def pairs_in(tokens, law):
  """P(both tokens of a pair are among some)."""
  inside = law[list(tokens)]
  return np.sum(inside / (1 - inside) * (inside.sum() - inside))


def test_it_accepts_more_than_traversal_of_the_same_drafts():
  rng = np.random.default_rng(1)
  p, q = rng.dirichlet(np.ones(3), (2, 6, 3))
  laws = [lambda c, x=x: x[len(c) % 6, c[-1]] for x in (p, q)]
  for tree in (paths(2, 2), k_ary(2, 2)):
    actual, other = (
      exact.block_law(
        rule, tree, *laws, siblings=WITHOUT_REPLACEMENT
      ).expected_accepted
      for rule in (RULE, rules.get("traversal"))
    )
    assert actual > 1.01 * other


def test_of_a_certain_token_only_ties_of_bins_are_lost():
  certain = lambda context: np.array([1.0, 0.0, 0.0])
  actual = exact.block_law(
    RULE, k_ary(2), certain, certain, siblings=WITHOUT_REPLACEMENT
  )
  assert actual.expected_accepted == pytest.approx(1 - 1 / 64, abs=1e-3)


def test_the_best_of_a_family_has_the_prescribed_law_whatever_the_powers():
  rng = np.random.default_rng(2)
  log_law = jnp.log(jnp.asarray(rng.dirichlet(np.ones(6))))
  below = jnp.concatenate([jnp.zeros(1), jnp.cumsum(rng.dirichlet(np.ones(9)))])
  second = WITHOUT_REPLACEMENT.child(log_law, jnp.array([3]), 2)
  family = score_block._Family.of(
    jnp.stack([log_law, second]), jnp.array([3, 0])
  )
  for spread in (0, 1, 7):
    powers = jnp.asarray(spread * rng.uniform(-1, 1, 6))
    scores = score_block._scores(family, powers, below)
    assert (np.diff(scores, axis=0) >= 0).all()
    np.testing.assert_allclose(family.product(scores), below, atol=1e-14)


@pytest.mark.parametrize(
  ("tree", "siblings", "words"),
  [
    (Tree((-1, 0, 0, 1, 1)), WITHOUT_REPLACEMENT, "equally deep"),
    (Tree((-1, 0, 0, 1, 2, 2)), WITHOUT_REPLACEMENT, "as many as"),
    (Tree((-1, 0, 0, 2, 1)), WITHOUT_REPLACEMENT, "order of their parents"),
    (k_ary(3), WITHOUT_REPLACEMENT, "one child or two"),
    (k_ary(2), IID, "siblings='without_replacement'"),
    (k_ary(2), GREEDY, "siblings='without_replacement'"),
    (Tree((-1, 0, 1), form=Form.MASKED), WITHOUT_REPLACEMENT, "form is"),
  ],
)  # fmt: skip
def test_other_trees_and_siblings_are_refused(tree, siblings, words):
  with pytest.raises(ValueError, match=words):
    RULE.check(tree, siblings)
