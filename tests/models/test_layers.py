"""What layers are built of: attention over prompts of any length."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import layers
from models.layers import attend


def _problem(fed, slots, *, batch=2, heads=4, kv_heads=2, channels=8):
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (batch, fed, heads, channels))
  k, v = (
    jax.random.normal(key, (batch, kv_heads, slots, channels))
    for key in keys[1:]
  )
  # Rows begin at slots of their own, as in a conversation that goes on.
  start = np.array([slots - fed, 0])[:batch]
  mask = np.arange(slots) <= (start[:, None] + np.arange(fed))[..., None]
  return q, k, v, jnp.asarray(mask)


def _slowly(q, keys, values, mask):
  """Each query by itself, in float64."""
  q, keys, values = (np.asarray(x, float) for x in (q, keys, values))
  out = np.zeros_like(q)
  groups = q.shape[2] // keys.shape[1]
  for row, place, head in np.ndindex(*q.shape[:3]):
    seen = np.asarray(mask[row, place])
    scores = keys[row, head // groups, seen] @ q[row, place, head]
    weights = np.exp(scores / math.sqrt(q.shape[-1]))
    found = values[row, head // groups, seen]
    out[row, place, head] = weights @ found / weights.sum()
  return out.reshape(*q.shape[:2], -1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
  ("batch", "fed"), [(1, 1), (1, 3), (2, 1), (2, 3)], ids=str
)
def test_few_queries_attend_as_each_by_itself(batch, fed, kv_heads):
  """One query of one row is multiplied in another order than several."""
  problem = _problem(fed, 9, batch=batch, kv_heads=kv_heads)
  np.testing.assert_allclose(
    jax.jit(attend)(*problem), _slowly(*problem), atol=2e-5
  )


@pytest.mark.parametrize("fed", [5, 4 * layers._QUERIES + 1])
def test_prompts_of_any_length_attend_as_each_query_by_itself(fed):
  problem = _problem(fed, fed + 7)
  np.testing.assert_allclose(
    jax.jit(attend)(*problem), _slowly(*problem), atol=2e-5
  )


def test_no_scores_of_more_queries_than_a_block_are_ever_there():
  fed = 16 * layers._QUERIES
  q, k, v, mask = _problem(fed, fed)
  compiled = jax.jit(attend).lower(q, k, v, mask).compile()
  whole = 4 * q.shape[0] * q.shape[2] * fed * fed  # bytes of all scores
  assert compiled.memory_analysis().temp_size_in_bytes < whole / 2
