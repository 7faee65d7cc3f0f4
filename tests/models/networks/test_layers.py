"""Projections lie as files have them."""

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.networks import layers
from models.networks.description import llama_config
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


def test_a_projection_computes_in_its_own_type():
  """Of inputs and parameters of any type."""
  linear = layers.Linear(5, 4, True, jnp.bfloat16, nnx.Rngs(0))
  linear.weight = nnx.Param(linear.weight[...].astype(jnp.float32))
  assert linear(X).dtype == jnp.bfloat16
  weight = linear.weight[...].astype(jnp.bfloat16)
  for rows in (X.astype(jnp.bfloat16), X[:1, :2].astype(jnp.bfloat16)):
    assert project(rows, weight, result=jnp.float32).dtype == jnp.float32


def test_weights_of_a_token_leave_out_experts_that_it_is_not_given():
  config = llama_config(
    vocab_size=7, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, max_positions=99,
  )  # fmt: skip
  config = described.alter(config, **described.MIXED)
  mixed, dense = (layers.weights_met(config, i) for i in (0, 1))
  assert mixed[0] == dense[0] == 32 * 8 * (4 + 2 + 2 + 4)
  # Two experts, the shared one, and the router.
  assert mixed[1] == 32 * (3 * (2 * 12 + 8) + 4)
  assert dense[1] == 32 * 3 * 48
