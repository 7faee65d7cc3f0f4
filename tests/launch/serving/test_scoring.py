"""Prompts are scored in chunks by targets that cannot go back."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from launch.serving.scoring import Scorer
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.transformer import Transformer, as_language_model
from specjax.types import Params

pytestmark = pytest.mark.usefixtures("quick_to_compile")

VOCAB = 5


def hybrid():
  """Functions and random parameters of a layer with states and one without."""
  block = DenseSpec(width=8)
  layers = [
    DeltaSpec(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3),
    AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4),
  ]
  config = TransformerConfig.of_layers(
    [LayerSpec(attention=one, feed_forward=block) for one in layers],
    vocab_size=VOCAB, embed_dim=6, max_positions=99,
  )  # fmt: skip
  target, params = as_language_model(Transformer(config, rngs=nnx.Rngs(0)))
  rng = np.random.default_rng(5)
  random = lambda x: jnp.asarray(0.7 * rng.normal(size=x.shape), jnp.float32)
  return target, jax.tree.map(random, params)


def test_a_target_with_states_scores_one_text_after_another():
  """Also after one that was given up in the middle."""
  target, params = hybrid()
  scorer = Scorer(
    target, Params(target=params), vocab_size=VOCAB, longest=20, widths=[4, 8]
  )
  texts = np.random.default_rng(0).integers(0, VOCAB, (2, 20))
  whole, _ = jax.jit(target.apply)(params, texts, target.init_cache(2, 20))
  laws = np.asarray(jax.nn.log_softmax(whole.logits))

  def scores(text, *, chunks):
    asked = types.SimpleNamespace(token_ids=tuple(text))
    scorer.begin(3)
    for most in chunks:
      width, actual = scorer.read_on(3, asked, most)
      assert width <= most
    return actual

  assert scores(texts[0], chunks=(8, 4)) is None
  for row, length, chunks in ((1, 20, (4, 8, 4, 8)), (0, 6, (8,))):
    actual = scores(texts[row, :length], chunks=chunks)
    at = np.arange(length - 1)
    np.testing.assert_allclose(
      actual.log_probs, laws[row, at, texts[row, 1:length]], atol=1e-5
    )
    assert not scorer.waits(3)
