"""Losslessness, proved by enumeration through the shipped rules.

Context-dependent models (a random table indexed by a hash of the whole
context), every rule, trees and warps: the joint law of the next G + 1 tokens
must be the warped target's, to float64 rounding.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import exact, laws, rules
from specjax import tree as tree_lib
from specjax.tree import Tree, take_node
from specjax.types import Rule, Siblings, Verification
from specjax.warp import make_sampling, warp

LOSSLESS = [r for r in rules.RULES.values() if r.lossless]
WARPS = {
  "plain": {},
  "cold": dict(temperature=0.6),
  "top_p": dict(temperature=1.3, top_p=0.7),
  "top_k": dict(top_k=2),
  "greedy": dict(temperature=0.0),
}
TREES = {
  "root": tree_lib.chain(0),
  "chain1": tree_lib.chain(1),
  "chain3": tree_lib.chain(3),
  "paths2x2": tree_lib.paths(2, 2),
  "paths3": tree_lib.paths(1, 3),
  "uneven": Tree((-1, 0, 0, 1, 1)),
}


def context_laws(vocab, *, seed, warp_settings, noise=1.0, zeros=False):
  """Target and draft laws of every context, warped by the shipped warp."""
  target = toys.table(vocab, seed=seed)
  draft = toys.near(target, noise=noise, seed=seed + 1)
  if zeros:
    rng = np.random.default_rng(seed + 2)
    for logits in (target, draft):
      rows = np.arange(len(logits))
      logits[rows, rng.integers(vocab, size=len(rows))] = -np.inf
  sampling = make_sampling(1, **warp_settings)
  shipped = jax.jit(lambda x: warp(x[None], sampling)[0])

  def warp_row(logits):
    return np.exp(np.asarray(shipped(jnp.asarray(logits, jnp.float64))))

  return (
    toys.context_law(draft, warp_row), toys.context_law(target, warp_row)
  )  # fmt: skip


def fits(rule, tree):
  try:
    rule.check(tree, Siblings.IID)
  except ValueError:
    return False
  return True


CASES = [
  pytest.param(rule, tree, id=f"{rule.name}-{name}")
  for rule in LOSSLESS
  for name, tree in TREES.items()
  if fits(rule, tree)
]


@pytest.fixture(autouse=True)
def _x64():
  with jax.enable_x64(True):
    yield


def distance(rule, tree, *, dtype=jnp.float64, **options):
  vocab = 4 if tree.num_drafted <= 3 else 3
  draft, target = context_laws(vocab, **options)
  law = exact.block_law(rule, tree, draft, target, prefix=(1, 0), dtype=dtype)
  assert np.isfinite(law.output).all()
  expected = exact.target_block_law(
    target, length=tree.max_depth + 1, prefix=(1, 0)
  )
  return np.abs(law.output - expected).max()


@pytest.mark.parametrize("settings", WARPS.values(), ids=WARPS)
@pytest.mark.parametrize(("rule", "tree"), CASES)
def test_output_law_is_the_warped_targets(rule, tree, settings):
  assert distance(rule, tree, seed=0, warp_settings=settings) < 1e-10


@pytest.mark.parametrize(("rule", "tree"), CASES)
def test_output_law_holds_with_zero_probabilities(rule, tree):
  assert distance(rule, tree, seed=5, warp_settings={}, zeros=True) < 1e-10


@pytest.mark.parametrize(("rule", "tree"), CASES)
def test_output_law_holds_in_float32(rule, tree):
  assert (
    distance(rule, tree, seed=0, warp_settings={}, dtype=jnp.float32) < 1e-5
  )


@pytest.mark.parametrize(("rule", "tree"), CASES)
def test_node_probabilities_sum_to_one(rule, tree):
  draft, target = context_laws(3, seed=1, warp_settings={})
  law = exact.block_law(rule, tree, draft, target)
  assert law.accepted_at_least[0] == pytest.approx(1, abs=1e-12)


def test_point_mass_drafts_are_verified_exactly():
  # N-gram drafts: the law of every node is one-hot.
  _, target = context_laws(4, seed=2, warp_settings={})
  point = lambda context: np.eye(4)[sum(context) % 4]
  for rule in LOSSLESS:
    law = exact.block_law(
      rule, tree_lib.chain(3), point, target, siblings=Siblings.DETERMINISTIC
    )
    expected = exact.target_block_law(target, length=4, prefix=(0,))
    assert np.abs(law.output - expected).max() < 1e-10


def test_token_rule_accepts_one_minus_total_variation():
  draft, target = context_laws(4, seed=3, warp_settings={})
  law = exact.block_law(rules.get("token"), tree_lib.chain(1), draft, target)
  overlap = np.minimum(draft((0,)), target((0,))).sum()
  assert law.expected_accepted == pytest.approx(overlap, abs=1e-12)


def test_match_rule_accepts_the_probability_that_some_draft_matches():
  draft, target = context_laws(4, seed=3, warp_settings={})
  p, q = draft((0,)), target((0,))
  for count in (1, 2, 3):
    law = exact.block_law(
      rules.get("match"), tree_lib.paths(1, count), draft, target
    )
    expected = (q * (1 - (1 - p) ** count)).sum()
    assert law.expected_accepted == pytest.approx(expected, abs=1e-12)


def test_hand_computed_token_acceptance():
  # p = (.5, .3, .2), q = (.2, .3, .5): TV = .3; two equal steps in a row accept
  # .7 + .49 tokens.
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
  law = exact.block_law(
    rules.get("token"), tree_lib.chain(2), lambda c: p, lambda c: q
  )
  np.testing.assert_allclose(law.accepted_at_least, [1, 0.7, 0.49], atol=1e-12)


def test_equal_laws_are_always_accepted():
  _, target = context_laws(3, seed=4, warp_settings={})
  law = exact.block_law(rules.get("token"), tree_lib.chain(3), target, target)
  assert law.expected_accepted == pytest.approx(3, abs=1e-12)


def test_disjoint_supports_are_never_accepted():
  p, q = np.array([1.0, 0, 0]), np.array([0, 0.4, 0.6])
  for rule in LOSSLESS:
    law = exact.block_law(rule, tree_lib.chain(2), lambda c: p, lambda c: q)
    assert law.expected_accepted == 0
    np.testing.assert_allclose(
      law.output.sum((1, 2)), q, atol=1e-12
    )  # all from the residual


# ------------------------------------------------------ broken rules must fail


def _token_with(accept=None, next_log_probs=None) -> Rule:
  """The token rule with one part replaced."""
  token = rules.get("token")

  def verify(tree, draft, target):
    good = token.verify(tree, draft, target)
    node_probs = good.node_probs
    if accept is not None:
      drafted = draft.tokens[:, 1:]
      a = accept(
        laws.token_log_prob(target[:, :-1], drafted),
        laws.token_log_prob(draft.log_probs[:, :-1], drafted),
      )
      one = jnp.ones_like(a[:, :1])
      reach = jnp.cumprod(jnp.concatenate([one, a], 1), 1)
      node_probs = reach * jnp.concatenate([1 - a, one], 1)
    after = good.next_log_probs
    if next_log_probs is not None:
      after = lambda node: next_log_probs(tree, draft, target, node)
    return Verification(node_probs=node_probs, next_log_probs=after)

  return Rule(name="broken", verify=verify, lossless=True, check=token.check)


def _token_given(change) -> Rule:
  """The token rule, told another draft law than the one sampled from."""
  token = rules.get("token")

  def verify(tree, draft, target):
    told = dataclasses.replace(draft, log_probs=change(draft.log_probs))
    return token.verify(tree, told, target)

  return Rule(name="broken", verify=verify, lossless=True, check=token.check)


def _sharpened(log_probs):
  """The law at another temperature; leaves stay empty."""
  law = jax.nn.log_softmax(log_probs / 0.7, axis=-1)
  return jnp.where(jnp.isneginf(log_probs), -jnp.inf, law)


MUTANTS = {
  "draft law at another temperature": _token_given(_sharpened),
  "draft law in bfloat16": _token_given(
    lambda x: x.astype(jnp.bfloat16).astype(x.dtype)
  ),
  "ratio inverted": _token_with(accept=lambda q, p: laws.acceptance(p, q)),
  "always accepted": _token_with(accept=lambda q, p: jnp.ones_like(q)),
  "an epsilon in the ratio": _token_with(
    accept=lambda q, p: jnp.minimum(1, jnp.exp(q) / (jnp.exp(p) + 1e-6))
  ),
  "residual is the target": _token_with(
    next_log_probs=lambda tree, draft, target, node: take_node(target, node)
  ),
  "residual is the draft": _token_with(
    next_log_probs=lambda tree, draft, target, node: take_node(
      jnp.where(jnp.isneginf(draft.log_probs), target, draft.log_probs), node
    )
  ),
  "bonus from the wrong row": _token_with(
    next_log_probs=lambda tree, draft, target, node: laws.residual(
      take_node(target, jnp.minimum(node, tree.num_drafted - 1)),
      take_node(draft.log_probs, node),
    )
  ),
  "residual from the row before": _token_with(
    next_log_probs=lambda tree, draft, target, node: laws.residual(
      take_node(target, jnp.maximum(node - 1, 0)),
      take_node(draft.log_probs, jnp.maximum(node - 1, 0)),
    )
  ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_broken_rule_is_caught(mutant):
  assert distance(mutant, tree_lib.chain(2), seed=0, warp_settings={}) > 1e-8


def test_float64_without_x64_is_refused():
  with jax.enable_x64(False), pytest.raises(ValueError, match="enable_x64"):
    exact.block_law(
      rules.get("token"),
      tree_lib.chain(1),
      lambda c: np.ones(2) / 2,
      lambda c: np.ones(2) / 2,
    )
