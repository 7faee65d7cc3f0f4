"""Broken rules must fail the enumeration that their sound twins pass.

Each has one deliberate bug, where one is known the bug of a real system, and
goes through the very check of test_exact.py. A test method that lets a mutant
through is worth nothing.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import mutation
import numpy as np
import pytest
import toys

from specjax import distributions, exact, rules
from specjax import tree as tree_lib
from specjax.rules import (
  block_transport,
  kseq,
  multipath_block,
  nodewise,
  score_block,
  transport,
  traversal,
)
from specjax.siblings import HUB, IID, WITHOUT_REPLACEMENT
from specjax.tree import Tree, take_node
from specjax.types import Rule, Verification

# The limit of test_exact.py.
LIMIT = 1e-10


@functools.cache
def error(rule, tree, siblings=IID, seed=5, zeros=False) -> float:
  """The largest error of the joint law of the next tokens, in float64."""
  vocab = 4 if tree.num_drafted <= 3 else 3
  with jax.enable_x64(True):
    draft, target = toys.context_laws(
      vocab, seed=seed, warp_settings={}, zeros=zeros
    )
    law = exact.block_law(
      rule, tree, draft, target, siblings=siblings, prefix=(1, 0)
    )
  # What is caught must be a law, if the wrong one: no NaN, no lost mass.
  assert np.isfinite(law.output).all()
  assert law.output.sum() == pytest.approx(1, abs=1e-9)
  expected = exact.target_block_law(
    target, length=tree.max_depth + 1, prefix=(1, 0)
  )
  return float(np.abs(law.output - expected).max())


def like(rule, verify) -> Rule:
  """A broken rule for the trees and siblings of a sound one."""
  return Rule(
    name=f"broken {rule.name}", verify=verify, lossless=True, check=rule.check
  )


def token_with(accept=None, next_log_probs=None) -> Rule:
  """The token rule with one part replaced.

  Args:
    accept: `(log q(x) f[B, N], log p(x) f[B, N]) -> f[B, N]`.
    next_log_probs: `(draft, target_log_probs, node) -> f[B, V]`.
  """
  token = rules.get("token")

  def verify(draft, topology, target):
    good = token.verify(draft, topology, target)
    node_probs, after = good.node_probs, good.next_log_probs
    if accept is not None:
      drafted = draft.tokens[:, 1:]
      a = accept(
        distributions.token_log_prob(target[:, :-1], drafted),
        distributions.token_log_prob(draft.log_probs[:, 1:], drafted),
      )
      one = jnp.ones_like(a[:, :1])
      reach = jnp.cumprod(jnp.concatenate([one, a], 1), 1)
      node_probs = reach * jnp.concatenate([1 - a, one], 1)
    if next_log_probs is not None:
      after = functools.partial(next_log_probs, draft, target)
    return Verification(node_probs=node_probs, next_log_probs=after)

  return like(token, verify)


def told(rule, *, draft=None, target=None, siblings=None) -> Rule:
  """A sound rule, told other laws than those that were drawn from.

  Args:
    rule: the rule.
    draft, target: `f[B, N + 1, V] -> f[B, N + 1, V]`, what becomes of the laws.
    siblings: the siblings' law it is told.
  """

  def verify(real, topology, target_log_probs):
    log_probs = draft(real.log_probs) if draft else real.log_probs
    return rule.verify(
      dataclasses.replace(
        real, log_probs=log_probs, siblings=siblings or real.siblings
      ),
      topology,
      target(target_log_probs) if target else target_log_probs,
    )

  return like(rule, verify)


def patched(rule, module, **replaced) -> Rule:
  """A rule that is traced with functions of a module replaced."""

  def verify(draft, topology, target):
    with mock.patch.multiple(module, **replaced):
      actual = rule.verify(draft, topology, target)

    def next_log_probs(node):
      with mock.patch.multiple(module, **replaced):
        return actual.next_log_probs(node)

    return Verification(
      node_probs=actual.node_probs, next_log_probs=next_log_probs
    )

  return like(rule, verify)


def at_temperature(log_probs, temperature=0.7):
  """The law at another temperature; leaves stay empty."""
  law = jax.nn.log_softmax(log_probs / temperature, axis=-1)
  return jnp.where(jnp.isneginf(log_probs), -jnp.inf, law)


def drafted_after(draft):
  """The law of the token after each node of a chain; -inf after the last."""
  nothing = jnp.full_like(draft.log_probs[:, :1], -jnp.inf)
  return jnp.concatenate([draft.log_probs[:, 1:], nothing], axis=1)


def bad_residual(draft, target, node):
  """The draft's own law; the bonus is right."""
  law = drafted_after(draft)
  return take_node(jnp.where(jnp.isneginf(law), target, law), node)


