"""Rules with a known target: the law they state is the law that comes out."""

import dataclasses
import functools
import itertools

import instances
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from instances import P, Q

from specjax import exact, rules, siblings, tree
from specjax.rules import known_target
from specjax.types import Draft

pytestmark = pytest.mark.usefixtures("x64")
LIMIT = 1e-10
PI = {
  "ensemble(weight=0.6)": [0.32, 0.3, 0.38],
  # .4 is kept of the first token; the rest of it goes to the third.
  "lenient(lenience=0.5)": [0.4, 0.3, 0.3],
  # JS(p, q) = .5 log(.5 / .35) + .2 log(.2 / .35) = .0664.
  "fuzzy(threshold=0.07)": P,
  "fuzzy(threshold=0.06)": Q,
  "cascade_chow(alpha=0.51)": P,
  "cascade_chow(alpha=0.49)": Q,
  "cascade_diff(alpha=0.01)": P,
  "cascade_diff(alpha=-0.01)": Q,
  "cascade_opt(alpha=0.01)": P,
  "cascade_opt(alpha=-0.01)": Q,
  # A is the first token; the last two; the third.
  "cascade_token(alpha=0.1, version=1)": [0.6, 0.15, 0.25],
  "cascade_token(alpha=0.25, version=2)": [0.1, 0.45, 0.45],
  "cascade_token(alpha=0.35, version=3)": [0.16, 0.24, 0.6],
  # q^2 / p, and q^2 / p of the tokens that are plausible.
  "contrastive(alpha=0.1, beta=1.0)": np.array([8, 30, 125]) / 163,
  "contrastive(alpha=0.5, beta=1.0)": np.array([0, 30, 125]) / 155,
  # h = .2 + sqrt(.5 .16) = .4828 of the first; c = .6464 leaves the third.
  "cactus(delta=0.25)": [0.2 + 0.08**0.5, 0.3, 0.5 - 0.08**0.5],
}
# Parameters with which nothing is relaxed.
STRICT = (
  "ensemble(weight=1)", "lenient(lenience=1)", "fuzzy(threshold=0)",
  "cascade_chow(alpha=0)", "cascade_diff(alpha=-1)", "cascade_opt(alpha=-9)",
  "cascade_token(alpha=-1, version=1)", "cascade_token(alpha=-1, version=2)",
  "contrastive(alpha=0, beta=0)", "cactus(delta=0)",
)  # fmt: skip
# Parameters with which the draft's own law comes out.
FREE = (
  "ensemble(weight=0)", "fuzzy(threshold=0.7)", "cascade_chow(alpha=1)",
  "cascade_diff(alpha=1)", "cascade_opt(alpha=99)",
  "cascade_token(alpha=1, version=3)",
)  # fmt: skip
BETWEEN = (
  "ensemble(weight=0.3)", "lenient(lenience=0.6)", "fuzzy(threshold=0.1)",
  "cascade_chow(alpha=0.5)", "cascade_diff(alpha=0.1)",
  "cascade_opt(alpha=0.1)", "cactus(delta=0.05)", "cascade_token(alpha=0.5)",
  "contrastive()",
)  # fmt: skip
MULTI = ("recursive", "traversal", "kseq", "transport")


def outcome(name, p, q):
  """Acceptance `f64[I]` and law `f64[I, V]` of one position, enumerated."""
  return instances.at_one_position(rules.get(name), p, q, 1)


def distance(p, q):
  return np.abs(p - q).sum(-1) / 2


LAWS = instances.random_laws(40, 5, seed=0)
ZEROS = instances.random_laws(20, 5, seed=1, zeros=True)


@pytest.mark.parametrize("name", PI)
def test_output_matches_hand_computed_distribution(name):
  accepted, law = outcome(name, P[None], Q[None])
  np.testing.assert_allclose(law[0], PI[name], atol=1e-12)
  assert accepted[0] == pytest.approx(np.minimum(P, PI[name]).sum(), abs=1e-12)


# ------------------------------------------------------------------- a block


@functools.cache
def laws_of_contexts(zeros):
  """Draft and target after every text of up to two tokens, V = 3."""
  draft, target = toys.context_laws(
    3, seed=5, warp_settings={}, zeros=zeros, noise=1.5
  )
  texts = [
    (1, 0, *more)
    for n in range(3)
    for more in itertools.product(range(3), repeat=n)
  ]
  both = (np.array([law(text) for text in texts]) for law in (draft, target))
  return draft, target, texts, *both


def block_error(name, shape, zeros=False):
  """Largest error of the joint law of a block, and the first token's distance.

  What the round did not emit is completed by pi, and by q after the last level,
  where nothing is drafted; so are the laws that it is compared with.
  """
  draft, target, texts, p, q = laws_of_contexts(zeros)
  _, stated = outcome(name.partition(", base")[0].rstrip(")") + ")", p, q)
  pi = dict(zip(texts, stated, strict=True))
  rule = rules.get(name)
  law = exact.block_law(rule, shape, draft, target, prefix=(1, 0))
  depth = shape.max_depth
  after = lambda text: target(text) if len(text) == depth + 2 else pi[text]
  actual, expected = law.emitted[0], np.array(after((1, 0)))
  for g in range(1, depth + 1):
    next_laws = np.array(
      [after((1, 0, *more)) for more in itertools.product(range(3), repeat=g)]
    ).reshape((3,) * (g + 1))
    actual = actual[..., None] * next_laws + law.emitted[g]
    expected = expected[..., None] * next_laws
  assert law.reported_total_variation == pytest.approx(
    law.total_variation, abs=1e-12
  )
  return np.abs(actual - expected).max(), law.total_variation


