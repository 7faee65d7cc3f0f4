"""The key/value cache: ragged writes, accepted paths, and rollback.

A cache is a plain pytree carried through `lax.while_loop`. Rows advance by
different amounts, so every row has its own `length`; nothing is ever shifted or
cleared. To roll back, lower `length`: slots at or beyond it are stale, hidden
by the attention mask, and overwritten by the next write.

Letters in shapes: B rows, S slots, K key/value heads, C channels per head,
T fed tokens, M trailing slots with an explicit mask, L layers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from specjax import quantized_cache
from specjax import recurrent as recurrent_lib
from specjax.quantized_cache import Quantized
from specjax.recurrent import Recurrent
from specjax.structs import static, struct

_LEAST = 256  # the fewest slots of `slots_for`


@struct
class Cache:
  """Keys and values of the tokens a model was fed.

  Attributes:
    keys: one array `[B, K, S, C]` per layer, or stacked ones `[L, B, K, S, C]`;
      models without attention may keep other per-slot state here. If quantized,
      each is a `Quantized`.
    values: as `keys`.
    positions: `i32[B, S]`, the position of the token in each slot, or None for
      models that never compare positions (only sliding windows do).
    length: `i32[B]`, the number of slots in use in each row.
    idle: `bool[B]`, rows whose output is unused: any finite output will do.
      None if all are used.
    context: the encoder's output for the row's input, arrays with rows first,
      or `[L, B, K, S', C]`. None for decoder-only models.
    recurrent: states of recurrent layers, which can be rolled back only over
      the last pass (`specjax.recurrent`); None without such layers.
    read_slots: how many of the first slots hold all texts (static); None for
      all. On GPUs a pass reads this many; elsewhere, up to the longest text.
  """

  keys: tuple[Array, ...]
  values: tuple[Array, ...]
  positions: Array | None
  length: Array
  idle: Array | None = None
  context: Any = None
  recurrent: Recurrent | None = None
  read_slots: int | None = static(default=None)

  @property
  def slots(self) -> int:
    """S, the number of slots of each row."""
    return self.keys[0].shape[-2]

  def replace(self, **changes) -> "Cache":
    """A copy with some fields changed."""
    return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowsView:
  """A view of some rows of a buffer, for `write_rows` and `read_rows`.

  Attributes:
    buffer: `[B, K, S, C]` or `[L, B, K, S, C]`.
    rows: R indices `i32[]`, distinct; outside 0..B-1 nothing is written.
  """

  buffer: Array
  rows: tuple[Array, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """The rows' shape, as an array."""
    shape = self.buffer.shape
    return (*shape[:-4], len(self.rows), *shape[-3:])

  @property
  def ndim(self) -> int:
    """4, or 5."""
    return self.buffer.ndim

  @property
  def dtype(self):
    """The buffer's dtype."""
    return self.buffer.dtype

  def read(self, slot: Array, count: int, layer: Array | None = None) -> Array:
    """Reads slots from `slot`, `i32[R]` or `i32[]`, on.

    Returns `[R, K, T, C]`, or `[L, R, K, T, C]` for all layers.
    """
    shape = self.buffer.shape
    sizes = (*shape[:-4], 1, shape[-3], count, shape[-1])
    if layer is not None:
      sizes = (1, *sizes[1:])
    slots = jnp.concatenate(
      [
        lax.dynamic_slice(self.buffer, first, sizes)
        for _, first in self._each(slot, layer)
      ],
      axis=-4,
    )
    if self.ndim == 5:
      slots = row_major(slots)
    return slots if layer is None else slots[0]

  def write(
    self, rows: Array, slot: Array, layer: Array | None = None
  ) -> "RowsView":
    """The view with slots `slot ..` replaced; see `read`."""
    if layer is not None:
      rows = rows[None]
    buffer = self.buffer
    for i, (inside, first) in enumerate(self._each(slot, layer)):
      new = rows[..., i : i + 1, :, :, :].astype(self.dtype)
      old = lax.dynamic_slice(buffer, first, new.shape)
      new = jnp.where(inside, new, old)
      buffer = lax.dynamic_update_slice(buffer, new, first)
    return dataclasses.replace(self, buffer=buffer)

  def _each(self, slot: Array, layer: Array | None):
    """Whether each row exists, and the start indices of its slice."""
    zero, count = jnp.zeros((), slot.dtype), self.buffer.shape[-4]
    in_layer = (
      ()
      if self.ndim == 4
      else (jnp.asarray(0 if layer is None else layer, zero.dtype),)
    )
    for i, row in enumerate(self.rows):
      inside = (row >= 0) & (row < count)
      row = jnp.clip(row, 0, count - 1).astype(zero.dtype)
      yield inside, (*in_layer, row, zero, slot[i] if slot.ndim else slot, zero)


