"""Layers with the gated delta rule, over token trees.

Gated DeltaNet (Yang, Kautz and Hatamizadeh, ICLR 2025), as in three of four
layers of Qwen3-Next and Qwen3.5. Every value head keeps a matrix S, which a
token with query q, key k, value v, gate g <= 0 and strength b updates:

  S <- e^g S,   u = b (v - S^T k),   S <- S + k u^T,   with output S^T q.

In a tree no node needs the state of its own path. With G the gates summed along
each node's path, A_ij = 1 where node j is i or an ancestor of i, and D_ij =
A_ij e^{G_i - G_j}, the updates of all nodes solve

  (I + M) U = diag(b) V - diag(b e^G) K S,   M_ij = b_i (k_i . k_j) D_ij

with i != j, which is unit lower triangular since parents come first, and the
outputs are

  diag(e^G) Q S + ((Q K^T) o D) U.

A chain is the special case where all earlier tokens are ancestors, DeltaNet's
parallel form (Yang et al., NeurIPS 2024). A long one, such as a prompt, is
processed in pieces of 64 tokens, each from the state that the one before left,
so work and memory grow linearly with its length.

The layer's state is a `specjax.recurrent.Memory`: a pass reads and writes it to
fold pending tokens into it, and reads it once more for all keys and queries
together, whatever the tree. Before the rule, a short convolution reads each
node, its nearest ancestors, and then committed tokens.

Letters in shapes: B rows, T fed tokens, D model width, K key heads, R = H / K
value heads of each, C and V channels of a key and a value, W convolved channels
of a key head, N tokens that the convolution reads, P pending tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from models.networks.description import DeltaSpec, TransformerConfig
from models.networks.linear import Linear, outputs
from models.networks.mixture import ACTIVATIONS
from specjax import recurrent
from specjax.cache import Cache
from specjax.recurrent import Memory
from specjax.structs import struct

_TINY = 1e-6  # added to squared lengths of queries and keys
_CHUNK = 64  # tokens of a chain per linear system
# States accumulate over a whole text, so no product is rounded to bfloat16.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


@struct
class Paths:
  """Ancestors of T fed tokens, and the pending tokens before them.

  Attributes:
    self_or_above: `bool[B or 1, T, T]`, whether token j is i or its ancestor;
      None for a chain.
    first: `i32[B or 1, T]`, the first ancestor of each token in a chain; None
      for other trees.
    taps: `i32[B or 1, T, N]`, the inputs of each token's convolution, oldest
      first, among N - 1 committed inputs followed by the T; None for those
      right before it, and itself.
    count: `i32[B]`, pending tokens that are committed by now; None without a
      cache.
    lost: `bool[B]`, rows that went back too far.
    idle: `bool[B]`, as in a `Cache`, or None.
  """

  self_or_above: Array | None
  first: Array | None
  taps: Array | None
  count: Array | None = None
  lost: Array | None = None
  idle: Array | None = None

  @property
  def tree(self) -> Array:
    """`self_or_above`, also for a chain."""
    if self.first is None:
      assert self.self_or_above is not None
      return self.self_or_above
    return _chained(self.first, jnp.arange(self.first.shape[1]))

  def reached(self, some: Array) -> Array:
    """Marks tokens and their descendants, `bool[B, K, T] -> bool[B, K, T]`."""
    if self.first is None:
      return jnp.any(self.tree[:, None] & some[:, :, None], axis=-1)
    newest = jnp.where(some, jnp.arange(some.shape[2]), -1)
    return lax.cummax(newest, axis=2) >= self.first[:, None]


def chain(
  fed: int, segments: Array | None, kernel: int, cache: Cache | None
) -> Paths:
  """The `Paths` of a chain of T tokens.

  With `segments`, `i32[B, T]`, tokens descend only from those of their own
  document, which must be contiguous. `kernel` is N; the cache is about to
  receive the tokens.
  """
  at = jnp.arange(fed, dtype=jnp.int32)[None]
  if segments is None:
    above = Paths(self_or_above=None, first=jnp.zeros_like(at), taps=None)
    return _with_cache(above, cache)
  begins = segments[:, 1:] != segments[:, :-1]
  begins = jnp.pad(begins, ((0, 0), (1, 0)), constant_values=True)
  first = lax.cummax(jnp.where(begins, at, 0), axis=1)
  back = np.arange(kernel - 1, -1, -1)
  # A document's first token is preceded by what precedes the row.
  lacks = jnp.maximum(back - (at - first)[..., None], 0)
  near = at[..., None] - back + kernel - 1
  taps = jnp.where(lacks > 0, kernel - 1 - lacks, near)
  return _with_cache(Paths(self_or_above=None, first=first, taps=taps), cache)


def from_mask(
  visible: np.ndarray | Array, kernel: int, cache: Cache | None
) -> Paths:
  """The `Paths` of a mask of ancestors, `bool[B, T, T]` or `bool[T, T]`.

  `kernel` and `cache` as for `chain`. Raises ValueError for a mask over more
  than the fed tokens.
  """
  fed, others = visible.shape[-2:]
  if fed != others:
    raise ValueError(
      f"recurrent layers need a tree in one pass, got {fed} tokens and a mask "
      f"over {others}"
    )
  tree = jnp.asarray(visible) | np.eye(fed, dtype=bool)
  tree = tree if tree.ndim == 3 else tree[None]
  depth = jnp.sum(tree, axis=-1, dtype=jnp.int32)  # including the token itself
  back = depth[:, :, None] - depth[:, None, :]
  taps = []
  for distance in reversed(range(kernel)):
    at = jnp.argmax(tree & (back == distance), axis=-1) + kernel - 1
    taps.append(jnp.where(distance < depth, at, kernel - 2 - distance + depth))
  taps = jnp.stack(taps, axis=-1)
  return _with_cache(Paths(self_or_above=tree, first=None, taps=taps), cache)


def _with_cache(above: Paths, cache: Cache | None) -> Paths:
  """Adds the cache's information on earlier tokens."""
  if cache is None or cache.recurrent is None:
    return above
  count = cache.length - cache.recurrent.base
  return dataclasses.replace(
    above, count=jnp.maximum(count, 0), lost=count < 0, idle=cache.idle
  )