@pytest.mark.parametrize("name", BETWEEN)
def test_block_joint_distribution_matches_pi(name):
  for zeros in (False, True):
    error, _ = block_error(name, tree.chain(2), zeros)
    assert error < LIMIT


@pytest.mark.parametrize("base", known_target.BASES)
def test_every_base_rule_matches_pi_over_a_block(base):
  name = f"contrastive(alpha=0.1, beta=0.5, base={base!r})"
  shape = tree.paths(2, 2) if base in MULTI else tree.chain(2)
  error, away = block_error(name, shape)
  assert error < LIMIT
  assert away > 0.01


@pytest.mark.parametrize("base", ["recursive", "traversal"])
def test_equal_siblings_with_one_continuation_match_pi(base):
  """Only the second is continued; the first token's law is pi's, however."""
  draft, target, _, p, q = laws_of_contexts(False)
  rule = rules.get(f"ensemble(weight=0.4, base={base!r})")
  law = exact.block_law(
    rule, tree.Tree((-1, 0, 0, 2)), draft, target, prefix=(1, 0)
  )
  first = law.output.sum((1, 2))
  np.testing.assert_allclose(first, 0.4 * q[0] + 0.6 * p[0], atol=LIMIT)
  assert law.reported_total_variation == pytest.approx(
    law.total_variation, abs=1e-12
  )


# -------------------------------------------------------------------- limits


@pytest.mark.parametrize("name", STRICT)
def test_strict_parameters_are_lossless(name):
  for p, q in (LAWS, ZEROS):
    accepted, law = outcome(name, p, q)
    np.testing.assert_allclose(law, q, atol=LIMIT)
    np.testing.assert_allclose(accepted, np.minimum(p, q).sum(1), atol=LIMIT)


@pytest.mark.parametrize("name", FREE)
def test_fully_relaxed_parameters_accept_every_draft(name):
  for p, q in (LAWS, ZEROS):
    accepted, law = outcome(name, p, q)
    np.testing.assert_allclose(law, p, atol=LIMIT)
    np.testing.assert_allclose(accepted, 1, atol=LIMIT)


# ------------------------------------------------- what is not there, refusals


def test_missing_draft_nodes_fall_back_to_target():
  """Of two drafted nodes the second is not there; its law must not be read."""
  p, q = jnp.log(jnp.asarray(P)), jnp.log(jnp.asarray(Q))
  draft = Draft(
    tree=dataclasses.replace(tree.chain(2), form=tree.Form.MASKED),
    siblings=siblings.IID, tokens=jnp.array([[0, 2, 1]]),
    log_probs=jnp.stack([p, p, jnp.full(3, jnp.nan)])[None],
    parents=jnp.array([[-1, 0, -1]]),
  )  # fmt: skip
  actual = rules.get("ensemble(weight=0.5)").verify(
    draft, draft.topology(), jnp.stack([q] * 3)[None]
  )
  np.testing.assert_allclose(actual.node_probs, [[0, 1, 0]], atol=1e-12)
  np.testing.assert_allclose(actual.total_variation, [[0.15, 0, 0]], atol=1e-12)
  after = jnp.exp(actual.next_log_probs(jnp.array([1])))
  np.testing.assert_allclose(after, [Q], atol=1e-12)


def test_deterministic_draft_is_treated_as_point_mass():
  q = jnp.log(jnp.asarray(Q))
  draft = Draft(
    tree=tree.chain(1), siblings=siblings.GIVEN,
    tokens=jnp.array([[0, 0]]), log_probs=None,
  )  # fmt: skip
  actual = rules.get("ensemble(weight=0.5)").verify(
    draft, draft.topology(), jnp.stack([q, q])[None]
  )
  np.testing.assert_allclose(actual.node_probs, [[0.4, 0.6]], atol=1e-12)
  np.testing.assert_allclose(actual.total_variation, [[0.4, 0]], atol=1e-12)


def test_base_rule_validates_tree_and_siblings():
  with pytest.raises(ValueError, match="single path"):
    rules.get("fuzzy").check(tree.k_ary(2), siblings.IID)
  by_recursion = rules.get("fuzzy(base='recursive')")
  by_recursion.check(tree.k_ary(2), siblings.IID)
  for certain in (siblings.GREEDY, siblings.TOP_K, siblings.GIVEN):
    with pytest.raises(
      ValueError, match="whose first child may be deterministic"
    ):
      by_recursion.check(tree.k_ary(2), certain)
    by_recursion.check(tree.chain(2), certain)
