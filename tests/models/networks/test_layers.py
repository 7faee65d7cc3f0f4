"""Projections lie as files have them."""

import math

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.networks import layers
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
  attention_weights,
)
from models.networks.linear import project, turn

X = jax.random.normal(jax.random.key(0), (2, 3, 5))


@pytest.mark.parametrize("rows", [X, X[:1, :1], X[:2, :1], X[:1, :2]])
def test_a_projection_has_a_row_for_each_output(rows):
  linear = layers.Linear(5, 4, True, jnp.float32, nnx.Rngs(0))
  linear.bias[...] = jnp.arange(4.0)
  assert linear.weight.shape == (4, 5)
  expected = np.asarray(rows) @ np.asarray(linear.weight[...]).T + np.arange(4)
  np.testing.assert_allclose(linear(rows), expected, atol=1e-6)
  holder = nnx.Sequential()
  holder.inner, was = linear, linear.weight[...]
  for _ in range(2):  # what is turned stays so
    turn(holder)
    assert linear.weight.shape == (5, 4)
    np.testing.assert_array_equal(linear.weight[...].T, was)
    np.testing.assert_allclose(linear(rows), expected, atol=1e-6)


@pytest.mark.parametrize("std", [0.02, 0.5])
def test_a_projections_first_weights_deviate_as_asked(std):
  linear = layers.Linear(300, 200, False, jnp.float32, nnx.Rngs(0), std)
  assert linear.bias is None
  assert np.std(linear.weight[...]) == pytest.approx(std, rel=0.02)


def test_a_projection_computes_in_its_own_type():
  """Of inputs and parameters of any type."""
  linear = layers.Linear(5, 4, True, jnp.bfloat16, nnx.Rngs(0))
  linear.weight = nnx.Param(linear.weight[...].astype(jnp.float32))
  assert linear(X).dtype == jnp.bfloat16
  weight = linear.weight[...].astype(jnp.bfloat16)
  for rows in (X.astype(jnp.bfloat16), X[:1, :2].astype(jnp.bfloat16)):
    assert project(rows, weight, result=jnp.float32).dtype == jnp.float32


GATED = AttentionSpec(
  num_heads=2, num_kv_heads=1, head_dim=4, output_gate=True
)  # fmt: skip
DELTA = DeltaSpec(
  num_key_heads=2, num_value_heads=4, key_dim=5, value_dim=3, kernel=3
)  # fmt: skip


@pytest.mark.parametrize(
  "specs",
  [
    described.GEMMA4["layers"],
    described.LATENTS["layers"],
    tuple(LayerSpec(attention=a, feed_forward=DenseSpec(width=8))
          for a in (GATED, DELTA)),
  ],
)  # fmt: skip
def test_weights_of_an_attention_are_those_of_its_matrices(specs):
  config = TransformerConfig(
    layers=specs, vocab_size=7, embed_dim=32, norm_eps=1e-5, max_positions=99,
    tied_embeddings=False,
  )  # fmt: skip
  for index, spec in enumerate(specs):
    make = lambda index=index: layers.Layer(
      config, jnp.float32, index=index, rngs=nnx.Rngs(0)
    )
    shapes = nnx.state(nnx.eval_shape(make).attention)
    matrices = [
      x.shape
      for path, x in nnx.to_flat_state(shapes)
      if path[-1] == "weight" and len(x.shape) == 2
    ]
    expected = sum(map(math.prod, matrices))
    assert attention_weights(spec, config.embed_dim) == expected
