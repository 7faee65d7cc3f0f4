"""The loop draws from the laws that it reports, and greedy is an argmax."""

import dataclasses

import exact_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import (
  BUDGETS,
  DRAFTERS,
  LENGTHS,
  MODEL,
  PAIRS,
  PARAMS,
  PROMPTS,
  VOCAB,
  decode,
  greedy_reference,
  make,
  rows_of,
  start,
)

import specjax
from specjax import drafters, exact, siblings
from specjax.tree import chain, k_ary, paths
from specjax.warp import make_sampling, warp

# For programs that differ in a rule alone: the loop is compiled as for users
# where rows are greedy.


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_greedy_rows_equal_a_plain_python_argmax(rule, drafter):
  decoder = make(drafter, rule)
  state = decode(decoder, start(decoder, temperature=0.0))
  for b, row in enumerate(rows_of(state)):
    assert row == greedy_reference(PROMPTS[b, : LENGTHS[b]], BUDGETS[b])


LOOP_TREES = {
  ("without_replacement", k_ary(2, 2)): (
    "recursive",
    "traversal",
    "score_block",
  ),
  ("top_k", k_ary(2, 2)): ("typical(epsilon=0.5, delta=1.0)",),
  ("greedy", k_ary(2, 1)): ("greedy_draft",),
  ("hub", k_ary(2, 2)): ("hub",),
  ("shared_noise", paths(2, 2)): ("gumbel_list",),
  ("iid", paths(2, 2)): (
    "batch",
    "kseq",
    "transport",
    "multipath_block",
    "block_transport",
  ),
  ("iid", chain(3)): ("block", "decoding_opt"),
}


@pytest.mark.parametrize(
  ("how", "tree", "rule"),
  [
    pytest.param(
      *key, rule,
      marks=() if rule in ("recursive", "decoding_opt") else pytest.mark.slow,
    )
    for key, names in LOOP_TREES.items()
    for rule in names
  ],
  ids=lambda x: x if isinstance(x, str) else "tree",
)  # fmt: skip
def test_every_rule_decodes_greedily_and_counts(how, tree, rule):
  """At temperature 0 lossless rules, in the loop, give the argmax text."""
  drafter = drafters.model(
    MODEL, tree=tree, siblings=siblings.get(how), vocab_size=VOCAB
  )
  decoder = specjax.make_decoder(MODEL, drafter=drafter, rule=rule)
  rows = len(PROMPTS)
  state = decoder.init(
    PARAMS, jnp.asarray(PROMPTS), LENGTHS, jax.random.key(0),
    buffer_length=26, max_new_tokens=20,
    sampling=make_sampling(rows, temperature=[0.0, 0.0, 0.0, 0.8, 0.8]),
  )  # fmt: skip
  state = jax.jit(decoder.generate)(PARAMS, state)
  counters = state.counters
  distance = np.asarray(counters.total_variation)
  if decoder.rule.lossless:
    assert (distance == 0).all()
    for b, row in enumerate(rows_of(state)[:3]):
      assert row == greedy_reference(PROMPTS[b, : LENGTHS[b]], 20)
  else:
    assert (distance[3:] > 0).all()
  # Every visited node offers its children; those taken were offered.
  assert (counters.rank_accepted <= counters.rank_offered + 1e-4).all()
  assert int(counters.num_accepted.sum()) > 0


def small_drafters(model, vocab_size):
  common = dict(tree=chain(2), vocab_size=vocab_size)
  return {
    "plain": drafters.plain(),
    "model": drafters.model(model, **common),
    "paths": drafters.model(model, tree=paths(2, 2), vocab_size=vocab_size),
    "ngram": drafters.ngram(tokens=2),
    "layer_skip": drafters.layer_skip(model, **common),
  }


@pytest.mark.parametrize(
  ("rule", "drafter"),
  [
    ("token", "model"),
    pytest.param("token", "plain", marks=pytest.mark.slow),
    pytest.param("token", "ngram", marks=pytest.mark.slow),
    pytest.param("token", "layer_skip", marks=pytest.mark.slow),
    pytest.param("match", "paths", marks=pytest.mark.slow),
    pytest.param("block_transport", "paths", marks=pytest.mark.slow),
  ],
)
def test_sampled_blocks_follow_the_targets_joint_law(rule, drafter):
  """A chi-squared test through the shipped loop, with its power asserted."""
  runs, length, vocab = 60_000, 3, 3
  target, prefix = toys.table(vocab, seed=3, scale=0.7), (1, 2, 1, 2)
  model = toys.table_model(vocab)
  decoder = specjax.make_decoder(
    model, drafter=small_drafters(model, vocab)[drafter], rule=rule
  )
  params = specjax.Params(
    target=jnp.asarray(target),
    draft=jnp.asarray(toys.near(target, noise=1.0, seed=4)),
  )
  settings = make_sampling(1, temperature=0.9)

  @jax.jit
  def run(key):
    state = decoder.init(
      params,
      jnp.broadcast_to(jnp.asarray(prefix), (runs, len(prefix))),
      jnp.full((runs,), len(prefix)),
      key,
      buffer_length=len(prefix) + length,
      max_new_tokens=length,
      sampling=make_sampling(runs, temperature=0.9),
    )
    return decoder.generate(params, state).tokens

  drawn = np.asarray(run(jax.random.key(7)))[:, len(prefix) :][:, :length]
  counts = np.bincount(drawn @ [vocab**2, vocab, 1], minlength=vocab**length)
  law = toys.context_law(
    target,
    lambda x: np.exp(
      np.asarray(warp(jnp.asarray(x)[None], settings)[0], np.float64)
    ),
  )
  expected = exact.target_block_law(law, length=length, prefix=prefix).ravel()
  expected *= runs / expected.sum()
  assert expected.min() > 5
  assert exact_cases.p_value(counts, expected, shift=0.02) > 1e-6


