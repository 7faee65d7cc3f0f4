"""Attention over prompts of any length, and to a cache of any size."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from models.networks import attention
from models.networks.attention import attend, attend_slots
from specjax import cache as cache_lib
from specjax.tree import k_ary


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
    actual = values[row, head // groups, seen]
    out[row, place, head] = weights @ actual / weights.sum()
  return out.reshape(*q.shape[:2], -1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
  ("batch", "fed"), [(1, 1), (1, 3), (2, 1), (2, 3)], ids=str
)
def test_few_queries_match_naive_attention(batch, fed, kv_heads):
  """One query of one row is multiplied in another order than several."""
  problem = _problem(fed, 9, batch=batch, kv_heads=kv_heads)
  np.testing.assert_allclose(
    jax.jit(attend)(*problem), _slowly(*problem), atol=2e-5
  )


@pytest.mark.parametrize("fed", [5, 4 * attention._QUERIES + 1])
def test_prompts_of_any_length_match_naive_attention(fed):
  problem = _problem(fed, fed + 7)
  np.testing.assert_allclose(
    jax.jit(attend)(*problem), _slowly(*problem), atol=2e-5
  )


def test_full_score_matrix_is_never_materialized():
  fed = 16 * attention._QUERIES
  q, k, v, mask = _problem(fed, fed)
  compiled = jax.jit(attend).lower(q, k, v, mask).compile()
  whole = 4 * q.shape[0] * q.shape[2] * fed * fed  # bytes of all scores
  assert compiled.memory_analysis().temp_size_in_bytes < whole / 2


# ------------------------------------------------------- of a cache, by blocks


@pytest.fixture
def small_blocks(monkeypatch):
  """Blocks of 8 slots, so that small caches have several."""
  monkeypatch.setattr(attention, "_SLOTS", {"cpu": 8, "default": 8})


@pytest.fixture
def at_once(monkeypatch):
  """All blocks are read at once, as on GPUs."""
  monkeypatch.setattr(attention, "_IN_TURN", ())
  width = attention._SLOTS["default"]
  monkeypatch.setattr(attention, "_SLOTS", {"default": width})


def _cached(
  fed, lengths, *, slots=40, layers=0, mask=None, window=None, idle=None
):
  """Queries, what is written for them, and a cache with garbage behind it.

  Returns:
    The arguments of `attend_slots` but for `layer`, and `bool[B, T, S]`.
  """
  batch, heads, kv_heads, channels = len(lengths), 4, 2, 8
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  cache = cache_lib.make_cache(
    batch=batch, slots=slots, num_layers=max(layers, 1), num_kv_heads=kv_heads,
    head_dim=channels, with_positions=True, stacked=bool(layers),
  )  # fmt: skip
  shape = cache.keys[0].shape
  cache = cache.replace(
    keys=(draw(*shape),), values=(draw(*shape),),
    length=jnp.asarray(lengths, jnp.int32),
    positions=jnp.tile(jnp.arange(slots, dtype=jnp.int32), (batch, 1)),
  )  # fmt: skip
  depth = np.arange(fed) if mask is None else mask.sum(-1) - 1
  positions = cache.length[:, None] + depth
  cache = cache_lib.write_positions(cache, positions)
  last = [
    buffer[-1] if layers else buffer for buffer in cache.keys + cache.values
  ]
  new = tuple(
    cache_lib.read_rows(jnp.asarray(b), cache.length, fed) for b in last
  )
  cache = cache.replace(idle=None if idle is None else jnp.asarray(idle))
  visible = cache_lib.visible(cache, positions, mask, window=window)
  dense = toys.attention_mask(cache, positions, mask, window=window)
  buffers = (jnp.asarray(cache.keys[0]), jnp.asarray(cache.values[0]))
  return draw(batch, fed, heads, channels), new, buffers, visible, dense


TREE = k_ary(2, 2).ancestors
# Of paths that are drafted in a loop: longer than some texts.
PATHS = np.tile(np.arange(12) % 3 == np.arange(3)[:, None], (4, 1, 1))


@pytest.mark.parametrize("layers", [0, 3])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
  ("fed", "mask"),
  [(1, None), (3, None), (len(TREE), TREE), (2, TREE[-2:]), (3, PATHS)],
  ids=["token", "chain", "tree", "level", "paths"],
)
@pytest.mark.parametrize("form", ["in_turn", "at_once"])
@pytest.mark.usefixtures("small_blocks")
def test_blockwise_cache_attention_matches_naive_attention(
  form, fed, mask, window, layers, request
):
  """Texts that end before, in and at the end of a block, one empty but for M.

  The last slots of the buffer are in a block that is cut by its end.
  """
  if form == "at_once":
    request.getfixturevalue("at_once")
  lengths = [5, 8, 17, 37 - fed]
  q, new, buffers, visible, dense = _cached(
    fed, lengths, mask=mask, window=window, layers=layers, slots=37
  )
  layer = jnp.int32(layers - 1) if layers else None
  out = jax.jit(attend_slots)(q, new, buffers, visible, layer=layer)
  keys, values = (b[-1] if layers else b for b in buffers)
  np.testing.assert_allclose(out, _slowly(q, keys, values, dense), atol=2e-5)


@pytest.mark.usefixtures("small_blocks")
def test_many_queries_over_cache_match_naive_attention():
  fed = 4 * attention._QUERIES + 1
  q, new, buffers, visible, dense = _cached(fed, [3, 20], slots=fed + 22)
  out = jax.jit(attend_slots)(q, new, buffers, visible)
  np.testing.assert_allclose(out, _slowly(q, *buffers, dense), atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.usefixtures("small_blocks")
def test_row_is_bitwise_independent_of_other_row_lengths(dtype, window):
  """Longer rows only add blocks in which this one sees nothing."""
  lengths = [9, 0, 1, 8, 16, 31, 36]

  def attended(lengths):
    q, new, buffers, visible, _ = _cached(3, lengths, window=window)
    cast = lambda x: x.astype(dtype)
    q, new, buffers = jax.tree.map(cast, (q, new, buffers))
    return np.asarray(
      jax.jit(attend_slots)(q, new, buffers, visible), np.float32
    )

  alone = attended([9] * len(lengths))[0]
  for others in (lengths, [9] + [0] * 6, [9] + [36] * 6, [9, 8] + [16] * 5):
    np.testing.assert_array_equal(attended(others)[0], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("fed", [1, 8])
@pytest.mark.usefixtures("at_once")
def test_reading_more_slots_gives_bitwise_equal_results(fed, dtype):
  """So a longer neighbor, for which they do, changes nothing."""
  width = attention._SLOTS["default"]
  q, new, buffers, visible, _ = _cached(
    fed, [0, 3, 100, width - fed], slots=8 * width + 5
  )
  cast = lambda x: jnp.asarray(x, dtype)
  q, new, buffers = jax.tree.map(cast, (q, new, buffers))
  attended = lambda read: np.asarray(
    jax.jit(attend_slots)(
      q, new, buffers, dataclasses.replace(visible, read_slots=read)
    ), np.float32,
  )  # fmt: skip
  whole = attended(None)
  for blocks in 1, 2, 4, 8:
    np.testing.assert_array_equal(attended(blocks * width), whole)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.usefixtures("small_blocks")
def test_blocks_invisible_to_every_row_are_not_read(window):
  """A value that is read would be felt: 0 x NaN is NaN."""
  q, new, buffers, visible, dense = _cached(2, [18, 22], window=window)
  expected = _slowly(q, *buffers, dense)
  first = 8 if window else 0  # the oldest that is seen is 18 - 4 = 14
  assert not dense[:, :, :first].any()
  lost = tuple(b.at[:, :, 24:].set(np.nan) for b in buffers)
  lost = tuple(b.at[:, :, :first].set(np.nan) for b in lost)
  out = jax.jit(attend_slots)(q, new, lost, visible)
  np.testing.assert_allclose(out, expected, atol=2e-5)
  felt = tuple(b.at[:, :, 16:].set(np.nan) for b in buffers)
  assert np.isnan(jax.jit(attend_slots)(q, new, felt, visible)).any()


@pytest.mark.parametrize(
  ("lengths", "window", "blocks"),
  [([9, 38], None, (0, 16)), ([30, 2], 5, (24, 32)), ([9, 38], 5, (0, 16))],
)
@pytest.mark.usefixtures("small_blocks")
def test_idle_row_cache_is_not_read(lengths, window, blocks):
  """Beside one that is asked for, which gets what it would, to the bit."""
  q, new, buffers, visible, _ = _cached(
    1, lengths, window=window, idle=[False, True]
  )
  everybody = _cached(1, lengths, window=window)[3]
  expected = jax.jit(attend_slots)(q, new, buffers, everybody)[0]
  slot = np.arange(40)
  unread = (slot < blocks[0]) | (slot >= blocks[1])
  lost = tuple(b.at[:, :, unread].set(np.nan) for b in buffers)
  out = jax.jit(attend_slots)(q, new, lost, visible)
  np.testing.assert_array_equal(out[0], expected)
  assert np.isfinite(out[1]).all()
  assert np.isnan(jax.jit(attend_slots)(q, new, lost, everybody)).any()