class GatedDelta(nnx.Module):
  """The gated delta rule instead of attention.

  Projections group channels by key head (its query, its key, its values), so
  they can be split over devices by key head.

  Args:
    config: the model's configuration.
    dtype: dtype of parameters and activations. From the convolution to the
      output projection it computes in float32 at least.
    index: index of the layer in the model.
    rngs: for the initial weights.
  """

  names = ("qkv", "z", "a", "b")  # of projections, to be fused

  def __init__(
    self, config: TransformerConfig, dtype, *, index: int, rngs: nnx.Rngs
  ):
    s = config.layers[index].attention
    assert isinstance(s, DeltaSpec)
    self.spec, self.eps = s, config.norm_eps
    size, width = config.embed_dim, s.num_value_heads * s.value_dim
    mixed = s.num_key_heads * s.channels
    self.dtype = jnp.dtype(dtype)
    self.qkv = Linear(size, mixed, False, dtype, rngs)
    self.z = Linear(size, width, False, dtype, rngs)
    self.a = Linear(size, s.num_value_heads, False, dtype, rngs)
    self.b = Linear(size, s.num_value_heads, False, dtype, rngs)
    self.delta_out = Linear(width, size, False, dtype, rngs)
    init = nnx.initializers.normal(s.kernel**-0.5)
    self.conv = nnx.Param(init(rngs.params(), (mixed, s.kernel), self.dtype))
    zeros = lambda: nnx.Param(jnp.zeros(s.num_value_heads, self.dtype))
    self.log_decay, self.step_bias = zeros(), zeros()
    self.norm = nnx.Param(jnp.ones(s.value_dim, self.dtype))

  def __call__(self, x, rotary, paths, kv, start, *, layer=None):
    """Like `models.networks.layers.Attention`.

    `paths` is a `Paths`; `kv` is the layer's `specjax.recurrent.Memory` (None
    without a cache), which is returned as after the pass.
    """
    del rotary, start, layer
    s = self.spec
    batch, fed, _ = x.shape
    wide = jnp.promote_types(x.dtype, jnp.float32)
    raw, z, steps, strength = outputs(self, self.names, x)
    raw = raw.reshape(batch, fed, s.num_key_heads, s.channels)
    raw = jnp.swapaxes(raw, 1, 2)  # [B, K, T, W]
    if kv is None:
      window = jnp.zeros_like(raw[:, :, :1]).repeat(s.kernel - 1, axis=2)
    else:
      memory, count = _prepared(kv, fed, paths.count)
      window = recurrent.window_after(memory, count)
    mixed = self._convolved(window, raw, paths.taps, wide)
    q, k, v = jnp.split(mixed, (s.key_dim, 2 * s.key_dim), axis=-1)
    v = v.reshape(batch, s.num_key_heads, fed, -1, s.value_dim)
    v = jnp.swapaxes(v, 2, 3)  # [B, K, R, T, V]
    per_head = lambda y: jnp.moveaxis(
      y.astype(wide).reshape(batch, fed, s.num_key_heads, -1), 1, 3
    )  # [B, K, R, T]
    strength = jax.nn.sigmoid(per_head(strength))
    steps = steps.astype(wide) + self.step_bias[...].astype(wide)
    decay = jnp.exp(self.log_decay[...].astype(wide))
    gates = per_head(-decay * jax.nn.softplus(steps))
    # Non-finite numbers must only reach descendants; see `_broken`.
    broken = _broken(mixed, strength, gates)  # [B, K, T]
    heal = lambda y: jnp.where(broken[..., None], 0, y)
    heal_heads = lambda y: jnp.where(broken[:, :, None], 0, y)
    q, k = _unit(heal(q)) * s.key_dim**-0.5, _unit(heal(k))
    v = jnp.where(broken[:, :, None, :, None], 0, v)
    these = q, k, v, heal_heads(gates), heal_heads(strength)
    lose = lambda y: jnp.where(paths.lost[:, *[None] * 4], jnp.nan, y)
    if paths.first is not None and fed > _CHUNK:
      state = jnp.zeros_like(v, shape=(*v.shape[:3], s.key_dim, s.value_dim))
      if kv is not None:
        state = recurrent.advance(memory, count).state.reshape(state.shape)
        state = lose(state)
      out, updates, total = _in_chunks(*these, state, paths.first)
    else:
      read = None
      if kv is not None:
        read = lambda x: lose(recurrent.query(memory, count, x))
      out, updates, total = _solved(*these, read, paths.tree)
    on_path = paths.reached(broken)
    out = jnp.where(on_path[:, :, None, :, None], jnp.nan, out)
    total = jnp.where(broken[:, :, None], jnp.nan, total)
    out = jnp.moveaxis(out, 3, 1)  # [B, T, K, R, V]
    y = self.delta_out(self._gated(out, z, wide).astype(x.dtype))
    if kv is None:
      return y, None
    value_heads = lambda y: y.reshape(batch, s.num_value_heads, *y.shape[3:])
    new = k, value_heads(updates), value_heads(total)[..., None], raw
    new = recurrent.write(memory, new, count)
    if paths.idle is not None:  # idle rows are not changed
      left, old = paths.idle[:, None, None, None], _with_room(kv, fed)
      new = jax.tree.map(lambda x, y: jnp.where(left, x, y), old, new)
    return y, new

  def _convolved(self, window, raw, taps, wide):
    """The convolution's outputs, `f[B, K, T, W]`, after the activation."""
    whole = jnp.concatenate([window.astype(raw.dtype), raw], axis=2)
    weights = self.conv[...].astype(wide)
    weights = weights.reshape(self.spec.num_key_heads, 1, -1, self.spec.kernel)
    total = 0
    for tap in range(self.spec.kernel):
      if taps is None:
        read = whole[:, :, tap : tap + raw.shape[2]]
      else:
        at = jnp.broadcast_to(taps[:, None, :, tap, None], (*raw.shape[:3], 1))
        read = jnp.take_along_axis(whole, at, axis=2)
      total = total + read.astype(wide) * weights[..., tap]
    return ACTIVATIONS[self.spec.activation](total)

  def _gated(self, out, z, wide):
    """Normed heads times a gate, `[B, T, K, R, V] -> [B, T, H V]`."""
    mean = jnp.mean(jnp.square(out), axis=-1, keepdims=True)
    out = out * lax.rsqrt(mean + self.eps) * self.norm[...].astype(wide)
    return out.reshape(z.shape) * jax.nn.silu(z.astype(wide))


