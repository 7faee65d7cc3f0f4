"""What is broken must fail: rules, samplers, drafters and loops with one bug.

Each mutant has one deliberate bug, where one is known the bug of a real system,
and goes through the very check that its unbroken twin passes: enumeration
(`specjax.exact`) for rules, the law of many sampled rows for samplers, equality
of tokens on table-lookup models for caches. A test method that lets a mutant
through is worth nothing.
"""

import contextlib
import dataclasses
import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import cache as cache_lib
from specjax import decode, drafters, exact, laws, rules, sampling
from specjax import tree as tree_lib
from specjax import warp as warp_lib
from specjax.drafters import model as model_drafter
from specjax.rules import kseq, multipath_block, nodewise, transport, traversal
from specjax.siblings import HUB, IID, WITHOUT_REPLACEMENT
from specjax.tree import Tree, take_node
from specjax.types import Rule, Verification
from specjax.warp import make_sampling

# ------------------------------------------------------- rules, by enumeration

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

  def verify(tree, siblings, draft, target):
    good = token.verify(tree, siblings, draft, target)
    node_probs, after = good.node_probs, good.next_log_probs
    if accept is not None:
      drafted = draft.tokens[:, 1:]
      a = accept(
        laws.token_log_prob(target[:, :-1], drafted),
        laws.token_log_prob(draft.log_probs[:, :-1], drafted),
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

  def verify(tree, actual, real, target_log_probs):
    log_probs = draft(real.log_probs) if draft else real.log_probs
    return rule.verify(
      tree,
      siblings or actual,
      dataclasses.replace(real, log_probs=log_probs),
      target(target_log_probs) if target else target_log_probs,
    )

  return like(rule, verify)


def patched(rule, module, **replaced) -> Rule:
  """A rule that is traced with functions of a module replaced."""

  def verify(tree, siblings, draft, target):
    with mock.patch.multiple(module, **replaced):
      found = rule.verify(tree, siblings, draft, target)

    def next_log_probs(node):
      with mock.patch.multiple(module, **replaced):
        return found.next_log_probs(node)

    return Verification(
      node_probs=found.node_probs, next_log_probs=next_log_probs
    )

  return like(rule, verify)


def copy_of(module, **replaced):
  """What a module's name may stand for instead: it, with other functions."""
  return types.SimpleNamespace(**vars(module) | replaced)


def at_temperature(log_probs, temperature=0.7):
  """The law at another temperature; leaves stay empty."""
  law = jax.nn.log_softmax(log_probs / temperature, axis=-1)
  return jnp.where(jnp.isneginf(log_probs), -jnp.inf, law)


def bad_residual(draft, target, node):
  """The draft's own law; the bonus is right."""
  leaf = jnp.isneginf(draft.log_probs)
  return take_node(jnp.where(leaf, target, draft.log_probs), node)


def bad_bonus(draft, target, node):
  last = draft.tokens.shape[1] - 2
  return laws.residual(
    take_node(target, jnp.minimum(node, last)), take_node(draft.log_probs, node)
  )


def row_before(draft, target, node):
  before = jnp.maximum(node - 1, 0)
  return laws.residual(
    take_node(target, before), take_node(draft.log_probs, before)
  )


def fresh_token_ratio(siblings, target, draft, tokens, valid):
  """Accepts x with `min(1, p(x) / q(t))` for a fresh t ~ q; then comes q."""
  del siblings
  ratio = draft[tokens[0]] - target  # [t]
  test = jnp.sum(jnp.exp(target) * jnp.exp(jnp.minimum(ratio, 0)))
  return nodewise.Decision(
    accept=jnp.where(valid, test, 0), next_log_probs=target
  )


def dropped_if_unlikely(siblings, target, draft, tokens, valid):
  """A sampled token is dropped because its own probability is low."""
  del siblings
  good = laws.acceptance(target[tokens], draft[tokens])
  unlikely = draft[tokens[0]] < -jnp.log(len(draft))
  return nodewise.Decision(
    accept=jnp.where(valid & ~unlikely, good, 0),
    next_log_probs=jnp.where(unlikely, target, laws.residual(target, draft)),
  )


def naive_tests(siblings, target, draft, tokens, valid):
  """Tests all k as single drafts, then the single-draft residual."""
  del siblings
  tests = laws.acceptance(target[tokens], draft[tokens])
  return nodewise.Decision(
    accept=kseq.first_success(jnp.where(valid, tests, 0)),
    next_log_probs=laws.residual(target, draft),
  )


def one_too_high(rule) -> Rule:
  """The round ends one node above the one that the rule says."""

  def verify(tree, siblings, draft, target):
    found = rule.verify(tree, siblings, draft, target)
    shift = np.zeros((tree.num_nodes, tree.num_nodes))
    shift[np.arange(tree.num_nodes), np.maximum(tree.parents, 0)] = 1
    return dataclasses.replace(found, node_probs=found.node_probs @ shift)

  return like(rule, verify)


def stops_at_first_failure(rule) -> Rule:
  """Block verification whose tests end at the first that fails."""

  def verify(tree, siblings, draft, target):
    found = rule.verify(tree, siblings, draft, target)
    # P(n is the last that passes) = h_n (1 - h_{n+1}) .. (1 - h_L).
    deeper = jnp.cumsum(found.node_probs[:, ::-1], 1)[:, ::-1]
    left = 1 - jnp.pad(deeper[:, 1:], ((0, 0), (0, 1)))
    passes = laws.share(found.node_probs, left).at[:, 0].set(1)
    reach = jnp.cumprod(passes, axis=1)
    stays = 1 - jnp.pad(passes[:, 1:], ((0, 0), (0, 1)))
    return dataclasses.replace(found, node_probs=reach * stays)

  return like(rule, verify)


def unofficial_settle(
  siblings, owed, target_log_probs, draft_log_probs, tokens, valid
):
  """`traversal._settle`, but `w <- min(S / (1 - d(x)), 1)`."""
  given, left = [], target_log_probs
  for i, token in enumerate(tokens):
    law = siblings.child(draft_log_probs, tokens[:i], jnp.sum(valid))
    mass = owed * jnp.exp(left)
    given.append(laws.share(mass[token], jnp.exp(law[token])))
    excess = jnp.maximum(mass - jnp.exp(law), 0)
    left = jnp.where(valid[i], laws.normalize(excess, left), left)
    update = laws.share(jnp.sum(excess), 1 - jnp.exp(law[token]))
    owed = jnp.where(valid[i], update, owed)
  return jnp.stack(given), owed, left


def highest_ratio(levels, group, valid):
  """Selects the first candidate of the highest q / p, whatever the levels."""
  del levels
  first = jnp.argmax(jnp.where(valid, group, -1))
  return jnp.where(valid & (jnp.arange(len(group)) == first), 1.0, 0.0)


def at_least_share(wanted, offered):
  """`laws.share` with `>=` for `>`: what is not wanted at all is accepted."""
  less = (wanted > 0) & (wanted < offered)
  ratio = jnp.where(less, wanted, 0) / jnp.where(less, offered, 1)
  return jnp.where(less, ratio, jnp.where(wanted >= 0, 1.0, 0.0))


def hub_turns_swapped(rule) -> Rule:
  """Pairs (x, a) are verified as (a, x), and the other way round."""
  order = np.array([0, 2, 1])

  def verify(tree, siblings, draft, target):
    swapped = dataclasses.replace(draft, tokens=draft.tokens[:, order])
    found = rule.verify(tree, siblings, swapped, target)
    return dataclasses.replace(found, node_probs=found.node_probs[:, order])

  return like(rule, verify)


CHAIN = tree_lib.chain(2)
PAIR = tree_lib.k_ary(2)
UNEVEN = Tree((-1, 0, 0, 1))
TOKEN, RECURSIVE = rules.get("token"), rules.get("recursive")
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
    token_with(accept=lambda q, p: laws.acceptance(p, q)), TOKEN, CHAIN),
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
    patched(BLOCK, laws, share=at_least_share), BLOCK, CHAIN, IID, 0, True),
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
    patched(MULTIPATH, multipath_block, jnp=copy_of(jnp, log=jnp.zeros_like)),
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
  "hub pairs the wrong way round": (
    hub_turns_swapped(rules.get("hub")), rules.get("hub"), PAIR, HUB),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_caught(name):
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


