"""The stacked T5 is the T5, layer for layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.networks import t5, t5_stacked
from models.networks.t5_config import T5Config
from specjax import tree
from specjax.types import Inputs

pytestmark = pytest.mark.usefixtures("quick_to_compile")

VOCAB, ROWS = 31, 3
SMALL = dict(
  vocab_size=VOCAB, embed_dim=16, num_layers=3, num_encoder_layers=2,
  num_heads=4, head_dim=5, mlp_dim=24, num_buckets=8, max_distance=12,
)  # fmt: skip
VARIANTS = {
  "1.0": {},
  "1.1": dict(gated_mlp=True, tied_embeddings=False, scale_outputs=False),
}
RNG = np.random.default_rng(0)
INPUTS = Inputs(
  tokens=RNG.integers(0, VOCAB, (ROWS, 9), np.int32),
  lengths=np.array([9, 2, 5], np.int32),
)
TOKENS = RNG.integers(0, VOCAB, (ROWS, 11), np.int32)
FORK = tree.Tree((-1, 0, 0, 1, 1))


def both(variant, dtype=jnp.float32):
  """A module's functions and parameters, and the stacked ones."""
  config = T5Config(**SMALL | VARIANTS[variant])
  module = t5.T5(config, dtype=dtype, rngs=nnx.Rngs(0))
  model, params = t5.as_language_model(module)
  params = jax.tree.map(lambda x: (1.5 * x).astype(x.dtype), params)
  nnx.update(module, params)
  return (
    (model, params),
    (
      t5_stacked.as_language_model(config, dtype=dtype),
      t5_stacked.stack(module),
    ),
  )


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_memory_and_cache_are_the_same(variant):
  """Fed in two parts, rolled back between them, the second one a tree."""
  results = []
  for model, params in both(variant):

    @jax.jit
    def run(params, model=model):
      cache = model.new_cache(params, ROWS, 16, INPUTS)
      _, cache = model.apply(params, TOKENS[:, :6], cache)
      cache = cache.replace(length=jnp.array([6, 2, 4]))
      return model.apply(
        params, TOKENS[:, 6:], cache, mask=FORK.ancestors,
        positions=cache.length[:, None] + FORK.depth,
      )  # fmt: skip

    results.append(run(params))
  (plain, cache), (stacked, other) = results
  np.testing.assert_allclose(stacked.logits, plain.logits, atol=1e-5)
  assert np.abs(plain.logits).max() > 0.1
  for ours, theirs in (
    (other.keys, cache.keys),
    (other.values, cache.values),
    (other.context.keys, cache.context.keys),
    (other.context.values, cache.context.values),
  ):
    np.testing.assert_allclose(ours[0], jnp.stack(theirs), atol=1e-5)
  np.testing.assert_array_equal(other.context.mask, cache.context.mask)
  np.testing.assert_array_equal(other.length, cache.length)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_abstract_params_are_those_of_a_stacked_module(dtype):
  config = T5Config(**SMALL | VARIANTS["1.1"])
  dtype = jnp.dtype(dtype)
  params = t5_stacked.stack(t5.T5(config, dtype=dtype, rngs=nnx.Rngs(0)))
  actual = t5_stacked.abstract_params(config, dtype=dtype)
  described = lambda x: (x.shape, x.dtype)
  assert jax.tree.map(described, params) == jax.tree.map(described, actual)
  assert params["layers"]["encoder"]["mlp"]["up"]["weight"].shape[0] == 2
