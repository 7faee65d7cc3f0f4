"""Models that return NaN: the text stays lawful, and other tokens unharmed."""

import dataclasses
import functools

import exact_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import (
  LENGTHS,
  PARAMS,
  decode,
  greedy_reference,
  make,
  rows_of,
  start,
)
from flax import nnx

import specjax
from models.networks.description import llama_config
from models.networks.transformer import Transformer, as_language_model
from specjax import drafters, exact, siblings
from specjax.state import StopReason
from specjax.tree import chain, paths
from specjax.warp import make_sampling

VOCAB, ROWS, ALPHA = 3, 120_000, 1e-6
PREFIX, BUFFER = (1, 2, 1, 2, 0, 1, 2), 9


def nan_from(position, model):
  """The model, made for so many positions: beyond, its logits are NaN."""

  def apply(
    params, tokens, cache, *, positions=None, logits_at=None, mask=None
  ):
    if positions is None:
      positions = cache.length[:, None] + jnp.arange(tokens.shape[1])
    output, cache = model.apply(
      params, tokens, cache, positions=positions, mask=mask, logits_at=logits_at
    )
    if logits_at is not None:
      return output, cache
    logits = jnp.where(positions[..., None] < position, output.logits, jnp.nan)
    return dataclasses.replace(output, logits=logits), cache

  return dataclasses.replace(model, apply=apply, max_positions=position)


@functools.cache
def p_value(rule, tree, how, broken_target, change=lambda drafter: drafter):
  """Of the next two tokens' law, many rows drafting beyond the positions."""
  model = toys.table_model(VOCAB)
  short = nan_from(BUFFER, model)
  target = toys.table(VOCAB, seed=3, scale=0.7)
  drafter = drafters.model(short, tree=tree, siblings=how, vocab_size=VOCAB)
  decoder = specjax.make_decoder(
    short if broken_target else model, drafter=change(drafter), rule=rule
  )
  params = toys.pair(target, noise=1.0, seed=4)

  @jax.jit
  def run(key):
    state = decoder.init(
      params, jnp.broadcast_to(jnp.array(PREFIX), (ROWS, len(PREFIX))),
      jnp.full(ROWS, len(PREFIX)), key, buffer_length=BUFFER, max_new_tokens=2,
    )  # fmt: skip
    return decoder.generate(params, state)

  state = run(jax.random.key(7))
  assert (state.stop_reason == StopReason.LENGTH).all()
  drawn = np.asarray(state.tokens)[:, len(PREFIX) : BUFFER]
  counts = np.bincount(drawn @ [VOCAB, 1], minlength=VOCAB**2)
  law = toys.context_law(target, lambda x: np.exp(x) / np.exp(x).sum())
  expected = ROWS * exact.target_block_law(law, length=2, prefix=PREFIX).ravel()
  return exact_cases.p_value(counts, expected, shift=0.012, alpha=ALPHA)


