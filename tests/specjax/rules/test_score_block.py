"""`score_block`: lossless where it is taken, and near the optimum."""

import acceptances
import instances
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules
from specjax.siblings import IID, WITHOUT_REPLACEMENT
from specjax.tree import Form, Tree, k_ary, paths

pytestmark = pytest.mark.usefixtures("x64")
RULE = rules.get("score_block")


def test_equal_size_levels_share_one_loop():
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


def test_single_token_acceptance_is_near_pair_optimum():
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


@pytest.mark.parametrize(
  ("tree", "siblings", "words"),
  [
    (Tree((-1, 0, 0, 1, 1)), WITHOUT_REPLACEMENT, "equal depth"),
    (Tree((-1, 0, 0, 2, 1)), WITHOUT_REPLACEMENT, "order of their parents"),
    (k_ary(3), WITHOUT_REPLACEMENT, "one or two children"),
    (k_ary(2), IID, "siblings='without_replacement'"),
    (Tree((-1, 0, 1), form=Form.MASKED), WITHOUT_REPLACEMENT, "form is"),
  ],
)  # fmt: skip
def test_unsupported_trees_and_siblings_are_rejected(tree, siblings, words):
  with pytest.raises(ValueError, match=words):
    RULE.check(tree, siblings)