def make_cache(
  *,
  batch: int,
  slots: int,
  num_layers: int,
  num_kv_heads: int | Sequence[int],
  head_dim: int | Sequence[int],
  value_dim: int | Sequence[int] | None = None,
  dtype=jnp.float32,
  with_positions: bool = False,
  stacked: bool = False,
  stored: str | None = None,
) -> Cache:
  """An empty cache; every slot is zero and every length is 0.

  With `stacked`, one array holds all layers; else heads and channels may differ
  by layer. Values have `value_dim` channels, by default as many as keys.
  `stored` is the quantized type of keys and values
  (`specjax.quantized_cache.KINDS`); None stores them as `dtype`.
  """
  quantized_cache.check(stored)

  def of_each(size: int | Sequence[int]) -> Sequence[int]:
    return [size] * num_layers if isinstance(size, int) else size

  def empty(*shape: Any):
    if stored is None:
      return jnp.zeros(shape, dtype)
    return quantized_cache.zeros(shape, dtype, stored)

  def zeros(channels: int | Sequence[int]) -> tuple[Any, ...]:
    if stacked:
      return (empty(num_layers, batch, num_kv_heads, slots, channels),)
    each = zip(of_each(num_kv_heads), of_each(channels), strict=True)
    return tuple(empty(batch, k, slots, c) for k, c in each)

  positions = jnp.zeros((batch, slots), jnp.int32) if with_positions else None
  length = jnp.zeros((batch,), jnp.int32)
  return Cache(
    keys=zeros(head_dim),
    values=zeros(head_dim if value_dim is None else value_dim),
    positions=positions,
    length=length,
  )


def over_caches(function: Callable[..., Any], tree: Any, *more: Any) -> Any:
  """Maps `function` over the corresponding caches of pytrees."""
  is_cache = lambda node: isinstance(node, Cache)
  of = lambda node, *others: function(node, *others) if is_cache(node) else node
  return jax.tree.map(of, tree, *more, is_leaf=is_cache)


def with_idle(tree: Any, idle: Array | None) -> Any:
  """Sets `Cache.idle` in every cache of a pytree."""
  return over_caches(lambda cache: cache.replace(idle=idle), tree)


def with_read_slots(tree: Any, slots: int | None) -> Any:
  """Sets `Cache.read_slots` in every cache of a pytree."""
  return over_caches(lambda cache: cache.replace(read_slots=slots), tree)


def most_slots(tree: Any) -> int:
  """Slots per row of the largest cache in a pytree; 0 if there is none."""
  is_cache = lambda node: isinstance(node, Cache)
  caches = filter(is_cache, jax.tree.leaves(tree, is_leaf=is_cache))
  return max((cache.slots for cache in caches if cache.keys), default=0)


def slots_for(tree: Any, text: int, buffer_length: int) -> int | None:
  """Slots that a program should read for texts of up to `text` tokens.

  Enough for the text and for a draft beyond `buffer_length`, rounded up to a
  power of two, so that few programs are compiled. None, for all slots, if that
  is more than half of them.
  """
  most = most_slots(tree)
  needed = text + most - buffer_length
  size = max(_LEAST, 1 << (needed - 1).bit_length())
  return size if 2 * size <= most else None


