"""The stacked model is the transformer, layer for layer."""

import dataclasses

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.networks import linear, quantized, stacked
from models.networks.description import TransformerConfig, llama_config
from models.networks.mixture import Mixture
from models.networks.rope import Rope
from models.networks.transformer import (
  FINAL,
  SkippedLayers,
  Transformer,
  as_language_model,
)
from models.sharding import Sharding
from specjax import tree

SMALL = llama_config(
  vocab_size=61, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
  head_dim=8, mlp_dim=48, max_positions=64,
)  # fmt: skip
VARIANTS = {
  "llama": {},
  "windows": dict(windows=(None, 5, None)),
  "neox": dict(
    norm="layer", activation="gelu", gated=False, parallel=True,
    qkv_bias=True, out_bias=True, bias=True, rope=Rope(theta=1e4, dim=4),
    num_kv_heads=4,
  ),
  "learned positions, tied": dict(
    learned_positions=True, rope=None, tied_embeddings=True, norm="layer"
  ),
  "gemma": described.GEMMA,
  "olmo": described.OLMO,
  "mixed": described.MIXED,
}  # fmt: skip


# Every layer's input, what comes after the last, and the final norm of it.
FEATURES = (0, 2, 1, 3, FINAL)


def both(skipped=None, **changes):
  """A module's functions and parameters, and the stacked ones."""
  config = described.alter(SMALL, **changes)
  module = Transformer(config, rngs=nnx.Rngs(0))
  skipped = skipped or SkippedLayers()
  plain, params = as_language_model(module, skipped=skipped, features=FEATURES)
  return (
    (plain, params),
    (
      stacked.as_language_model(config, skipped=skipped, features=FEATURES),
      stacked.stack(module),
    ),
  )


def feed(model, params, tokens, mask=None):
  """Output and cache of ragged rows fed in two parts."""
  cache = model.init_cache(tokens.shape[0], 24)
  _, cache = model.apply(params, tokens[:, :6], cache)
  cache = cache.replace(length=jnp.array([6, 2, 4]))  # rolled back
  output, cache = model.apply(params, tokens[:, 6:], cache, mask=mask)
  return output, cache


TOKENS = jax.random.randint(jax.random.key(0), (3, 10), 0, 61)


def assert_same(one, other, mask=None):
  expected, cache = feed(*one, TOKENS, mask)
  got, stacked_cache = feed(*other, TOKENS, mask)
  np.testing.assert_allclose(got.logits, expected.logits, atol=2e-6)
  assert got.features.shape[-1] == len(FEATURES) * SMALL.embed_dim
  np.testing.assert_allclose(got.features, expected.features, atol=2e-6)
  np.testing.assert_allclose(
    stacked_cache.keys[0], jnp.stack(cache.keys), rtol=1e-5, atol=1e-6
  )
  np.testing.assert_array_equal(stacked_cache.length, cache.length)


@pytest.mark.parametrize("variant", VARIANTS)
def test_stacked_layers_match_plain_logits_and_cache(variant):
  assert_same(*both(**VARIANTS[variant]))


@pytest.mark.parametrize("variant", ["gemma", "mixed"])
def test_unrolled_layers_match_plain_logits(variant):
  """As GPUs have them: every layer with a cache of its own."""
  one, _ = both(**VARIANTS[variant])
  config = described.alter(SMALL, **VARIANTS[variant])
  module = Transformer(config, rngs=nnx.Rngs(0))
  model = stacked.as_language_model(
    config, features=FEATURES, sharding=Sharding(unrolled=True)
  )
  expected, _ = feed(*one, TOKENS)
  got, cache = feed(model, stacked.stack(module, unrolled=True), TOKENS)
  np.testing.assert_allclose(got.logits, expected.logits, atol=2e-6)
  np.testing.assert_allclose(got.features, expected.features, atol=2e-6)
  assert len(cache.keys) == config.num_layers


@pytest.mark.parametrize("low", [None, "int8"])
def test_layers_with_different_heads_use_separate_caches(low, monkeypatch):
  # Integer parts turn another order of sums into another step of the cache.
  monkeypatch.setattr(linear, "integer_products", linear._scaled)
  slides, full = described.layers((3, None))
  few = dataclasses.replace(
    full.attention, num_kv_heads=1, head_dim=12, keys_as_values=True,
    rope=dataclasses.replace(full.attention.rope, dim=12, factors=None),
  )  # fmt: skip
  extra = Mixture(
    num_experts=4, num_chosen=2, embed_dim=32, expert_dim=12,
    router_norm_eps=1e-6,
  )  # fmt: skip
  full = dataclasses.replace(full, attention=few, extra=extra)
  config = TransformerConfig(
    layers=(slides, slides, full) * 2,
    vocab_size=61,
    embed_dim=32,
    max_positions=64,
  )
  module = Transformer(config, rngs=nnx.Rngs(0))
  stack = stacked.stack(module)
  form = low and quantized.Quantization(dtype=low)
  if form:
    quantized.quantize_module(module, form)
    stack = stacked.quantize(stack, config, form)
  how = dict(features=FEATURES, stored=low)
  plain, params = as_language_model(module, **how)
  model = stacked.as_language_model(config, weights=form, **how)
  expected, _ = feed(plain, params, TOKENS)
  got, cache = feed(model, stack, TOKENS)
  np.testing.assert_allclose(got.logits, expected.logits, atol=2e-6)
  np.testing.assert_allclose(got.features, expected.features, atol=1e-5)
  shapes = [jax.tree.leaves(keys)[0].shape for keys in cache.keys]
  assert [(x[0], *x[2::2]) for x in shapes] == [(4, 2, 8), (2, 1, 12)]


@pytest.mark.parametrize("skipped", [{}, dict(mlp=(0,), attention=(1,))])
def test_layers_with_shared_keys_and_values_have_no_cache(skipped):
  skipped = SkippedLayers(**skipped)
  config = described.alter(SMALL, **described.GEMMA4)
  module = Transformer(config, rngs=nnx.Rngs(0))
  how = dict(features=FEATURES, skipped=skipped)
  plain, params = as_language_model(module, **how)
  model = stacked.as_language_model(config, **how)
  mask = tree.paths(3, 1).ancestors
  expected, _ = feed(plain, params, TOKENS, mask)
  got, cache = feed(model, stacked.stack(module), TOKENS, mask)
  np.testing.assert_allclose(got.logits, expected.logits, atol=2e-6)
  np.testing.assert_allclose(got.features, expected.features, atol=1e-5)
  assert [len(x) for x in cache.keys] == [1, 1]


def test_periods_finds_the_longest_repeating_layer_groups():
  assert stacked.periods("SSSSSF" * 3 + "SS") == [(0, 6, 3), (18, 1, 2)]
  assert stacked.periods("DDDMMMM") == [(0, 1, 3), (3, 1, 4)]
  assert stacked.periods("ABC") == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]


@pytest.mark.parametrize(
  "skipped", [None, SkippedLayers(attention=(0, 1), mlp=(1,))]
)
def test_stacked_model_skips_the_same_layers(skipped):
  mask = tree.paths(3, 1).ancestors
  assert_same(*both(skipped), mask=mask)


@pytest.mark.parametrize("variant", ["neox", "mixed"])
def test_abstract_params_match_stacked_module(variant):
  config = described.alter(SMALL, **VARIANTS[variant])
  params = stacked.stack(Transformer(config, rngs=nnx.Rngs(0)))
  actual = stacked.abstract_params(config, dtype=jnp.float32)
  shapes = lambda x: (x.shape, x.dtype)
  assert jax.tree.map(shapes, params) == jax.tree.map(shapes, actual)
