"""Grouped-query attention, among tokens and to the slots of a cache.

`attend` is one softmax over all keys. `attend_slots` reads a cache block by
block, up to the longest text of any row, with a running softmax (Milakov and
Gimelshein, 2018): a pass costs what is used, not what is allocated. On
GPUs, where the host runs loops and every layer would wait for it, all blocks
are read at once: as many as the program is compiled for (`Cache.read_slots`).

Letters in shapes: B rows, T fed tokens, M slots with a mask of their own, S
cache slots, W slots of a block, H query heads, K key/value heads, G = H / K
queries per key head, C channels per head, L layers.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax import cache as cache_lib
from specjax.cache import Visible

# Queries per block if there are more than four times as many. The float32
# scores of a long prompt dominate its memory and do not fit a CPU's cache: on
# two cores 1,343 queries at once take 2.2 to 2.8 times as long.
_QUERIES = 128
# Slots per block. On two cores a block and its scores stay in the L2 cache: of
# 64, 128 and 256 slots 128 are fastest for one and eight rows, at 100 and 1,100
# tokens. Not measured elsewhere: TPUs have larger blocks, since loop overhead
# weighs more with fast memory; GPUs' divide the sizes of `cache.slots_for`.
_SLOTS = {"cpu": 128, "tpu": 512, "default": 256}
_SCORES = 2**28  # most scores at once where blocks are not read in turn
_IN_TURN = ("cpu", "tpu")  # backends that run loops on the device
_EACH = ((0, 1), (0, 1))  # rows and heads of keys, in a product


def scores_of(q: Array, keys: Array) -> Array:
  """Attention scores of queries and their groups' keys, in float32.

  Args:
    q: `[B, T, H, C]`.
    keys: `[B, K, S, C]`.

  Returns:
    `f32[B, K, G, T, S]`, H = K G.
  """
  products = _products(_grouped(q, keys.shape[1]), keys)
  return products.reshape(*products.shape[:2], -1, q.shape[1], keys.shape[2])


def values_of(weights: Array, values: Array) -> Array:
  """Weighted sums of values for each query, `[B, T, H, C]`.

  Args:
    weights: `[B, K, G, T, S]`, in the values' type.
    values: `[B, K, S, C]`.
  """
  fed = weights.shape[3]
  weights = weights.reshape(*weights.shape[:2], -1, weights.shape[-1])
  out = lax.dot_general(weights, values, (((3,), (2,)), _EACH))
  out = jnp.moveaxis(out.reshape(*out.shape[:2], -1, fed, out.shape[-1]), 3, 1)
  return out.reshape(*out.shape[:2], -1, out.shape[-1])


def _grouped(q: Array, count: int) -> Array:
  """Groups queries by key head, `[B, T, H, C] -> [B, K, G T, C]`.

  The queries of a group are rows of one matrix product: with separate G and T,
  XLA:CPU loops over small products, which takes three times as long.
  """
  batch, fed, heads, channels = q.shape
  q = jnp.moveaxis(q.reshape(batch, fed, count, heads // count, channels), 1, 3)
  return q.reshape(batch, count, -1, channels)


def _products(q: Array, keys: Array) -> Array:
  """Scores of grouped queries, `f32[B, K, G T, S]`."""
  return lax.dot_general(
    q, keys, (((3,), (3,)), _EACH),
    preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
  )  # fmt: skip


def capped(scores: Array, most: float | None) -> Array:
  """Soft-caps scores or logits: `c tanh(x / c)` with c = `most`, if given."""
  return scores if most is None else most * jnp.tanh(scores / most)


def attend(
  q: Array,
  keys: Array,
  values: Array,
  mask: Array,
  *,
  scale: float | None = None,
  softcap: float | None = None,
  sinks: Array | None = None,
  bias: Array | None = None,
) -> Array:
  """Attention to all given keys, with a float32 softmax.

  Many queries are processed in blocks: scores are at most `[B, H, 512, S]`,
  however long the prompt.

  Args:
    q: `[B, T, H, C]`.
    keys, values: `[B, K, S, C]`.
    mask: `bool[B, T, S]`, True where attention is allowed.
    scale: factor of the scores; by default `1 / sqrt(C)`.
    softcap: see `capped`; applied to the scaled scores, before the mask.
    sinks: `[H]`, a score per head that takes part in the softmax without a
      value; neither scaled nor capped.
    bias: `f32[B or 1, H, T, S]`, added to the scores.

  Returns:
    `[B, T, H * C]`.
  """
  scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale

  def some(q, mask, *bias):
    scores = capped(scores_of(q, keys) * scale, softcap)
    for added in bias:
      added = jnp.swapaxes(added, 1, 2)
      scores += added.reshape(len(added), *scores.shape[1:])
    scores = jnp.where(
      mask[:, None, None], scores, jnp.finfo(scores.dtype).min
    )  # every query sees itself, so no row is empty
    if sinks is not None:
      more = _by_group(sinks, scores)[..., None]
      more = jnp.broadcast_to(more, (*scores.shape[:-1], 1))
      scores = jnp.concatenate([scores, more], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    if sinks is not None:
      weights = weights[..., :-1]
    return values_of(weights, values)

  biases = () if bias is None else (jnp.swapaxes(bias, 1, 2),)
  return _by_queries(some, q, mask, *biases)


def _by_group(sinks: Array, scores: Array) -> Array:
  """Sinks in the shape of scores `[B, K, G, ..]`, `[H] -> f[1, K, G, 1]`."""
  return sinks.astype(scores.dtype).reshape(1, *scores.shape[1:3], 1)


def _by_queries(
  some: Callable,
  q: Array,
  *others: Array,
  size: int = _QUERIES,
  most: int = 4 * _QUERIES,
) -> Array:
  """`some(q, *others)`, `[B, T, H * C]`; in blocks for more than `most`."""
  batch, fed = q.shape[:2]
  if fed <= most:
    return some(q, *others).reshape(batch, fed, -1)
  count = -(-fed // size)

  def parts(x):
    more = ((0, 0), (0, count * size - fed), *[(0, 0)] * (x.ndim - 2))
    x = jnp.pad(x, more).reshape(len(x), count, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  out = lax.map(lambda each: some(*each), tuple(map(parts, (q, *others))))
  out = jnp.moveaxis(out, 0, 1)  # [B, n, T', H, C]
  return out.reshape(batch, count * size, -1)[:, :fed]


def slots_read(text: int, room: int, window: int | None = None) -> int:
  """Number of slots, of S = `room`, that a pass reads on a TPU.

  `text` is the longest text's length, `window` a sliding window's size. A GPU
  reads up to twice as many, and does not skip slots outside the window.
  """
  width = min(_SLOTS["tpu"], -(-room // 2))
  first = 0 if window is None else max(text - window, 0) // width
  return min((-(-text // width) - first) * width, room)


def attend_slots(
  q: Array,
  new: tuple[Array, Array] | None,
  buffers: tuple[Array, Array],
  visible: Visible,
  *,
  layer: Array | None = None,
  scale: float | None = None,
  softcap: float | None = None,
  sinks: Array | None = None,
  bias: Callable[[Array, Array], Array] | None = None,
) -> Array:
  """Attention to a cache, reading only blocks that some row sees.

  A block that a row does not see leaves its result bit for bit the same, so a
  row does not depend on others' lengths. Unseen slots may hold any key, and any
  finite value (`specjax.cache.contain`).

  Args:
    q: `[B, T, H, C]`.
    new: keys and values of the fed tokens, `[B, K, T, C]`, which are also in
      the buffers; None for cross-attention.
    buffers: keys and values, `[B, K, S, C]` or, of all layers,
      `[L, B, K, S, C]`.
    visible: which slots the tokens see.
    layer: `i32[]`, which of the L.
    scale, softcap, sinks: as for `attend`.
    bias: `(query positions i32[B, T], key positions i32[B or 1, n]) ->
      f32[B, H, T, n]`, added to the scores.

  Returns:
    `[B, T, H * C]`.
  """
  scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
  read = functools.partial(
    _attend_slots, scale=scale, softcap=softcap, bias=bias
  )
  fed_pairs, masked = None, ()
  if new is not None:
    count = visible.fed_mask.shape[-1]
    # Slots before the fed ones may have a mask too: levels of a tree.
    old = lambda b: cache_lib.read_rows(b, visible.text, count, layer=layer)
    fed_pairs = new
    if count != q.shape[1]:
      fed_pairs = tuple(cache_lib.as_read(old(b)) for b in buffers)
    masked = (visible.fed_mask.reshape(-1, *visible.fed_mask.shape[-2:]),)
  arguments = fed_pairs, buffers, visible, layer, sinks

  def at_once(q, positions, mask, *arguments, slots):
    room = buffers[0].shape[-2]
    count = min(visible.read_slots or room, room)
    most = max(_SCORES // (len(q) * q.shape[2] * count), 1)
    out = _by_queries(
      lambda q, positions, *mask: read(
        q, positions, mask, *arguments, slots=slots, in_turn=False
      ),
      q, positions, *mask, size=most, most=most,
    )  # fmt: skip
    return out.reshape(q.shape)

  def some(q, positions, *mask):
    on = {
      device: functools.partial(read, slots=slots, in_turn=True)
      if device in _IN_TURN
      else functools.partial(at_once, slots=slots)
      for device, slots in _SLOTS.items()
    }
    return lax.platform_dependent(q, positions, mask, *arguments, **on)

  return _by_queries(some, q, visible.positions, *map(jnp.asarray, masked))


def _attend_slots(
  q, positions, mask, fed_pairs, buffers, visible, layer, sinks,
  *, scale, softcap, bias, slots, in_turn,
):  # fmt: skip
  """`attend_slots` for a block of queries, `[B, T, H, C]`."""
  batch, fed, heads, _ = q.shape
  kv_heads, room = buffers[0].shape[-3:-1]
  dtype = jnp.promote_types(q.dtype, jnp.float32)
  grouped = _grouped(q, kv_heads)

  def merge(carry, keys, values, seen, key_positions, *, width=None):
    """Merges keys `[B, K, n, C]` that are `seen: bool[B, T, n]`.

    With a width, sums them in blocks of it.
    """
    scores = capped(_products(grouped, keys) * scale, softcap)
    scores = scores.reshape(batch, kv_heads, -1, fed, scores.shape[-1])
    if bias is not None:
      added = bias(positions, key_positions)
      scores = scores + added.reshape(*added.shape[:1], *scores.shape[1:])
    seen = seen[:, None, None]
    scores = jnp.where(seen, scores, jnp.finfo(dtype).min)
    most = jnp.max(scores, axis=-1)
    if carry is not None:
      most = jnp.maximum(carry[0], most)
    weights = jnp.where(seen, jnp.exp(scores - most[..., None]), 0)
    rows = weights.reshape(batch, kv_heads, -1, seen.shape[-1])
    if width is None:
      total = jnp.sum(weights, axis=-1)
      mean = lax.dot_general(
        rows.astype(values.dtype), values, (((3,), (2,)), _EACH),
        preferred_element_type=dtype,
      )  # fmt: skip
    else:
      total, mean = _sums(rows, values, width)
      total = total.reshape(most.shape)
    mean = mean.reshape(*most.shape, -1)
    if carry is not None:
      # If nothing in a block is seen: x 1, and + 0.
      faded = jnp.exp(carry[0] - most)
      total = carry[1] * faded + total
      mean = carry[2] * faded[..., None] + mean
    return most, total, mean

  if fed_pairs is None:
    shape = (batch, kv_heads, heads // kv_heads, fed)
    carry = (
      jnp.full(shape, jnp.finfo(dtype).min, dtype),
      jnp.zeros(shape, dtype),
      jnp.zeros((*shape, q.shape[-1]), dtype),
    )
  else:
    carry = merge(None, *fed_pairs, *mask, visible.own_positions)

  def some(first, count, carry, width=None):
    """Merges `count` slots from the first on; see `merge`."""
    first = jnp.asarray(first, visible.text.dtype)
    at = jnp.minimum(first, room - count)  # as dynamic slices are clamped
    slot = at + jnp.arange(count, dtype=at.dtype)
    seen = (slot >= first) & (slot < visible.text[:, None])  # [B, W]
    where = slot[None]
    if visible.slots is not None:
      where = lax.dynamic_slice_in_dim(visible.slots, at, count, axis=1)
    seen = seen[:, None]
    if visible.window is not None:
      seen &= positions[..., None] - where[:, None] < visible.window
    keys, values = (_block(b, layer, at, count) for b in buffers)
    return merge(carry, keys, values, seen, where, width=width)

  if fed_pairs is not None and mask[0].shape[-1] == room:
    pass  # no slot is left
  elif in_turn:
    # At least two blocks: XLA hoists a constant product out of the loop, and
    # then repeats the cache's write in it.
    slots = min(slots, -(-room // 2))
    carry = lax.fori_loop(
      visible.first // slots,
      -(-visible.stop // slots),
      lambda i, carry: some(i * slots, slots, carry),
      carry,
    )
  else:
    count = min(visible.read_slots or room, room)
    whole = count // slots * slots
    if whole:
      carry = some(0, whole, carry, slots)
    if whole < count:
      carry = some(whole, count - whole, carry)
  most, total, mean = carry
  if sinks is not None:
    given = _by_group(sinks, most)
    highest = jnp.maximum(most, given)
    faded = jnp.exp(most - highest)
    total = total * faded + jnp.exp(given - highest)
    mean = mean * faded[..., None]
  out = (mean / total[..., None]).astype(q.dtype)
  return jnp.moveaxis(out, 3, 1).reshape(q.shape)


def _sums(weights: Array, values: Array, width: int) -> tuple[Array, Array]:
  """Sums of weights, `[B, K, Q, n]`, and weighted values, `[B, K, n, C]`.

  Blocks of a width are summed first, then pairs, pairs of pairs and so on: more
  blocks with weights of 0 change no bit.
  """
  blocks = lambda x, axis: x.reshape(
    *x.shape[:axis], -1, width, *x.shape[axis + 1 :]
  )
  weights, values = blocks(weights, 3), blocks(values, 2)
  sums = lax.dot_general(
    weights.astype(values.dtype),
    values,
    (((4,), (3,)), ((3, 0, 1), (2, 0, 1))),
    preferred_element_type=weights.dtype,
  )

  def in_pairs(x: Array) -> Array:
    while len(x) > 1:
      pairs = x[: len(x) // 2 * 2]
      x = jnp.concatenate([pairs[::2] + pairs[1::2], x[len(pairs) :]])
    return x[0]

  return in_pairs(jnp.moveaxis(jnp.sum(weights, axis=-1), 3, 0)), in_pairs(sums)


def _block(buffer, layer: Array | None, at: Array, slots: int) -> Array:
  """Slots `at ..` of a layer, `[B, K, W, C]`."""
  if isinstance(buffer, cache_lib.Quantized):
    block = lambda b: _block(b, layer, at, slots)
    is_view = lambda x: isinstance(x, cache_lib.RowsView)
    return cache_lib.as_read(jax.tree.map(block, buffer, is_leaf=is_view))
  if isinstance(buffer, cache_lib.RowsView):
    return buffer.read(at, slots, layer)
  if layer is None:
    return lax.dynamic_slice_in_dim(buffer, at, slots, axis=2)
  zero = jnp.zeros((), at.dtype)
  start = (jnp.asarray(layer, at.dtype), zero, zero, at, zero)
  sizes = (1, *buffer.shape[1:3], slots, buffer.shape[4])
  return cache_lib.row_major(lax.dynamic_slice(buffer, start, sizes))[0]
