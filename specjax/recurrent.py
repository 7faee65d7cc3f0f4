"""Caches of recurrent layers that can roll back over a token tree.

A recurrent layer keeps one state per row instead of a key for every token,

  S_t = e^{g_t} S_{t-1} + k_t u_t^T,

where the gates g are at most 0 and the updates u may depend on earlier states
(the gated delta rule: Yang, Kautz and Hatamizadeh, ICLR 2025). A state cannot
be truncated, so the cache commits it a pass late: besides the state of the
first `base` tokens it keeps keys, updates and gates of each token of the last
pass. Gates are summed along each token's own path of the tree, G_j, so that
after any of its nodes a, with ancestors j,

  S_a = e^{G_a} S_0 + sum_j e^{G_a - G_j} k_j u_j^T,

and no node needs its own state. The accepted path is gathered (`keep_path`) and
folded into the state once a later pass needs its room. To roll back, lower
`Cache.length` as for keys and values, but not below `base`: a row that goes
below it gets NaN.

Letters in shapes: B rows, H value heads, K key heads, P pending tokens, C
channels of a key, V of a value, W convolved channels of a key head, R inputs
that a convolution reaches back, L layers. Arrays of several layers have L
first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.structs import struct

_dot = lax.Precision.HIGHEST  # errors of a state last as long as its text


@struct
class Memory:
  """Cache of one recurrent layer, or of a stack of them.

  Attributes:
    state: `f[B, H, C, V]`, after the first `base` tokens; float32 at least.
    window: `f[B, K, R, W]`, the convolution's newest inputs among them.
    keys: `f[B, K, P, C]`, of the pending tokens, as are the others.
    updates: `f[B, H, P, V]`.
    gates: `f[B, H, P, 1]`, summed along the token's own path; NaN where a
      token's state is not finite.
    inputs: `f[B, K, P, W]`, of the convolution.
  """

  state: Array
  window: Array
  keys: Array
  updates: Array
  gates: Array
  inputs: Array

  @property
  def pending(self) -> tuple[Array, ...]:
    """The arrays that have an entry for each pending token."""
    return self.keys, self.updates, self.gates, self.inputs

  def with_pending(self, pending: tuple[Array, ...]) -> "Memory":
    """The memory with its pending arrays replaced."""
    keys, updates, gates, inputs = pending
    return dataclasses.replace(
      self, keys=keys, updates=updates, gates=gates, inputs=inputs
    )


@struct
class Recurrent:
  """The recurrent part of a `specjax.cache.Cache`.

  Attributes:
    base: `i32[B]`, tokens folded into states; slot i of the text is pending
      token i - base.
    layers: a `Memory` for each recurrent layer, or stacks of them.
  """

  base: Array
  layers: tuple[Memory, ...]

  @property
  def width(self) -> int:
    """P, the most pending tokens of a row."""
    return self.layers[0].keys.shape[-2]


def make_memory(
  *,
  batch: int,
  num_key_heads: int,
  num_value_heads: int,
  key_dim: int,
  value_dim: int,
  reach: int,
  dtype,
  stack: int | None = None,
) -> Memory:
  """An empty memory of these sizes, with room for one pending token.

  `dtype` is that of the convolution's inputs; `stack` is L, None for one layer.
  """
  lead = (batch,) if stack is None else (stack, batch)
  wide = jnp.promote_types(dtype, jnp.float32)
  channels = 2 * key_dim + num_value_heads // num_key_heads * value_dim
  zeros = lambda *shape, dtype=wide: jnp.zeros((*lead, *shape), dtype)
  return Memory(
    state=zeros(num_value_heads, key_dim, value_dim),
    window=zeros(num_key_heads, reach, channels, dtype=dtype),
    keys=zeros(num_key_heads, 1, key_dim),
    updates=zeros(num_value_heads, 1, value_dim),
    gates=zeros(num_value_heads, 1, 1),
    inputs=zeros(num_key_heads, 1, channels, dtype=dtype),
  )


def num_folded(width: int, fed: int, count: Array) -> Array:
  """How many of `count` pending tokens to fold so that `fed` more fit in P."""
  return jnp.maximum(count - max(width - fed, 0), 0)


def advance(memory: Memory, count: Array) -> Memory:
  """Folds the first `count` pending tokens, a chain, into the state.

  `count` is `i32[B]` in 0..P; that many entries at the end become stale.
  """
  width = memory.gates.shape[2]
  last = _after(memory.gates, count)  # [B, H, 1, 1]
  state = jnp.exp(last) * memory.state + jnp.einsum(
    "bkpc,bkrpv->bkrcv", memory.keys, _decayed(memory, count), precision=_dot
  ).reshape(memory.state.shape)
  at = count[:, None] + jnp.arange(width)
  at = jnp.minimum(at, width - 1)[:, None, :, None]
  window = window_after(memory, count)
  memory = dataclasses.replace(memory, gates=memory.gates - last)
  moved = (jnp.take_along_axis(x, at, axis=2) for x in memory.pending)
  return dataclasses.replace(
    memory.with_pending(tuple(moved)), state=state, window=window
  )


def window_after(memory: Memory, count: Array) -> Array:
  """The convolution's inputs before pending token `count`, `f[B, K, R, W]`."""
  reach = memory.window.shape[2]
  inputs = jnp.concatenate([memory.window, memory.inputs], axis=2)
  return jax.vmap(
    lambda row, at: lax.dynamic_slice_in_dim(row, at, reach, axis=1)
  )(inputs, count)