def bad_bonus(draft, target, node):
  last = draft.tokens.shape[1] - 2
  return distributions.residual(
    take_node(target, jnp.minimum(node, last)),
    take_node(drafted_after(draft), node),
  )


def row_before(draft, target, node):
  before = jnp.maximum(node - 1, 0)
  return distributions.residual(
    take_node(target, before), take_node(drafted_after(draft), before)
  )


def fresh_token_ratio(target, draft, tokens, valid):
  """Accepts x with `min(1, p(x) / q(t))` for a fresh t ~ q; then comes q."""
  ratio = draft[0, tokens[0]] - target  # [t]
  test = jnp.sum(jnp.exp(target) * jnp.exp(jnp.minimum(ratio, 0)))
  return nodewise.Decision(
    accept=jnp.where(valid, test, 0), next_log_probs=target
  )


def dropped_if_unlikely(target, draft, tokens, valid):
  """A sampled token is dropped because its own probability is low."""
  draft = draft[0]
  good = distributions.acceptance(target[tokens], draft[tokens])
  unlikely = draft[tokens[0]] < -jnp.log(len(draft))
  return nodewise.Decision(
    accept=jnp.where(valid & ~unlikely, good, 0),
    next_log_probs=jnp.where(
      unlikely, target, distributions.residual(target, draft)
    ),
  )


def naive_tests(target, draft, tokens, valid):
  """Tests all k as single drafts, then the single-draft residual."""
  draft = draft[0]
  tests = distributions.acceptance(target[tokens], draft[tokens])
  return nodewise.Decision(
    accept=kseq.first_success(jnp.where(valid, tests, 0)),
    next_log_probs=distributions.residual(target, draft),
  )


def one_too_high(rule) -> Rule:
  """The round ends one node above the one that the rule says."""

  def verify(draft, topology, target):
    actual, tree = rule.verify(draft, topology, target), draft.tree
    shift = np.zeros((tree.num_nodes, tree.num_nodes))
    shift[np.arange(tree.num_nodes), np.maximum(tree.parents, 0)] = 1
    return dataclasses.replace(actual, node_probs=actual.node_probs @ shift)

  return like(rule, verify)


def stops_at_first_failure(rule) -> Rule:
  """Block verification whose tests end at the first that fails."""

  def verify(draft, topology, target):
    actual = rule.verify(draft, topology, target)
    # P(n is the last that passes) = h_n (1 - h_{n+1}) .. (1 - h_L).
    deeper = jnp.cumsum(actual.node_probs[:, ::-1], 1)[:, ::-1]
    left = 1 - jnp.pad(deeper[:, 1:], ((0, 0), (0, 1)))
    passes = distributions.share(actual.node_probs, left).at[:, 0].set(1)
    reach = jnp.cumprod(passes, axis=1)
    stays = 1 - jnp.pad(passes[:, 1:], ((0, 0), (0, 1)))
    return dataclasses.replace(actual, node_probs=reach * stays)

  return like(rule, verify)


def unofficial_settle(owed, target_log_probs, draft_log_probs, tokens, valid):
  """`traversal._settle`, but `w <- min(S / (1 - d(x)), 1)`."""
  given, left = [], target_log_probs
  for i, token in enumerate(tokens):
    law = draft_log_probs[i]
    mass = owed * jnp.exp(left)
    test = distributions.share(mass[token], jnp.exp(law[token]))
    given.append(jnp.where(valid[i], test, 0))
    excess = jnp.maximum(mass - jnp.exp(law), 0)
    left = jnp.where(valid[i], distributions.normalize(excess, left), left)
    update = distributions.share(jnp.sum(excess), 1 - jnp.exp(law[token]))
    owed = jnp.where(valid[i], update, owed)
  return jnp.stack(given), owed, left


def without_weight(state, *node, descend=score_block._descend):
  """`score_block._descend`, but it forgets what was selected above."""
  rest, passing, children = descend(state, *node)
  weight = jnp.ones_like(children.weight)
  return rest, passing, dataclasses.replace(children, weight=weight)


def fair_choice(family, scores, weight, selected=score_block._selected):
  """`score_block._selected`, but the law is that of a fair choice."""
  _, others = selected(family, scores, weight)
  even = family.with_other(jnp.ones_like(scores[:1]))[0]
  return even / even.sum(), others


def highest_ratio(levels, group, valid):
  """Selects the first candidate of the highest q / p, whatever the levels."""
  del levels
  first = jnp.argmax(jnp.where(valid, group, -1))
  return jnp.where(valid & (jnp.arange(len(group)) == first), 1.0, 0.0)