def test_numbers_that_were_reported_of_real_bugs():
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


# ------------------------------------- samplers and drafters, by many samples

# Each mutant is a program of its own: compiling it is most of the work.
compiled = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
ROWS = 20_000
SETTINGS = dict(temperature=2.0, top_p=0.8)


def total_variation_limit(samples, cells, *, chance=1e-6):
  """What an empirical law is farther off than with at most that chance.

  Its expected distance is at most `sqrt((cells - 1) / samples) / 2`, and one
  sample moves it by at most `1 / samples` (McDiarmid).
  """
  mean = np.sqrt((cells - 1) / samples) / 2
  return mean + np.sqrt(np.log(1 / chance) / (2 * samples))


def plain_law(logits, *, temperature, top_p):
  """Plain sampling in NumPy: temperature first, then top-p."""
  mass = np.exp((logits - logits.max()) / temperature)
  probs = mass / mass.sum()
  before = np.array([probs[probs > p].sum() for p in probs])
  probs = np.where(before < top_p, probs, 0)
  return probs / probs.sum()


def sampled(target, draft, *, count, settings, change=lambda drafter: drafter):
  """The first tokens of many rows, `i32[R, count]`, drafting one at a time."""
  vocab = target.shape[1]
  model = toys.table_model(vocab)
  drafter = drafters.model.drafter(
    model, tree=tree_lib.chain(1), vocab_size=vocab
  )
  decoder = specjax.make_decoder(model, drafter=change(drafter))
  params = specjax.Params(target=jnp.asarray(target), draft=jnp.asarray(draft))

  @compiled  # a new function each time, for the patches to be traced
  def run(params, prompts, key, settings):
    state = decoder.init(
      params, prompts, jnp.ones(ROWS, int), key,
      buffer_length=1 + count, max_new_tokens=count, sampling=settings,
    )  # fmt: skip
    return decoder.generate(params, state).tokens[:, 1 : 1 + count]

  prompts = jnp.zeros((ROWS, 1), int)
  settings = make_sampling(ROWS, **settings)
  return np.asarray(run(params, prompts, jax.random.key(0), settings))