def row_axes(caches: Any) -> Any:
  """The row axis of each array in a pytree of caches.

  Raises:
    ValueError: if there is an array outside a `Cache`.
  """

  def of(node):
    if not isinstance(node, Cache):
      raise ValueError(
        "row axes are known only for a Cache, got an array of shape "
        f"{tuple(node.shape)} (a drafter with such a state needs row_axes)"
      )
    return jax.tree.map(lambda x: 1 if x.ndim == 5 else 0, node)

  return jax.tree.map(of, caches, is_leaf=lambda x: isinstance(x, Cache))


def contain(keys: Array, values: Array) -> tuple[Array, Array]:
  """Moves non-finite entries from values to keys, where masks contain them.

  An invisible slot has weight 0, and 0 x NaN is NaN: one broken value would
  reach every later token of its row. A masked score is replaced, whatever it
  is, so a NaN in the slot's key reaches only the tokens that see the slot.

  Args:
    keys: `[..., C]`, about to be written.
    values: `[..., C]`.

  Returns:
    Both; finite ones are unchanged.
  """
  broken = ~jnp.isfinite(values)
  return jnp.where(broken, jnp.nan, keys), jnp.where(broken, 0, values)


def as_stored(rows: Array, buffer: Any) -> tuple[Array, Any]:
  """Slots `[B, K, T, C]` as read back from a buffer, and as written to it.

  Fed tokens attend to each other as if read from the cache, so that splitting a
  text into passes changes no distribution.
  """
  if isinstance(buffer, Quantized):
    stored = quantized_cache.store(rows, buffer)
    return quantized_cache.load(stored), stored
  rows = rows.astype(buffer.dtype)
  return rows, rows


def as_read(rows: Any) -> Array:
  """Slots from `read_rows` as arrays of the model's dtype."""
  return quantized_cache.load(rows) if isinstance(rows, Quantized) else rows


def write_rows(
  buffer: Array | RowsView | Quantized,
  rows: Any,
  start: Array,
  *,
  layer: Array | None = None,
) -> Any:
  """Writes `rows` into `buffer` at each row's own slot.

  A few rows are written one by one, in place; more rows of a single layer, in
  one batched scatter, for which XLA:TPU would copy a whole stacked buffer.

  Args:
    buffer: `[B, K, S, C]`, or `[L, B, K, S, C]`; or one row of it.
    rows: `[B, K, T, C]`, or `[L, B, K, T, C]` to write into all layers; cast to
      the buffer's dtype. For `Quantized`, from `as_stored` or `read_rows`.
    start: `i32[B]`, the slot of the first of the T rows. The caller ensures
      `start + T <= S`, as `lax.dynamic_update_slice` clamps silently.
    layer: `i32[]`, the layer of a stacked buffer to write to.

  Returns:
    The buffer, updated in place if it is donated or a loop's carry.
  """
  if isinstance(buffer, Quantized):
    put = lambda b, x: write_rows(b, x, start, layer=layer)
    return jax.tree.map(put, buffer, rows, is_leaf=_is_view)
  if isinstance(buffer, RowsView):
    return buffer.write(rows, start, layer)
  rows = rows.astype(buffer.dtype)
  # Indices of one type: literals would be int64 when x64 is enabled.
  index = lambda *parts: tuple(jnp.asarray(p, start.dtype) for p in parts)
  first = () if buffer.ndim == 4 else (0 if layer is None else layer,)
  if layer is not None:
    rows = rows[None]
  if buffer.ndim == 5 or buffer.shape[-4] <= _MAX_UNROLLED_ROWS:
    for b in range(buffer.shape[-4]):
      buffer = lax.dynamic_update_slice(
        buffer, rows[..., b : b + 1, :, :, :], index(*first, b, 0, start[b], 0)
      )
    return buffer
  return jax.vmap(
    lambda buf, new, at: lax.dynamic_update_slice(
      buf, new, index(*first, 0, at, 0)
    ),
    in_axes=(-4, -4, 0),
    out_axes=-4,
  )(buffer, rows, start)