def at_least_share(wanted, offered):
  """`share` with `>=` for `>`: what is not wanted at all is accepted."""
  less = (wanted > 0) & (wanted < offered)
  ratio = jnp.where(less, wanted, 0) / jnp.where(less, offered, 1)
  return jnp.where(less, ratio, jnp.where(wanted >= 0, 1.0, 0.0))


def hub_turns_swapped(rule) -> Rule:
  """Pairs (x, a) are verified as (a, x), and the other way round."""
  order = np.array([0, 2, 1])

  def verify(draft, topology, target):
    swapped = dataclasses.replace(draft, tokens=draft.tokens[:, order])
    actual = rule.verify(swapped, topology, target)
    return dataclasses.replace(actual, node_probs=actual.node_probs[:, order])

  return like(rule, verify)


def ties_to_the_likelier(cdfs):
  """`block_transport._beats_others`, but a bin's ties go to the likelier."""
  low, mass = cdfs[..., :-1], jnp.diff(cdfs, axis=-1)
  index = jnp.arange(cdfs.shape[2])
  first = mass[:, :, None] > mass[:, :, :, None]
  first |= (mass[:, :, None] == mass[:, :, :, None]) & (index < index[:, None])[
    :, :, None
  ]  # entry (c, j): j goes before c
  others = jnp.where(first, low[:, :, None], (low + mass)[:, :, None])
  itself = jnp.eye(len(index), dtype=bool)[:, :, None]
  return jnp.prod(jnp.where(itself, 1, others), axis=3)


def by_first_scores(tree, scores, select=block_transport._selected):
  """Selects by the scores that the first tokens have, not the last."""
  return select(tree, (scores[0], *[scores[1]] * (len(scores) - 1)))


def not_absorbed(parts, shared, within):
  """`block_transport._absorbed`, but every token keeps an even score."""
  del shared
  even = jnp.linspace(0, 1, within.shape[-1], dtype=parts.dtype)
  return jnp.broadcast_to(even, (*parts.shape[:-1], len(even)))


CHAIN = tree_lib.chain(2)
PAIR = tree_lib.k_ary(2)
UNEVEN = Tree((-1, 0, 0, 1))
TOKEN, RECURSIVE = rules.get("token"), rules.get("recursive")
PATHS, SCORES = tree_lib.paths(2, 2), rules.get("block_transport")
BLOCK, MULTIPATH = rules.get("block"), rules.get("multipath_block")

