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
  LENGTHS,
  PAIRS,
  PARAMS,
  PROMPTS,
  decode,
  greedy_reference,
  make,
  rows_of,
  start,
)

import specjax
from specjax import drafters, exact
from specjax.tree import chain, paths
from specjax.warp import make_sampling, warp


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_greedy_rows_match_plain_python_argmax(rule, drafter):
  decoder = make(drafter, rule)
  state = decode(decoder, start(decoder, temperature=0.0))
  for b, row in enumerate(rows_of(state)):
    assert row == greedy_reference(PROMPTS[b, : LENGTHS[b]], BUDGETS[b])


def small_drafters(model, vocab_size):
  common = dict(tree=chain(2), vocab_size=vocab_size)
  return {
    "plain": drafters.plain(),
    "model": drafters.model(model, **common),
    "paths": drafters.model(model, tree=paths(2, 2), vocab_size=vocab_size),
    "ngram": drafters.ngram(tokens=2),
    "layer_skip": drafters.layer_skip(model, **common),
  }


@pytest.mark.gpu
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
def test_sampled_blocks_match_target_joint_distribution(rule, drafter):
  """A chi-squared test through the shipped loop, with its power asserted."""
  runs, length, vocab = 60_000, 3, 3
  target, prefix = toys.table(vocab, seed=3, scale=0.7), (1, 2, 1, 2)
  model = toys.table_model(vocab)
  decoder = specjax.make_decoder(
    model, drafter=small_drafters(model, vocab)[drafter], rule=rule
  )
  params = toys.pair(target, noise=1.0, seed=4)
  settings = make_sampling(1, temperature=0.9)

  @jax.jit
  def run(key):
    state = decoder.init(
      params, jnp.broadcast_to(jnp.asarray(prefix), (runs, len(prefix))),
      jnp.full((runs,), len(prefix)), key, buffer_length=len(prefix) + length,
      max_new_tokens=length, sampling=make_sampling(runs, temperature=0.9),
    )  # fmt: skip
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


@pytest.mark.parametrize("drafter", ["paths", "ngram"])
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


def test_lossy_rule_without_distance_does_not_report_zero():
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