def is_plain_sampling(tokens, target, settings) -> bool:
  """Whether the tokens' joint law is that of plain sampling, to a bound."""
  vocab, count = target.shape[1], tokens.shape[1]
  law = toys.context_law(target, lambda row: plain_law(row, **settings))
  expected = exact.target_block_law(law, length=count).ravel()
  cells = np.ravel_multi_index(tuple(tokens.T), (vocab,) * count)
  found = np.bincount(cells, minlength=vocab**count) / len(tokens)
  distance = np.abs(found - expected).sum() / 2
  return distance < total_variation_limit(len(tokens), vocab**count)


def verifier_warps(warp):
  """The verifier alone makes its laws by another function."""
  return mock.patch.object(decode, "warp_lib", copy_of(warp_lib, warp=warp))


def shared_noise():
  return mock.patch.object(
    sampling,
    "next_token_keys",
    lambda keys: sampling.drafted_node_keys(keys, range(1, 2))[:, 0],
  )


def mask_before_temperature(logits, settings):
  one = jnp.ones_like(settings.temperature)
  kept = warp_lib.warp(logits, dataclasses.replace(settings, temperature=one))
  return warp_lib.warp(kept, dataclasses.replace(settings, top_p=one))


def without_temperature(logits, settings):
  one = jnp.ones_like(settings.temperature)
  return warp_lib.warp(logits, dataclasses.replace(settings, temperature=one))


def drops_unlikely(drafter):
  """A drafter that takes back what it sampled if that has a low probability.

  It proposes token 0 instead, and truly says that it was sure of it.
  """

  def propose(*args):
    draft, *rest = drafter.propose(*args)
    law = draft.log_probs[:, 0]
    drawn = laws.token_log_prob(law, draft.tokens[:, 1])
    drop = drawn < -jnp.log(law.shape[-1])
    sure = jnp.where(jnp.arange(law.shape[-1]) == 0, 0, -jnp.inf)
    tokens = draft.tokens.at[:, 1].set(jnp.where(drop, 0, draft.tokens[:, 1]))
    law = jnp.where(drop[:, None], sure, law)
    log_probs = draft.log_probs.at[:, 0].set(law)
    return dataclasses.replace(draft, tokens=tokens, log_probs=log_probs), *rest

  return dataclasses.replace(drafter, propose=propose)


TARGET = toys.table(4, seed=0)
NEAR = toys.near(TARGET, noise=1.0, seed=1)


@functools.cache
def plain_tokens():
  """The twin's, which samplers and drafters share."""
  return sampled(TARGET, NEAR, count=2, settings=SETTINGS)


SAMPLERS = {
  # vLLM #54282: draft noise shared with the residual.
  "draft noise shared with the residual": dict(patch=shared_noise),
  # tpu-inference: the verifier masks top-k and top-p before temperature, its
  # ordinary sampler divides first.
  "top-p before temperature": dict(
    patch=lambda: verifier_warps(mask_before_temperature)
  ),
  # SGLang #39253: ROCm EAGLE verification ignores temperature.
  "verification without temperature": dict(
    patch=lambda: verifier_warps(without_temperature)
  ),
  # No known system; any confidence threshold on sampled tokens does it.
  "value-dependent dropping": dict(change=drops_unlikely),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_broken_sampler_is_caught(name):
  options = dict(SAMPLERS[name])
  assert is_plain_sampling(plain_tokens(), TARGET, SETTINGS)
  with options.pop("patch", contextlib.nullcontext)():
    tokens = sampled(TARGET, NEAR, count=2, settings=SETTINGS, **options)
  assert not is_plain_sampling(tokens, TARGET, SETTINGS)


def test_drawing_in_bfloat16_is_caught():
  """DeepSpec #31: tokens sampled in bf16, probabilities in f32."""

  def draw(keys, law):
    one = lambda key, row: jax.random.categorical(key, row.astype(jnp.bfloat16))
    return jax.vmap(jax.vmap(one))(keys, law)

  # One law over many tokens, of which nearly all drafts are accepted.
  target = toys.table(64, seed=0, contexts=1)
  options = dict(count=1, settings=dict(temperature=1.0, top_p=1.0))
  tokens = sampled(target, target, **options)
  assert is_plain_sampling(tokens, target, options["settings"])
  low = copy_of(sampling, categorical=draw)
  with mock.patch.object(model_drafter, "sampling", low):
    tokens = sampled(target, target, **options)
  assert not is_plain_sampling(tokens, target, options["settings"])


# ------------------------------------------------- loops and caches, by tokens

VOCAB, BUDGET = 11, 12
TABLE = toys.table(VOCAB, seed=0)
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (3, 4))
TEMPERATURES = np.array([0.0, 1.0, 0.0])