# What is broken, the rule, its sound twin, and the case that tells them apart.
RULES = {
  # HF transformers #47932: candidate generators return a q that they did not
  # sample from.
  "draft law at another temperature": (
    told(TOKEN, draft=at_temperature), TOKEN, CHAIN),
  # No known system; DeepSpec #31 is the same the other way round (see below).
  "draft law in bfloat16": (
    told(TOKEN, draft=lambda x: x.astype(jnp.bfloat16).astype(x.dtype)),
    TOKEN, CHAIN),
  # OpenVINO's validate_candidate: the ratio is inverted.
  "ratio inverted": (
    token_with(accept=lambda q, p: distributions.acceptance(p, q)),
    TOKEN, CHAIN),
  # OpenVINO's validate_candidate: and evaluated at two different tokens.
  "ratio of a fresh token": (
    like(TOKEN, nodewise.verify_nodes(fresh_token_ratio)), TOKEN, CHAIN),
  # No known system.
  "always accepted": (
    token_with(accept=lambda q, p: jnp.ones_like(q)), TOKEN, CHAIN),
  # tpu-inference: 1e-9 is added in the ratio. No sampling would ever see it.
  "an epsilon in the ratio": (
    token_with(
      accept=lambda q, p: jnp.minimum(1, jnp.exp(q) / (jnp.exp(p) + 1e-9))),
    TOKEN, CHAIN),
  # Spec-RL #14: resampling from the target instead of the residual.
  "residual is the target": (
    token_with(next_log_probs=lambda draft, q, node: take_node(q, node)),
    TOKEN, CHAIN),
  # No known system.
  "residual is the draft": (
    token_with(next_log_probs=bad_residual), TOKEN, CHAIN),
  # No known system.
  "bonus from the wrong row": (
    token_with(next_log_probs=bad_bonus), TOKEN, CHAIN),
  # No known system.
  "residual from the row before": (
    token_with(next_log_probs=row_before), TOKEN, CHAIN),
  # No known system.
  "tests against the row before": (
    told(TOKEN, target=lambda q: jnp.roll(q, 1, axis=1)), TOKEN, CHAIN),
  # No known system.
  "off by one depth": (one_too_high(TOKEN), TOKEN, CHAIN),
  # No known system; any confidence threshold on sampled tokens does it.
  "value-dependent dropping": (
    like(TOKEN, nodewise.verify_nodes(dropped_if_unlikely)), TOKEN, CHAIN),
  # vllm-ascend #7603, #7807 and #7808: block verification wrong (how, we do not
  # know).
  "block verification stops at the first failure": (
    stops_at_first_failure(BLOCK), BLOCK, CHAIN),
  # No known system. Seen only where the target's probability is 0.
  ">= for > in a share": (
    patched(BLOCK, distributions, share=at_least_share),
    BLOCK, CHAIN, IID, 0, True),
  # No known system.
  "siblings taken for independent": (
    told(RECURSIVE, siblings=IID), RECURSIVE, PAIR, WITHOUT_REPLACEMENT),
  # No known system.
  "k independent tests": (
    like(RECURSIVE, nodewise.verify_nodes(naive_tests)), RECURSIVE, PAIR),
  # A known unofficial implementation of traversal verification.
  "traversal updates with S / (1 - d(x))": (
    patched(traversal.RULE, traversal, _settle=unofficial_settle),
    traversal.RULE, UNEVEN, WITHOUT_REPLACEMENT),
  # No known system. The factor g / p of the selected path's law is left out.
  "selected path with the plain draft law": (
    patched(MULTIPATH, multipath_block,
      jnp=mutation.copy_of(jnp, log=jnp.zeros_like)),
    MULTIPATH, PAIR),
  # No known system; what a search that returns the lower end would do.
  "k-SEQ's scale is below the valid ones": (
    patched(
      kseq.RULE, kseq,
      solve=lambda *a, solve=kseq.solve, **k: (1 - 1e-6) * solve(*a, **k)),
    kseq.RULE, PAIR),
  # No known system.
  "transport without its levels": (
    patched(transport.RULE, transport, pick_probs=highest_ratio),
    transport.RULE, PAIR),
  # No known system.
  "scores that are not made those of the family's best": (
    patched(score_block.RULE, score_block, _scores=lambda family, powers, below:
      below[:, None] ** jnp.exp(powers)),
    score_block.RULE, PATHS, WITHOUT_REPLACEMENT),
  # No known system.
  "a selected path that forgets its score": (
    patched(score_block.RULE, score_block, _descend=without_weight),
    score_block.RULE, PATHS, WITHOUT_REPLACEMENT),
  # No known system.
  "a path of the best score taken for any": (
    patched(score_block.RULE, score_block, _selected=fair_choice),
    score_block.RULE, PAIR, WITHOUT_REPLACEMENT),
  # No known system.
  "a bin's ties go to the likelier score": (
    patched(SCORES, block_transport, _beats_others=ties_to_the_likelier),
    SCORES, PATHS),
  # No known system.
  "selection by scores: residual of the unscaled target": (
    patched(SCORES, block_transport,
      _residual=lambda owed, target, spent: jnp.maximum(target - spent, 0)),
    SCORES, PATHS),
  # No known system.
  "selection by scores: before the last level": (
    patched(SCORES, block_transport, _selected=by_first_scores),
    SCORES, PATHS),
  # No known system. Of a seed that leaves a residual at the root.
  "selection by scores: tokens do not share in them": (
    patched(SCORES, block_transport, _absorbed=not_absorbed),
    SCORES, PATHS, IID, 0),
  # No known system.
  "hub pairs the wrong way round": (
    hub_turns_swapped(rules.get("hub")), rules.get("hub"), PAIR, HUB),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_broken_rules_are_caught(name):
  mutant, twin, *case = RULES[name]
  assert error(twin, *case) < LIMIT
  assert error(mutant, *case) > LIMIT


def block_law(rule, p, q):
  with jax.enable_x64(True):
    law = exact.block_law(
      rule,
      tree_lib.chain(1),
      lambda context: np.array(p),
      lambda context: np.array(q),
    )
  return law.output.sum(1)


def test_mutants_reproduce_numbers_from_real_bugs():
  # OpenVINO, enumerated by hand: (.94, .06) where (.5, .5) is right.
  broken = RULES["ratio of a fresh token"][0]
  p, q = (0.9, 0.1), (0.5, 0.5)
  np.testing.assert_allclose(block_law(TOKEN, p, q), q, atol=LIMIT)
  np.testing.assert_allclose(block_law(broken, p, q), (0.94, 0.06), atol=LIMIT)
  # Equal laws (.6, .4), the second token dropped: .6 + .4 .6 is the first's.
  broken = RULES["value-dependent dropping"][0]
  p = (0.6, 0.4)
  np.testing.assert_allclose(block_law(TOKEN, p, p), p, atol=LIMIT)
  np.testing.assert_allclose(block_law(broken, p, p), (0.84, 0.16), atol=LIMIT)
