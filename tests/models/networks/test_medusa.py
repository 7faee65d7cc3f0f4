"""Medusa's and blockwise heads against their formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.networks import medusa

X = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)


def random(module):
  rng = np.random.default_rng(1)
  nnx.update(
    module,
    jax.tree.map(
      lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype),
      nnx.state(module),
    ),
  )
  return module


def test_a_head_of_medusa_is_residual_blocks_and_a_projection():
  config = medusa.MedusaConfig(
    num_heads=2, num_layers=2, embed_dim=8, vocab_size=11
  )
  module = random(medusa.Medusa(config, rngs=nnx.Rngs(0)))
  marginals, params = medusa.as_marginals(module)
  logits = marginals.apply(params, jnp.asarray(X))
  assert logits.shape == (3, 2, 11)
  for number, head in enumerate(module.heads):
    x = X
    for block in head.blocks:
      y = x @ np.asarray(block.weight).T + np.asarray(block.bias)
      x = x + y / (1 + np.exp(-y))
    expected = x @ np.asarray(head.lm_head.weight).T
    np.testing.assert_allclose(
      logits[:, number], expected, rtol=2e-4, atol=1e-4
    )


def test_untrained_blocks_of_medusa_change_nothing():
  config = medusa.MedusaConfig(
    num_heads=1, num_layers=1, embed_dim=8, vocab_size=11
  )
  module = medusa.Medusa(config, rngs=nnx.Rngs(0))
  expected = X @ np.asarray(module.heads[0].lm_head.weight).T
  np.testing.assert_allclose(module(X)[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_blockwise_outputs_share_a_projection():
  config = medusa.BlockwiseConfig(
    num_heads=3, hidden_dim=5, embed_dim=8, vocab_size=11
  )
  module = random(medusa.Blockwise(config, rngs=nnx.Rngs(0)))
  marginals, params = medusa.as_marginals(module)
  array = lambda x: np.asarray(x[...])
  hidden = X @ array(module.hidden.weight).T + array(module.hidden.bias)
  out = np.maximum(hidden, 0) @ array(module.out.weight).T
  out = (out + array(module.out.bias)).reshape(3, 3, 8)
  expected = (X[:, None] + out) @ array(module.lm_head.weight).T
  actual = marginals.apply(params, jnp.asarray(X))
  np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-3)