_MAX_UNROLLED_ROWS = 8


_is_view = lambda x: isinstance(x, RowsView)


def row_major(x: Array) -> Array:
  """Constrains `x` to a row-major layout in memory.

  Otherwise XLA may transpose a whole cache to read a few slots of it. Scales,
  one per slot, have slots innermost: on TPUs the last axis takes 128 lanes.
  """
  order = tuple(range(x.ndim))
  if x.shape[-1] == 1:
    order = (*order[:-2], *order[:-3:-1])
  return with_layout_constraint(x, Layout(major_to_minor=order))


def read_rows(
  buffer: Array | RowsView | Quantized,
  start: Array,
  count: int,
  *,
  layer: Array | None = None,
) -> Any:
  """Reads `count` slots, beginning at each row's own slot.

  Rows of a stacked buffer are read one by one: for a batched gather, XLA:TPU
  would transpose the whole buffer.

  Args:
    buffer: `[B, K, S, C]`, or `[L, B, K, S, C]`; or one row of it.
    start: `i32[B]`, the first slot to read in each row.
    count: T, slots to read.
    layer: `i32[]`, the layer of a stacked buffer to read.

  Returns:
    `[B, K, T, C]` or `[L, B, K, T, C]`; `Quantized` if so stored (`as_read`).
  """
  if isinstance(buffer, Quantized):
    get = lambda b: read_rows(b, start, count, layer=layer)
    return jax.tree.map(get, buffer, is_leaf=_is_view)
  if isinstance(buffer, RowsView):
    return buffer.read(start, count, layer)
  if buffer.ndim == 5:
    layers, batch, heads, _, channels = buffer.shape
    zero = jnp.zeros((), start.dtype)
    first = zero if layer is None else jnp.asarray(layer, start.dtype)
    rows = [
      lax.dynamic_slice(
        buffer,
        (first, jnp.asarray(b, start.dtype), zero, start[b], zero),
        (layers if layer is None else 1, 1, heads, count, channels),
      )
      for b in range(batch)
    ]
    slots = jnp.concatenate(rows, axis=1)
    return row_major(slots) if layer is None else slots[0]
  return jax.vmap(
    lambda row, at: lax.dynamic_slice_in_dim(row, at, count, axis=-2)
  )(buffer, start)


def write_positions(cache: Cache, positions: Array) -> Cache:
  """Records the next tokens' positions `i32[B, T]`, if the cache keeps any."""
  if cache.positions is None:
    return cache
  update = jax.vmap(lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))
  positions = positions.astype(cache.positions.dtype)
  return cache.replace(
    positions=update(cache.positions, positions, cache.length, 0)
  )


@struct
class Visible:
  """The slots of a cache that T fed tokens see.

  These are the text, as far back as a window reaches, and those that a mask
  selects from the M slots after it, which hold the fed tokens.

  Attributes:
    text: `i32[B]`, the number of slots of the text; the M slots begin there.
    fed_mask: `bool[T, M]`, static, or `bool[B, T, M]`: which of the M slots
      each token sees. None if there is only the text, as in an encoder's.
    positions: `i32[B, T]`, of the fed tokens.
    own_positions: `i32[B, M]`, of the tokens in the M slots; None if the cache
      keeps no positions.
    slots: `i32[B, S]`, positions of all slots, or None likewise.
    window: `i32[]`, W, already applied to `fed_mask`; None for none.
    first: `i32[]`, the first slot of a text that a token of any row sees.
    stop: `i32[]`, the length of the longest text of a row that is not idle.
    read_slots: as in `Cache`.
  """

  text: Array
  fed_mask: np.ndarray | Array | None
  positions: Array
  own_positions: Array | None
  slots: Array | None
  window: Array | None
  first: Array
  stop: Array
  read_slots: int | None = static(default=None)