def query(memory: Memory, count: Array, x: Array) -> Array:
  """Products `x S` with the state after a chain of `count` pending tokens.

  `x` is `f[B, K, T, C]`, the result `f[B, K, H / K, T, V]`.
  """
  grouped = (*x.shape[:2], -1)
  state = memory.state.reshape(*grouped, *memory.state.shape[2:])
  last = jnp.exp(_after(memory.gates, count)).reshape(*grouped, 1, 1)
  product = last * jnp.einsum("bktc,bkrcv->bkrtv", x, state, precision=_dot)
  similarity = jnp.einsum("bktc,bkpc->bktp", x, memory.keys, precision=_dot)
  return product + jnp.einsum(
    "bktp,bkrpv->bkrtv", similarity, _decayed(memory, count), precision=_dot
  )


def write(memory: Memory, pending: tuple[Array, ...], at: Array) -> Memory:
  """Writes pending entries from `at: i32[B]` on.

  New gates are added to the sum of those before them.
  """
  keys, updates, gates, inputs = pending
  gates = gates + _after(memory.gates, at)
  put = jax.vmap(
    lambda row, new, at: lax.dynamic_update_slice_in_dim(
      row, new.astype(row.dtype), at, axis=1
    )
  )
  new = keys, updates, gates, inputs
  pairs = zip(memory.pending, new, strict=True)
  return memory.with_pending(tuple(put(x, y, at) for x, y in pairs))


def _decayed(memory: Memory, count: Array) -> Array:
  """The updates as decayed after `count` tokens, `f[B, K, H / K, P, V]`."""
  counted = jnp.arange(memory.gates.shape[2]) < count[:, None]  # [B, P]
  fade = jnp.exp(_after(memory.gates, count) - memory.gates)
  fade = jnp.where(counted[:, None, :, None], fade, 0)
  decayed = fade * memory.updates
  return decayed.reshape(*memory.keys.shape[:2], -1, *decayed.shape[2:])


def _after(gates: Array, count: Array) -> Array:
  """Summed gates of the first `count`, `f[B, H, P, 1] -> f[B, H, 1, 1]`."""
  at = jnp.maximum(count - 1, 0)[:, None, None, None]
  last = jnp.take_along_axis(gates, at, axis=2)
  return jnp.where(count[:, None, None, None] > 0, last, 0)


def widen(recurrent: Recurrent | None, width: int) -> Recurrent | None:
  """Makes room for at least `width` pending tokens."""
  if recurrent is None:
    return None

  def wider(x: Array) -> Array:
    more = [(0, 0)] * x.ndim
    more[-2] = (0, max(width - x.shape[-2], 0))
    return jnp.pad(x, more)

  layers = tuple(
    m.with_pending(tuple(map(wider, m.pending))) for m in recurrent.layers
  )
  return dataclasses.replace(recurrent, layers=layers)


def fold(recurrent: Recurrent, base: Array, width: int) -> Recurrent:
  """Folds pending tokens into states, and shrinks the room for them.

  Args:
    recurrent: `Cache.recurrent`.
    base: `i32[B]`, tokens that states are to hold; those with more keep them.
    width: room for pending tokens afterwards; no more may be left.
  """
  wide = widen(recurrent, width)
  assert wide is not None
  recurrent = wide
  count = jnp.clip(base - recurrent.base, 0, recurrent.width)

  def fold_layer(memory: Memory) -> Memory:
    if memory.state.ndim == 5:
      return lax.map(fold_layer, memory)
    memory = advance(memory, count)
    return memory.with_pending(tuple(x[:, :, :width] for x in memory.pending))

  return Recurrent(
    base=recurrent.base + count, layers=tuple(map(fold_layer, recurrent.layers))
  )


def keep_path(recurrent: Recurrent, start: Array, path: Array) -> Recurrent:
  """Keeps one path of the last pass's nodes pending, and drops the rest.

  `start` and `path` are as in `specjax.cache.keep_path`.
  """
  place = jnp.arange(recurrent.width)
  first = (start - recurrent.base)[:, None]
  step = place - first
  node = jnp.take_along_axis(path, jnp.clip(step, 0, path.shape[1] - 1), axis=1)
  inside = (step >= 0) & (step < path.shape[1])
  at = jnp.where(inside, jnp.minimum(first + node, place[-1]), place)

  def gather(x: Array) -> Array:
    index = at.reshape(*[1] * (x.ndim - 4), len(at), 1, -1, 1)
    return jnp.take_along_axis(x, index, axis=-2)

  layers = tuple(
    m.with_pending(tuple(map(gather, m.pending))) for m in recurrent.layers
  )
  return dataclasses.replace(recurrent, layers=layers)


def reset(recurrent: Recurrent | None, keep: Array) -> Recurrent | None:
  """Zeroes rows that keep no token; `keep` is `i32[B]` or `i32[]`."""
  if recurrent is None:
    return None
  keep = jnp.broadcast_to(keep, recurrent.base.shape)

  def of(x: Array) -> Array:
    shape = [1] * x.ndim
    shape[1 if x.ndim == 5 else 0] = len(keep)
    return jnp.where(keep.reshape(shape) > 0, x, 0)

  return jax.tree.map(of, recurrent)