def _unit(x: Array) -> Array:
  """Normalizes queries or keys to (almost) unit length."""
  square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * lax.rsqrt(square + _TINY)


def _broken(mixed: Array, strength: Array, gates: Array) -> Array:
  """Tokens with non-finite numbers, by key head, `bool[B, K, T]`.

  They are computed with zeros instead, which do not affect other tokens. NaN is
  then written to the outputs of their descendants and to their gates, and thus
  to the state if they are committed.
  """
  of = lambda x, axis: ~jnp.all(jnp.isfinite(x), axis=axis)
  return of(mixed, -1) | of(strength, 2) | of(gates, 2)


def _solved(q, k, v, gates, strength, read, tree):
  """Outputs and updates of all tokens, and their summed gates.

  `f[B, K, R, T, V]` twice and `f[B, K, R, T]`, from q and k, `f[B, K, T, C]`,
  v, `f[B, K, R, T, V]`, gates and strength, `f[B, K, R, T]`, and the tree.
  `read`, `f[B, K, T, C] -> f[B, K, R, T, V]`, applies the initial state to
  queries or keys; None if it is zero.
  """
  fed = q.shape[2]
  tree = jnp.broadcast_to(tree, (len(q), fed, fed))
  total = _along_paths(tree, gates)
  fade = total[..., :, None] - total[..., None, :]
  fade = jnp.exp(jnp.where(tree[:, None, None], fade, -jnp.inf))
  others = ~np.eye(fed, dtype=bool)
  similarity = _einsum("bkic,bkjc->bkij", k, k)[:, :, None]
  system = strength[..., None] * similarity * fade * others
  wanted = v
  if read is not None:
    faded = jnp.exp(total)[..., None]
    of_keys, of_queries = jnp.split(  # reads the state once for both
      read(jnp.concatenate([k, q], axis=2)), 2, axis=3
    )
    wanted = v - faded * of_keys
  updates = _einsum(
    "bkrij,bkrjv->bkriv", _inverse(system), strength[..., None] * wanted
  )
  weights = _einsum("bkic,bkjc->bkij", q, k)[:, :, None] * fade
  out = _einsum("bkrij,bkrjv->bkriv", weights, updates)
  if read is not None:
    out = out + faded * of_queries
  return out, updates, total


