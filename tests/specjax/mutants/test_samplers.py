"""Broken samplers and drafters must fail by the law of many sampled rows."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import mutation
import numpy as np
import pytest
import toys

import specjax
from specjax import drafters, exact, laws, random
from specjax import tree as tree_lib
from specjax import warp as warp_lib
from specjax.warp import make_sampling

pytestmark = pytest.mark.usefixtures("quick_to_compile")

ROWS = 20_000
SETTINGS = dict(temperature=2.0, top_p=0.8)


def total_variation_limit(samples, cells, *, chance=1e-6):
  """Bound that an empirical law exceeds with at most that chance.

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
  drafter = drafters.model(model, tree=tree_lib.chain(1), vocab_size=vocab)
  decoder = specjax.make_decoder(model, drafter=change(drafter))
  params = specjax.Params(target=jnp.asarray(target), draft=jnp.asarray(draft))

  @mutation.compiled  # a new function each time, for the patches to be traced
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
  """True if the tokens' joint law is that of plain sampling, to a bound."""
  vocab, count = target.shape[1], tokens.shape[1]
  law = toys.context_law(target, lambda row: plain_law(row, **settings))
  expected = exact.target_block_law(law, length=count).ravel()
  cells = np.ravel_multi_index(tuple(tokens.T), (vocab,) * count)
  actual = np.bincount(cells, minlength=vocab**count) / len(tokens)
  distance = np.abs(actual - expected).sum() / 2
  return distance < total_variation_limit(len(tokens), vocab**count)


def shared_noise():
  apart = random.verification_keys
  drafted = lambda keys: random.drafted_node_keys(keys, range(1, 2))
  return mock.patch.object(
    random,
    "verification_keys",
    lambda keys: jnp.concatenate([apart(keys)[:, :1], drafted(keys)], axis=1),
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
    law = draft.log_probs[:, 1]
    drawn = laws.token_log_prob(law, draft.tokens[:, 1])
    drop = drawn < -jnp.log(law.shape[-1])
    sure = jnp.where(jnp.arange(law.shape[-1]) == 0, 0, -jnp.inf)
    tokens = draft.tokens.at[:, 1].set(jnp.where(drop, 0, draft.tokens[:, 1]))
    law = jnp.where(drop[:, None], sure, law)
    log_probs = draft.log_probs.at[:, 1].set(law)
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
    patch=lambda: mutation.verifier_warps(mask_before_temperature)
  ),
  # SGLang #39253: ROCm EAGLE verification ignores temperature.
  "verification without temperature": dict(
    patch=lambda: mutation.verifier_warps(without_temperature)
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

  def low(drafter):
    def propose(params, state, cache, context):
      def draws(numbers, nodes, law):
        one = lambda key, row: jax.random.categorical(
          key, row.astype(jnp.bfloat16)
        )
        keys = random.drafted_node_keys(context.keys, nodes)
        return jax.vmap(jax.vmap(one))(keys, law)

      context = dataclasses.replace(context, draws=draws)
      return drafter.propose(params, state, cache, context)

    return dataclasses.replace(drafter, propose=propose)

  # One law over many tokens, of which nearly all drafts are accepted.
  target = toys.table(64, seed=0, contexts=1)
  options = dict(count=1, settings=dict(temperature=1.0, top_p=1.0))
  tokens = sampled(target, target, **options)
  assert is_plain_sampling(tokens, target, options["settings"])
  tokens = sampled(target, target, change=low, **options)
  assert not is_plain_sampling(tokens, target, options["settings"])