@pytest.mark.parametrize(
  ("rule", "tree", "how", "broken_target"),
  [
    ("block", chain(4), siblings.IID, False),
    ("traversal", paths(3, 2), siblings.IID, False),
    ("multipath_block", paths(3, 2), siblings.IID, True),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_output_up_to_last_position_matches_target_distribution(
  rule, tree, how, broken_target
):
  """Drafted nodes lie beyond, and rules look at paths as a whole."""
  assert p_value(rule, tree, how, broken_target) > ALPHA


# --------------------------------------------------- networks, and their caches

POISON, WORDS = 5, 11


@functools.cache
def network(seed):
  """A transformer to which one token is NaN."""
  config = llama_config(
    vocab_size=WORDS, embed_dim=8, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=4, mlp_dim=8, max_positions=64,
  )  # fmt: skip
  module = Transformer(config, rngs=nnx.Rngs(seed))
  table = 20 * module.embed.embedding[...]
  module.embed.embedding[...] = table.at[POISON].set(jnp.nan)
  return as_language_model(module)


def test_rejected_tokens_with_nan_embeddings_do_not_end_rows():
  """Neither model knows a token, which the target never emits."""
  draft, draft_params = network(0)
  network_target, target_params = network(1)

  def apply(*arguments, **options):
    output, cache = network_target.apply(*arguments, **options)
    logits = output.logits.at[..., POISON].set(-jnp.inf)
    return dataclasses.replace(output, logits=logits), cache

  target = dataclasses.replace(network_target, apply=apply)
  drafter = drafters.model(draft, tree=chain(5), vocab_size=WORDS)
  decoder = specjax.make_decoder(target, drafter=drafter, rule="block")
  params = specjax.Params(target=target_params, draft=draft_params)
  prompts = np.random.default_rng(0).integers(0, POISON, (6, 3))
  settings = make_sampling(6, temperature=[0.0, 1.0] * 3)

  @jax.jit
  def run(params, settings):
    state = decoder.init(
      params, prompts, np.array([3, 2, 1, 3, 2, 1]), jax.random.key(0),
      buffer_length=60, max_new_tokens=57, sampling=settings,
    )  # fmt: skip
    state = decoder.generate(params, state)
    whole = apply(params.target, state.tokens, target.init_cache(6, 70))[0]
    return state, jnp.argmax(whole.logits, axis=-1)

  state, best = jax.device_get(run(params, settings))
  for cache in (state.target_cache, state.drafter_state):
    assert np.isnan(cache.keys).any()  # of the last tokens rejected
    assert np.isfinite(cache.values).all()
  assert (state.stop_reason == StopReason.LENGTH).all()
  for row in np.flatnonzero(settings.temperature == 0):
    new = slice(state.prompt_length[row], state.length[row])
    before = slice(new.start - 1, new.stop - 1)
    np.testing.assert_array_equal(state.tokens[row, new], best[row, before])


def test_prompt_token_with_nan_embedding_ends_its_row():
  """In a prompt, before the last token too: no cache may hide it."""
  target, params = network(1)
  decoder = specjax.make_decoder(target)
  prompts = np.array([[1, POISON, 2, 3], [1, 2, 3, POISON], [1, 2, 3, 4]])

  @jax.jit
  def run(params):
    state = decoder.init(
      params, prompts, np.full(3, 4), jax.random.key(0), buffer_length=8,
      max_new_tokens=2,
    )  # fmt: skip
    return decoder.generate(params, state)

  state = run(specjax.Params(target=params))
  reasons = [StopReason.NAN_LOGITS] * 2 + [StopReason.LENGTH]
  assert state.stop_reason.tolist() == reasons
  assert (state.length - state.prompt_length).tolist() == [0, 0, 2]


# ----------------------------------------------------------- the draft's laws


def test_nan_draft_logits_do_not_end_rows():
  decoder = make("model")
  table = np.asarray(PARAMS.draft).copy()
  table[::3] = np.nan
  params = dataclasses.replace(PARAMS, draft=jnp.asarray(table))
  state = decode(decoder, start(decoder, temperature=0.0), params)
  assert (state.stop_reason == StopReason.LENGTH).all()
  for row, length, new in zip(
    rows_of(state), LENGTHS, state.length, strict=True
  ):
    assert row == greedy_reference(row[:length], int(new) - length)


@pytest.mark.parametrize("place", [slice(None), 5], ids=["law", "token"])
def test_nan_draft_log_probs_end_rows_before_emission(
  place,
):
  """Wherever it is: what such a token was drawn from nobody can know."""
  drafter = make("model").drafter

  def propose(*arguments):
    draft, *rest = drafter.propose(*arguments)
    broken = draft.tokens[:, :1, None] == 1
    late = jnp.arange(4)[:, None] == 2
    nan = jnp.where(broken & late, jnp.nan, draft.log_probs)
    log_probs = draft.log_probs.at[..., place].set(nan[..., place])
    return dataclasses.replace(draft, log_probs=log_probs), *rest

  decoder = specjax.make_decoder(
    make("model").target, drafter=dataclasses.replace(drafter, propose=propose)
  )
  before = start(make("model"))
  after, info = jax.jit(decoder.step)(PARAMS, before)
  roots = info.draft.tokens[:, 0]
  assert 0 < (roots == 1).sum() < len(roots)
  np.testing.assert_array_equal(
    after.stop_reason == StopReason.NAN_LOGITS, roots == 1
  )
  np.testing.assert_array_equal(after.length == before.length, roots == 1)
  assert np.isfinite(info.node_probs).all()
