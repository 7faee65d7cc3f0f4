"""Losslessness, proved by enumeration through the shipped rules.

Context-dependent models (a random table indexed by a hash of the whole
context), every rule, draft law, tree and warp: the joint law of the next G + 1
tokens must be the warped target's, to float64 rounding. What must fail is in
mutants/.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from exact_cases import CASES, LOSSLESS, ONE_TREE, WARPS, distance, enumerable

from specjax import exact, rules
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.types import Draft

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(("rule", "tree", "siblings"), CASES)
def test_output_distribution_matches_warped_target(rule, tree, siblings):
  for settings in WARPS.values():
    actual = distance(
      rule, tree, siblings=siblings, seed=0, warp_settings=settings
    )
    assert actual < 1e-10, settings
  # Tokens of probability zero, in draft or target.
  actual = distance(
    rule, tree, siblings=siblings, seed=5, warp_settings={}, zeros=True
  )
  assert actual < 1e-10


@pytest.mark.parametrize(
  ("name", "siblings"),
  [("hub", siblings_lib.HUB), ("greedy_draft", siblings_lib.GREEDY)],
)
def test_float32_ties_are_drawn_and_verified_consistently(name, siblings):
  """Two tokens are equally probable to the rule, and in float64 are not."""
  p, q = np.array([0.35, 0.35 + 1e-9, 0.3 - 1e-9]), np.array([0.2, 0.7, 0.1])
  law = exact.block_law(
    rules.get(name), tree_lib.k_ary(2), lambda c: p, lambda c: q,
    siblings=siblings, dtype=jnp.float32,
  )  # fmt: skip
  np.testing.assert_allclose(law.output.sum(axis=1), q, atol=1e-6)


@pytest.mark.parametrize(("rule", "tree", "siblings"), ONE_TREE)
def test_draft_equal_to_target_is_lossless_and_fully_accepted(
  rule, tree, siblings
):
  vocab = 4 if tree.num_drafted <= 3 else 3
  _, target = toys.context_laws(vocab, seed=4, warp_settings={})
  law = exact.block_law(rule, tree, target, target, siblings=siblings)
  expected = exact.target_block_law(target, length=tree.max_depth + 1)
  assert np.abs(law.output - expected).max() < 1e-10
  # The path that is selected first has another law than the draft.
  selects = rule.name in ("multipath_block", "score_block")
  selects &= not tree.is_chain
  if rule.name != "match" and not siblings.deterministic and not selects:
    assert law.expected_accepted == pytest.approx(tree.max_depth, abs=1e-9)


@pytest.mark.parametrize(("rule", "tree", "siblings"), ONE_TREE)
def test_disjoint_supports_stay_lossless(rule, tree, siblings):
  p, q = np.array([1.0, 0, 0, 0]), np.array([0, 0.4, 0.5, 0.1])
  if tree.num_drafted > 3:
    p, q = p[:3], np.array([0, 0.4, 0.6])
  law = exact.block_law(rule, tree, lambda c: p, lambda c: q, siblings=siblings)
  expected = exact.target_block_law(lambda c: q, length=tree.max_depth + 1)
  assert np.abs(law.output - expected).max() < 1e-12
  if siblings.independent:
    assert law.expected_accepted == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSLESS))
def test_one_hot_drafts_stay_lossless(name):
  # N-gram drafts: the law of every node is one-hot, all paths are equal.
  for tree, vocab in ((tree_lib.chain(3), 4), (tree_lib.paths(2, 2), 3)):
    if not enumerable(LOSSLESS[name], tree, siblings_lib.IID):
      continue
    _, target = toys.context_laws(vocab, seed=2, warp_settings={})
    point = lambda context, vocab=vocab: np.eye(vocab)[sum(context) % vocab]
    law = exact.block_law(LOSSLESS[name], tree, point, target)
    expected = exact.target_block_law(target, length=tree.max_depth + 1)
    assert np.abs(law.output - expected).max() < 1e-10


def test_more_siblings_than_draft_support_stay_lossless():
  """Siblings without replacement from a law of one or two tokens."""
  p, q = np.array([0.7, 0.3, 0, 0]), np.array([0.1, 0.2, 0.3, 0.4])
  tree = tree_lib.k_ary(3)
  for siblings in (siblings_lib.WITHOUT_REPLACEMENT, siblings_lib.GREEDY):
    for name in ("recursive", "traversal", "match"):
      law = exact.block_law(
        LOSSLESS[name], tree, lambda c: p, lambda c: q, siblings=siblings
      )
      np.testing.assert_allclose(law.output.sum(1), q, atol=1e-12)


def test_unnormalized_distributions_are_rejected():
  q = np.array([0.2, 0.3, 0.5])
  with pytest.raises(ValueError, match=r"sum to 1; one is off by 0\.1"):
    exact.block_law(
      rules.get("token"), tree_lib.chain(2), lambda c: 1.1 * q, lambda c: q
    )


def test_rules_stay_in_float32_where_64_bits_are_enabled():
  synthetic = rules.get("synthetic"), tree_lib.chain(3), siblings_lib.IID
  for rule, tree, siblings in (*(case.values for case in ONE_TREE), synthetic):
    law = jax.ShapeDtypeStruct((2, tree.num_nodes, 5), jnp.float32)
    tokens = jax.ShapeDtypeStruct(law.shape[:2], jnp.int32)
    draft = Draft(tree=tree, siblings=siblings, tokens=tokens, log_probs=law)

    def ask(draft, target, rule=rule):
      actual = rule.verify(draft, draft.topology(), target)
      return actual.node_probs, actual.next_log_probs(jnp.zeros(2, jnp.int32))

    actual = jax.eval_shape(ask, draft, law)
    assert [x.dtype for x in actual] == [jnp.float32] * 2, rule.name
