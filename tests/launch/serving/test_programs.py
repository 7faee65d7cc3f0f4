"""Device programs: prompts are scored by targets that cannot go back."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from launch.serving.programs import Scorer
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.transformer import Transformer, as_language_model
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


def test_a_target_with_states_scores_one_text_after_another():
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
