"""The cache, against NumPy: ragged writes, masks, and kept tree paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as cache_lib
from specjax import rows as rows_lib
from specjax import tree as tree_lib

pytestmark = pytest.mark.gpu

HEADS, CHANNELS = 2, 3


def make(batch, slots, *, seed=0, length=None):
  """A cache filled with distinct numbers."""
  rng = np.random.default_rng(seed)
  shape = (batch, HEADS, slots, CHANNELS)
  draw = lambda: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  return cache_lib.Cache(
    keys=(draw(), draw()),
    values=(draw(), draw()),
    positions=jnp.asarray(rng.integers(0, 99, (batch, slots)), jnp.int32),
    length=jnp.zeros(batch, jnp.int32) if length is None else length,
  )


@pytest.mark.parametrize("batch", [1, 8, 9])
def test_rows_are_written_and_read_at_ragged_offsets(batch):
  rng = np.random.default_rng(batch)
  buffer = np.stack([np.asarray(x) for x in make(batch, 10).keys])
  rows = rng.standard_normal((2, batch, HEADS, 3, CHANNELS)).astype(np.float32)
  start = rng.integers(0, 8, batch)
  every, second = buffer.copy(), buffer.copy()
  for b in range(batch):
    every[:, b, :, start[b] : start[b] + 3] = rows[:, b]
    second[1, b, :, start[b] : start[b] + 3] = rows[1, b]
  write = jax.jit(cache_lib.write_rows)
  np.testing.assert_array_equal(write(buffer, rows, start), every)
  one = write(buffer[1], rows[1], start)
  np.testing.assert_array_equal(one, second[1])
  np.testing.assert_array_equal(
    write(buffer, rows[1], start, layer=jnp.int32(1)), second
  )
  for stacked, expected in ((every, rows), (every[1], rows[1])):
    actual = jax.jit(cache_lib.read_rows, static_argnums=2)(stacked, start, 3)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("row", [-1, 0, 2, 3])
def test_single_row_view_writes_and_reads_only_its_row(row, layer):
  """Nobody's row is not written, and no other is touched."""
  rng = np.random.default_rng(0)
  buffer = rng.standard_normal((2, 3, HEADS, 9, CHANNELS)).astype(np.float32)
  shape = (1, HEADS, 4, CHANNELS)
  new = rng.standard_normal(shape if layer else (2, *shape)).astype(np.float32)
  one = cache_lib.RowsView(jnp.asarray(buffer), (jnp.array(row),))
  assert (one.shape, one.ndim) == ((2, 1, HEADS, 9, CHANNELS), 5)
  write = jax.jit(cache_lib.write_rows)
  after = write(one, new, np.array([3]), layer=layer and jnp.int32(layer))
  expected = buffer.copy()
  if 0 <= row < 3:
    expected[slice(None) if layer is None else layer, row, :, 3:7] = (
      new[:, 0] if layer is None else new[0]
    )
    read = jax.jit(cache_lib.read_rows, static_argnums=2)
    actual = read(after, np.array([3]), 4, layer=layer and jnp.int32(layer))
    np.testing.assert_array_equal(actual, new)
  np.testing.assert_array_equal(after.buffer, expected)


@pytest.mark.parametrize("layer", [None, 1])
def test_multi_row_view_writes_and_reads_at_ragged_offsets(layer):
  rng = np.random.default_rng(0)
  buffer = rng.standard_normal((2, 4, HEADS, 9, CHANNELS)).astype(np.float32)
  rows, start = np.array([3, 0]), np.array([1, 5])
  shape = (2, HEADS, 4, CHANNELS)
  new = rng.standard_normal(shape if layer else (2, *shape)).astype(np.float32)
  some = cache_lib.RowsView(jnp.asarray(buffer), tuple(rows))
  assert some.shape == (2, 2, HEADS, 9, CHANNELS)
  at = layer and jnp.int32(layer)
  after = jax.jit(cache_lib.write_rows)(some, new, start, layer=at)
  expected = buffer.copy()
  for i in (0, 1):
    part = expected if layer is None else expected[layer]
    part[..., rows[i], :, start[i] : start[i] + 4, :] = new[..., i, :, :, :]
  np.testing.assert_array_equal(after.buffer, expected)
  read = jax.jit(cache_lib.read_rows, static_argnums=2)
  np.testing.assert_array_equal(read(after, start, 4, layer=at), new)
  block = after.read(jnp.int32(2), 3, at)
  part = expected if layer is None else expected[layer]
  np.testing.assert_array_equal(block, part[..., rows, :, 2:5, :])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
  ("source", "row", "count"), [(0, 2, 5), (2, 1, 11), (1, 1, 9), (0, 3, 8)]
)
def test_copy_text_copies_whole_blocks_to_one_row_only(
  source, row, count, stacked, monkeypatch
):
  monkeypatch.setattr(rows_lib, "_COPIED", 4)
  rng = np.random.default_rng(0)
  shape = (2, 3, HEADS, 11, CHANNELS)[not stacked :]
  buffers = tuple(rng.standard_normal(shape).astype("f") for _ in range(2))
  copied = jax.jit(rows_lib._copy_text)(
    jax.tree.map(jnp.asarray, buffers), *map(jnp.int32, (source, row, count))
  )
  slots = min(-(-count // 4) * 4, 11)
  for before, after in zip(buffers, copied, strict=True):
    expected = before.copy()
    if row < 3:
      expected[..., row, :, :slots, :] = before[..., source, :, :slots, :]
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("batch", [1, 4, 12])
@pytest.mark.parametrize("shape", [(3, 2), (4, 3), (2, 5)])
def test_keep_path_matches_numpy_gather(shape, batch):
  """Overlapping shifts included: XLA:CPU miscompiles the naive form."""
  tree = tree_lib.paths(*shape)
  nodes, width = tree.num_nodes, tree.max_depth + 1
  rng = np.random.default_rng(batch)
  cache = make(batch, nodes + 9, seed=batch)
  start = rng.integers(0, 9, batch)
  node = rng.integers(0, nodes, batch)
  path, depth = tree.paths[node], tree.depth[node]
  keep = jax.jit(cache_lib.keep_path, static_argnames="nodes")
  kept = keep(cache, start, path, start + depth + 1, nodes=nodes)
  for before, after in zip(
    (*cache.keys, *cache.values), (*kept.keys, *kept.values), strict=True
  ):
    expected = np.asarray(before).copy()
    for b in range(batch):
      for i in range(width):
        expected[b, :, start[b] + i] = before[b, :, start[b] + path[b, i]]
    np.testing.assert_array_equal(after, expected)
  for b in range(batch):
    new = slice(int(start[b]), int(start[b] + depth[b] + 1))
    first = int(cache.positions[b, start[b]])
    np.testing.assert_array_equal(
      kept.positions[b, new], first + np.arange(depth[b] + 1)
    )
  np.testing.assert_array_equal(kept.length, start + depth + 1)