def visible(
  cache: Cache,
  positions: Array,
  mask: np.ndarray | Array | None,
  *,
  window: int | None = None,
) -> Visible:
  """The slots that the next T tokens, at `positions` `i32[B, T]`, see.

  The positions must be in the cache already, if it keeps any
  (`write_positions`); the mask is as in `specjax.types.ApplyFn`. With a window
  of W a key is visible while `query position - key position < W`.
  """
  fed = positions.shape[1]
  fed_mask = np.tril(np.ones((fed, fed), bool)) if mask is None else mask
  columns = fed_mask.shape[-1]
  text = cache.length + (fed - columns)
  if fed_mask.ndim == 3 and columns > fed:  # those before slot 0 are dropped
    column = np.arange(columns) + jnp.maximum(-text, 0)[:, None, None]
    fed_mask = (column < columns) & jnp.take_along_axis(
      jnp.asarray(fed_mask), jnp.minimum(column, columns - 1), axis=2
    )
    text = jnp.maximum(text, 0)
  used = text if cache.idle is None else jnp.where(cache.idle, 0, text)
  first, slots, own_positions = jnp.zeros((), text.dtype), None, None
  if cache.positions is not None:
    slots = cache.positions
    own_positions = jax.vmap(
      lambda row, at: lax.dynamic_slice_in_dim(row, at, columns)
    )(slots, text)
  if window is not None:
    if slots is None or own_positions is None:
      raise ValueError("a sliding window needs a cache that keeps positions")
    near = positions[..., None] - own_positions[:, None] < window
    fed_mask = near & jnp.asarray(fed_mask)
    slot = jnp.arange(cache.slots, dtype=text.dtype)
    near = jnp.min(positions, axis=1)[:, None] - slots < window
    near &= slot < used[:, None]
    first = jnp.min(jnp.where(near, slot, cache.slots))
  return Visible(
    text=text,
    fed_mask=fed_mask,
    positions=positions,
    own_positions=own_positions,
    slots=slots,
    window=None if window is None else jnp.asarray(window, positions.dtype),
    first=first,
    stop=jnp.max(used),
    read_slots=cache.read_slots,
  )


def keep_path(
  cache: Cache, start: Array, path: Array, length: Array, *, nodes: int
) -> Cache:
  """Keeps one root-to-node path of a verified token tree and drops the rest.

  The tree's nodes are in slots `start .. start + nodes - 1`, in node order. The
  kept nodes are gathered into a small fresh buffer and written back to
  `start ..`; XLA:CPU would miscompile an overlapping in-place shift
  (openxla/xla#49176).

  Args:
    cache: holds all `nodes` nodes.
    start: `i32[B]`, the root's slot.
    path: `i32[B, G + 1]`, node indices of the kept path, root first; entries
      beyond a row's path may be any valid node (their slots become stale).
    length: `i32[B]`, the new length of each row.
    nodes: number of nodes in the tree, root included.

  Returns:
    The cache with the path in consecutive slots and `length` set.
  """

  def gather(buffer):  # [..., B, K, S, C]
    block = read_rows(buffer, start, nodes)  # [..., B, K, N + 1, C]
    index = path[:, None, :, None].reshape(
      *[1] * (buffer.ndim - 4), path.shape[0], 1, path.shape[1], 1
    )
    kept = jnp.take_along_axis(block, index, axis=-2)
    if buffer.ndim == 5:  # nothing is written before everything is read
      buffer, kept = lax.optimization_barrier((buffer, kept))
    return write_rows(buffer, kept, start)

  positions = cache.positions
  if positions is not None:
    # A node's depth is its index along the path, so positions are consecutive.
    steps = jnp.arange(path.shape[1], dtype=positions.dtype)
    first = jnp.take_along_axis(positions, start[:, None], axis=1)  # [B, 1]
    positions = jax.vmap(
      lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None)
    )(positions, first + steps, start, 0)
  recurrent = cache.recurrent
  if recurrent is not None:
    recurrent = recurrent_lib.keep_path(recurrent, start, path)
  return cache.replace(
    keys=jax.tree.map(gather, cache.keys),
    values=jax.tree.map(gather, cache.values),
    positions=positions,
    length=length,
    recurrent=recurrent,
  )
