"""Device programs: prompts are scored by targets that cannot go back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import specjax
from launch.serving import programs
from launch.serving.programs import Scorer
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.transformer import Transformer, as_language_model
from specjax import drafters, tree
from specjax.types import Params

VOCAB = 5


def hybrid():
  """Functions and random parameters of a layer with states and one without."""
  block = DenseSpec(width=8)
  layers = [
    DeltaSpec(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3),
    AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4),
  ]
  config = TransformerConfig(
    layers=tuple(LayerSpec(attention=a, feed_forward=block) for a in layers),
    vocab_size=VOCAB, embed_dim=6, max_positions=99,
  )  # fmt: skip
  target, params = as_language_model(Transformer(config, rngs=nnx.Rngs(0)))
  rng = np.random.default_rng(5)
  random = lambda x: jnp.asarray(0.7 * rng.normal(size=x.shape), jnp.float32)
  return target, jax.tree.map(random, params)


def test_recurrent_target_scores_consecutive_texts_independently():
  """In several passes and in one, by none of the text before."""
  target, params = hybrid()
  score = Scorer(
    target, Params(target=params), vocab_size=VOCAB, longest=20, width=8
  )
  texts = np.random.default_rng(0).integers(0, VOCAB, (2, 20))
  whole, _ = jax.jit(target.apply)(params, texts, target.init_cache(2, 20))
  expected = np.asarray(jax.nn.log_softmax(whole.logits))
  for row, length in ((0, 20), (1, 19), (0, 9), (1, 6), (0, 1)):
    actual = score(texts[row, :length])
    at = np.arange(length - 1)
    np.testing.assert_allclose(
      actual.log_probs, expected[row, at, texts[row, 1:length]], atol=1e-5
    )
    best = np.take_along_axis(expected[row, at], actual.likeliest, -1)
    np.testing.assert_allclose(actual.likeliest_log_probs, best, atol=1e-5)
    assert (np.diff(best) <= 0).all()


def test_rounds_over_some_rows_leave_the_others_unchanged():
  """Caches, states and drafts of rows that are done stay as they are."""
  target, params = hybrid()
  drafter = drafters.model(target, tree=tree.chain(2), vocab_size=VOCAB)
  decoder = specjax.make_decoder(
    target, drafter=drafter, with_log_probs=True, num_likeliest=2
  )
  params = Params(target=params, draft=params)
  texts = np.random.default_rng(0).integers(0, VOCAB, (4, 6))
  state = jax.jit(decoder.init, static_argnames="buffer_length")(
    params, texts, np.array([6, 2, 4, 1]), jax.random.key(0), buffer_length=20,
    max_new_tokens=np.array([9, 0, 5, 0]),
  )  # fmt: skip

  def after(*running):
    run = lambda *given: programs.rounds(decoder, 9, params, *given)
    none, all_rows = np.zeros(4, bool), np.ones(4, bool)
    return jax.jit(run)(state, none, np.int32(3), all_rows, *running)

  (whole, told), (some, said) = after(), after(np.array([2, 0]))
  assert (said["length"] > said["start"]).tolist() == [True, False, True, False]
  for name in ("length", "tokens", "log_probs", "reason"):
    ours, theirs = (x[name][np.array([0, 2])] for x in (said, told))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
  keys = jax.random.key_data
  whole, some, before = (
    dataclasses.replace(x, keys=keys(x.keys)) for x in (whole, some, state)
  )
  axes = decoder.row_axes(state)
  pick = lambda x, row: specjax.rows.pick(axes, x, np.array([row]))
  cached = lambda x, row, most: jax.tree.map(
    lambda b: b[row, :, :most], (x.target_cache.keys, x.target_cache.values)
  )
  for row in (0, 2):
    most = int(told["length"][row]) - 1
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
      cached(some, row, most), cached(whole, row, most),
    )  # fmt: skip
  for row in (1, 3):
    one, was = (
      dataclasses.replace(pick(x, row), num_steps=0) for x in (some, before)
    )
    jax.tree.map(np.testing.assert_array_equal, one, was)