def decoded(tree, *, change=lambda drafter: drafter):
  """Decodes a mixed batch with a draft model that is the target."""
  model = toys.table_model(VOCAB)
  drafter = drafters.model.drafter(model, tree=tree, vocab_size=VOCAB)
  decoder = specjax.make_decoder(model, drafter=change(drafter), rule="match")
  params = specjax.Params(target=jnp.asarray(TABLE), draft=jnp.asarray(TABLE))

  @compiled
  def run(params, prompts, key, settings):
    state = decoder.init(
      params, prompts, jnp.full(3, 4), key,
      buffer_length=4 + BUDGET, max_new_tokens=BUDGET, sampling=settings,
    )  # fmt: skip
    return decoder.generate(params, state)

  settings = make_sampling(3, temperature=TEMPERATURES)
  return run(params, jnp.asarray(PROMPTS), jax.random.key(0), settings)


def is_sound(state, tree) -> bool:
  """Greedy rows are the argmax of every context, and no draft is rejected."""
  for b in np.flatnonzero(TEMPERATURES == 0):
    row = np.asarray(state.tokens[b, : 4 + BUDGET]).tolist()
    for at in range(4, len(row)):
      if row[at] != np.argmax(toys.context_logits(TABLE, row[:at])):
        return False
    if state.counters.num_target_calls[b] != BUDGET // (tree.max_depth + 1):
      return False
  return True


def upside_down(logits, settings):
  """Greedy rows of a mixed batch carry temperature -1."""
  some = jnp.any(settings.temperature > 0)
  greedy = (settings.temperature == 0) & some
  temperature = jnp.where(greedy, -1, settings.temperature)
  settings = dataclasses.replace(settings, temperature=temperature)
  return warp_lib.warp(logits, settings)


def without_keep_path():
  """What was rejected stays in the target's cache, the length is right."""
  keep = lambda cache, start, path, length, *, nodes: cache.replace(
    length=length
  )
  return mock.patch.object(
    decode, "cache_lib", copy_of(cache_lib, keep_path=keep)
  )


def feeds_one_token(drafter):
  """A draft model that is fed the newest token only.

  The last drafted token was never fed to it: once that is accepted, its slot in
  the draft's cache is one that nobody wrote.
  """
  model, tree = toys.table_model(VOCAB), drafter.tree

  def propose(params, cache, target_cache, context):
    root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, 1)
    output, cache = model.apply(
      params.draft, root, cache.replace(length=context.length - 1)
    )
    draft, cache = model_drafter.draft_tree(
      model, params.draft, cache, output.logits[:, 0], context,
      tree=tree, siblings=IID, vocab_size=VOCAB,
    )  # fmt: skip
    return draft, cache, target_cache

  return dataclasses.replace(drafter, propose=propose)


LOOPS = {
  # tpu-inference: greedy rows of a mixed batch carry temperature -1, and the
  # verifier has no guard for them: the logits are upside down.
  "greedy rows upside down": (
    tree_lib.chain(2),
    dict(patch=lambda: verifier_warps(upside_down)),
  ),
  # No known system.
  "stale rows in the target's cache": (
    tree_lib.paths(2, 2),
    dict(patch=without_keep_path),
  ),
  # No known system.
  "a row too few in the draft's cache": (
    tree_lib.chain(2),
    dict(change=feeds_one_token),
  ),
}
sound_twin = functools.cache(decoded)


@pytest.mark.parametrize("name", LOOPS)
def test_a_broken_loop_is_caught(name):
  tree, options = LOOPS[name]
  options = dict(options)
  assert is_sound(sound_twin(tree), tree)
  with options.pop("patch", contextlib.nullcontext)():
    state = decoded(tree, **options)
  assert not is_sound(state, tree)
