"""Projections lie as files have them."""

import dataclasses

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.networks import layers
from models.networks.description import DeltaSpec, llama_config
from models.networks.linear import project, projections
from models.networks.quantized import Quantization, quantize_module
from models.networks.quantized_tensor import quantize
from models.networks.transformer import Transformer, as_language_model

X = jax.random.normal(jax.random.key(0), (2, 3, 5))


@pytest.mark.parametrize("rows", [X, X[:1, :1], X[:2, :1], X[:1, :2]])
def test_projection_has_one_row_per_output(rows):
  linear = layers.Linear(5, 4, True, jnp.float32, nnx.Rngs(0))
  linear.bias[...] = jnp.arange(4.0)
  assert linear.weight.shape == (4, 5)
  expected = np.asarray(rows) @ np.asarray(linear.weight[...]).T + np.arange(4)
  np.testing.assert_allclose(linear(rows), expected, atol=1e-6)


def test_projection_computes_in_its_own_dtype():
  """Of inputs and parameters of any type."""
  linear = layers.Linear(5, 4, True, jnp.bfloat16, nnx.Rngs(0))
  linear.weight = nnx.Param(linear.weight[...].astype(jnp.float32))
  assert linear(X).dtype == jnp.bfloat16
  weight = linear.weight[...].astype(jnp.bfloat16)
  for rows in (X.astype(jnp.bfloat16), X[:1, :2].astype(jnp.bfloat16)):
    assert project(rows, weight, result=jnp.float32).dtype == jnp.float32


SMALL = llama_config(
  vocab_size=61, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
  head_dim=8, mlp_dim=64, max_positions=99,
)  # fmt: skip


DELTA = dataclasses.replace(
  SMALL.layers[0],
  attention=DeltaSpec(
    num_key_heads=2, num_value_heads=4, key_dim=4, value_dim=8
  ),
)  # fmt: skip


@pytest.mark.parametrize(
  ("changes", "how", "products"),
  [
    (dict(qkv_bias=True), None, [64, 128, 64, 128]),
    (dict(qkv_bias=True), "int8", [64, 128, 64, 128]),
    (dict(gated=False), "int4", [64, 64]),
    (dict(layers=(DELTA,)), "fp4", [88, 128, 88, 128]),
    (described.GEMMA4, None, [64, 96, 60, 96, 96]),
  ],
  ids=["biases", "int8", "int4", "fp4", "gemma4"],
)
def test_fused_projections_match_separate_ones(
  changes, how, products, monkeypatch
):
  """Up to rounding: sums may be taken in another order."""
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  count = None if "per_layer_dim" in changes else 2
  config = described.alter(SMALL, num_layers=count, **changes)
  module = Transformer(config, rngs=nnx.Rngs(0))
  for _, linear in projections(module):
    if linear.bias is not None:
      linear.bias[...] = jax.random.normal(jax.random.key(1), linear.bias.shape)
  if how is not None:
    quantize_module(module, Quantization(dtype=how, group=16))
  tokens = jax.random.randint(jax.random.key(0), (2, 6), 0, 61)

  def logits():
    model, params = as_language_model(module)
    cache = model.init_cache(2, 16)
    cached = jax.jit(model.apply)(params, tokens, cache)[0].logits
    return cached, jax.jit(lambda m: m(tokens)[0].logits)(module)

  expected = logits()
  for layer in module.layers:
    layers.lay_out(layer)
  for ours, theirs in zip(logits(), expected, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
  fused = [x for name, x in projections(module) if name == "fused"]
  assert [x.weight[...].shape[0] for x in fused] == products


def test_differently_quantized_projections_are_not_fused(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  config = described.alter(SMALL, num_layers=1)
  layer = Transformer(config, rngs=nnx.Rngs(0)).layers[0]
  low = quantize(layer.attention.v.weight[...], "int8")
  layer.attention.v.weight = nnx.Param(low)
  layers.lay_out(layer)
  assert not hasattr(layer.attention, "fused")
  np.testing.assert_array_equal(
    layer.attention.v.weight[...].values, low.values
  )
  assert not hasattr(layer.mlp, "gate")


def test_active_weights_exclude_unselected_experts():
  config = llama_config(
    vocab_size=7, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, max_positions=99,
  )  # fmt: skip
  config = described.alter(config, **described.MIXED)
  mixed, dense = (layers.active_weights(config, i) for i in (0, 1))
  assert mixed[0] == dense[0] == 32 * 8 * (4 + 2 + 2 + 4)
  # Two experts, the shared one, and the router.
  assert mixed[1] == 32 * (3 * (2 * 12 + 8) + 4)
  assert dense[1] == 32 * 3 * 48
