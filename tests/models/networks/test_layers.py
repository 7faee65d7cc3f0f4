"""Projections lie as files have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.networks import layers

X = jax.random.normal(jax.random.key(0), (2, 3, 5))


@pytest.mark.parametrize("rows", [X, X[:1, :1], X[:2, :1], X[:1, :2]])
def test_a_projection_has_a_row_for_each_output(rows):
  linear = layers.Linear(5, 4, True, jnp.float32, nnx.Rngs(0))
  linear.bias[...] = jnp.arange(4.0)
  assert linear.weight.shape == (4, 5)
  expected = np.asarray(rows) @ np.asarray(linear.weight[...]).T + np.arange(4)
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
    assert layers.project(rows, weight, jnp.float32).dtype == jnp.float32