@pytest.mark.gpu
def test_a_step_draws_node_and_token_from_the_rules_laws():
  """Over many rows, counts agree with the summed laws of the very step."""
  runs = 40_000
  decoder = make("model", "token")
  init = jax.jit(
    lambda key: decoder.init(
      PARAMS, jnp.full((runs, 2), 3), jnp.full((runs,), 2), key,
      buffer_length=9, max_new_tokens=7,
    )
  )  # fmt: skip
  _, info = jax.jit(decoder.step)(PARAMS, init(jax.random.key(3)))
  verification = decoder.rule.verify(
    info.draft, info.draft.topology(), info.target_log_probs
  )
  np.testing.assert_allclose(
    verification.node_probs, info.node_probs, rtol=1e-5, atol=1e-6
  )
  after = np.exp(np.asarray(verification.next_log_probs(info.node)))
  token = np.take_along_axis(
    np.asarray(info.tokens), np.asarray(info.num_emitted)[:, None] - 1, 1
  )[:, 0]
  for laws, drawn in ((info.node_probs, info.node), (after, token)):
    laws = np.asarray(laws, np.float64)
    counts = np.bincount(drawn, minlength=laws.shape[1])
    spread = np.sqrt((laws * (1 - laws)).sum(0))
    assert (np.abs(counts - laws.sum(0)) <= 6 * spread + 1e-9).all()
    assert spread.max() < 0.01 * runs  # so a shift of 6% would be seen


def test_reported_draft_law_is_the_law_sampled_from():
  """Drafted tokens, pooled over many rows, follow the reported law."""
  runs = 40_000
  decoder = make("model1")
  init = jax.jit(
    lambda key: decoder.init(
      PARAMS, jnp.full((runs, 2), 3), jnp.full((runs,), 2), key,
      buffer_length=4, max_new_tokens=2,
      sampling=make_sampling(runs, temperature=0.7, top_p=0.9),
    )
  )  # fmt: skip
  _, info = jax.jit(decoder.step)(PARAMS, init(jax.random.key(0)))
  law = np.exp(np.asarray(info.draft.log_probs[0, 1], np.float64))
  counts = np.bincount(info.draft.tokens[:, 1], minlength=VOCAB)
  assert (counts[law == 0] == 0).all()
  some = law > 0
  spread = np.sqrt(runs * law * (1 - law))
  assert (np.abs(counts - runs * law)[some] < 6 * spread[some]).all()


@pytest.mark.parametrize(
  "drafter",
  [
    pytest.param(
      name, marks=() if name in ("paths", "ngram") else pytest.mark.slow
    )
    for name in DRAFTERS
    if name != "plain"
  ],
)
def test_expected_acceptance_agrees_with_realized_acceptance(drafter):
  runs = 4000
  decoder = make(drafter, "match")
  init = jax.jit(
    lambda key: decoder.init(
      PARAMS, jnp.full((runs, 3), 2), jnp.full((runs,), 3), key,
      buffer_length=14, max_new_tokens=11, stop_tokens=(4,),
    )
  )  # fmt: skip
  c = jax.jit(decoder.generate)(PARAMS, init(jax.random.key(1))).counters
  gap = np.asarray(c.num_accepted) - np.asarray(c.expected_accepted)
  assert abs(gap.mean()) < 5 * gap.std() / np.sqrt(runs)


def test_a_lossy_rule_that_reports_no_distance_is_not_said_to_have_none():
  typical = specjax.rules.get("typical")

  def verify(draft, topology, target):
    actual = typical.verify(draft, topology, target)
    return dataclasses.replace(actual, total_variation=None)

  for rule, known in ((typical, True), ("token", True), (None, False)):
    rule = rule or dataclasses.replace(typical, verify=verify, name="silent")
    decoder = make("model", rule)
    state = decode(decoder, start(decoder))
    actual = np.asarray(state.counters.total_variation)
    assert np.isfinite(actual).all() == known
    assert (actual == 0).all() == (rule == "token")