def _inverse(system: Array) -> Array:
  """`(I + M)^-1` of strictly lower triangular M, `f[..., T, T]`.

  Inverts blocks on the diagonal, doubling their size: the inverse of a block
  [[A, 0], [C, B]] is D - D C D, with D the inverses of A and B. This forms no
  powers of M, whose entries can reach 10^17 for T = 64, and only needs matrix
  products, unlike a batched triangular solve on TPUs.
  """
  place = np.arange(system.shape[-1])
  unit = jnp.eye(len(place), dtype=system.dtype)
  inverse, size = jnp.broadcast_to(unit, system.shape), 1
  while size < len(place):
    block = place // size
    below = (block % 2 == 1)[:, None] & (block[:, None] == block + 1)
    between = system * below
    if size > 1:  # otherwise D is I
      between = _einsum("...ij,...jk->...ik", between, inverse)
      between = _einsum("...ij,...jk->...ik", inverse, between)
    inverse, size = inverse - between, 2 * size
  return inverse


def _in_chunks(q, k, v, gates, strength, state, first):
  """Like `_solved` for a chain, where each piece reads the state before it.

  `state`, `f[B, K, R, C, V]`, precedes the chain: tokens that see token 0 see
  it. `first` is as in `Paths`.
  """
  fed = q.shape[2]
  count = -(-fed // _CHUNK)

  def cut(x, axis):  # padding does not change the state and is not read
    more = [(0, 0)] * x.ndim
    more[axis] = (0, count * _CHUNK - fed)
    shape = (*x.shape[:axis], count, _CHUNK, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, more).reshape(shape), axis, 0)

  def joined(x):  # [N, B, K, R, CHUNK, ...] -> [B, K, R, T, ...]
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :fed]

  def piece(carry, this):
    (state, before), (q, k, v, gates, strength, first, begin) = carry, this
    visible = (first < begin) | (begin == 0)  # [B or 1, CHUNK]
    tree = _chained(first, begin + jnp.arange(_CHUNK))
    both = jnp.tile(visible, 2)[:, None, None, :, None]
    out, updates, total = _solved(
      q, k, v, gates, strength,
      lambda x: jnp.where(both, _einsum("bktc,bkrcv->bkrtv", x, state), 0),
      tree,
    )  # fmt: skip
    last = total[..., -1:]
    fade = jnp.where(tree[:, None, None, -1], last - total, -jnp.inf)
    fade = jnp.exp(fade)[..., None]
    old = jnp.where(visible[:, None, None, -1:], last, -jnp.inf)
    state = jnp.exp(old)[..., None] * state + _einsum(
      "bktc,bkrtv->bkrcv", k, fade * updates
    )
    total += jnp.where(visible[:, None, None], before, 0)
    return (state, total[..., -1:]), (out, updates, total)

  pieces = (
    cut(q, 2), cut(k, 2), cut(v, 3), cut(gates, 3), cut(strength, 3),
    cut(first, 1), _CHUNK * jnp.arange(count),
  )  # fmt: skip
  nothing = jnp.zeros_like(gates[..., :1])
  _, outputs = lax.scan(piece, (state, nothing), pieces)
  return tuple(map(joined, outputs))


def _chained(first: Array, at: Array) -> Array:
  """Paths (and self) of consecutive tokens `i32[T]` of a chain.

  `i32[B or 1, T] -> bool[B or 1, T, T]`.
  """
  return (at[:, None] >= at) & (at >= first[..., None])


def _along_paths(tree: Array, gates: Array) -> Array:
  """Gates summed over each token and its ancestors, `f[B, K, R, T]`."""
  return _einsum("bij,bkrj->bkri", tree.astype(gates.dtype), gates)


def _with_room(memory: Memory, fed: int) -> Memory:
  """A memory with room for at least `fed` pending tokens."""
  more = max(fed - memory.keys.shape[2], 0)
  wider = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))
  return memory.with_pending(tuple(map(wider, memory.pending)))


def _prepared(memory: Memory, fed: int, count: Array) -> tuple[Memory, Array]:
  """A memory with room for T tokens, and the number still pending in it."""
  memory = _with_room(memory, fed)
  fold = recurrent.num_folded(memory.keys.shape[2], fed, count)
  return recurrent.advance(memory, fold), count - fold
