"""Layers of the gated delta rule, over token trees.

Gated DeltaNet (Yang, Kautz and Hatamizadeh, ICLR 2025), as Qwen3-Next and
Qwen3.5 have it in three layers of four. Every value head keeps a matrix S, and
a token with query q, key k, value v, gate g <= 0 and strength b makes of it

  S <- e^g S,   u = b (v - S^T k),   S <- S + k u^T,   and says S^T q.

Of a tree's nodes none needs the state that its path has come to. With G the
gates added up along each node's own path, A_ij = 1 where node j is i or above
it, and D_ij = A_ij e^{G_i - G_j}, the updates of all nodes solve

  (I + M) U = diag(b) V - diag(b e^G) K S,   M_ij = b_i (k_i . k_j) D_ij

with i != j, which is unit lower triangular as parents come first, and they say

  diag(e^G) Q S + ((Q K^T) o D) U.

A chain is the case of all earlier tokens above each: that is the form in which
prompts are read, and DeltaNet's parallel one (Yang et al., NeurIPS 2024). What
the layer remembers is a `specjax.recurrent.Memory`: in a pass the state is read
and written as pending tokens are folded into it, and read once more for all
keys and queries together, whatever the tree. Before the rule a short
convolution reads each node and the nearest ones above it, then what was
committed.

Letters in shapes: B rows, T fed tokens, D model width, K key heads, R = H / K
value heads of each, C and V channels of a key and a value, W channels that are
convolved of a key head, N tokens that the convolution reads, P pending tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from models.networks.description import DeltaSpec, TransformerConfig
from models.networks.linear import Linear
from models.networks.mixture import ACTIVATIONS
from specjax import recurrent
from specjax.cache import Cache
from specjax.recurrent import Memory

_TINY = 1e-6  # added to squared lengths of queries and keys
# A state lives as long as its text: no product is rounded to bfloat16.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Above:
  """Who is above whom among T fed tokens, and what was there before them.

  Attributes:
    self_or_above: `bool[B or 1, T, T]`, whether token j is i or above it.
    taps: `i32[B or 1, T, N]`, for each token what its convolution reads,
      oldest first, of N - 1 committed inputs followed by the T.
    count: `i32[B]`, pending tokens that are committed by now; None without a
      cache.
    lost: `bool[B]`, rows that went back too far.
    idle: `bool[B]`, as of a `Cache`, or None.
  """

  self_or_above: Array
  taps: Array
  count: Array | None = None
  lost: Array | None = None
  idle: Array | None = None


def above(sees: np.ndarray | Array, kernel: int, cache: Cache | None) -> Above:
  """What recurrent layers need of a mask.

  Args:
    sees: `bool[B, T, T]` or `bool[T, T]`: the ancestors of each token.
    kernel: N.
    cache: about to receive the tokens, or None.

  Raises:
    ValueError: for a mask over more than the fed tokens.
  """
  fed, others = sees.shape[-2:]
  if fed != others:
    raise ValueError(
      f"recurrent layers take a tree in one pass, got {fed} tokens of which "
      f"masks name {others}"
    )
  tree = jnp.asarray(sees) | np.eye(fed, dtype=bool)
  tree = tree if tree.ndim == 3 else tree[None]
  depth = jnp.sum(tree, axis=-1, dtype=jnp.int32)  # the token itself counts
  back = depth[:, :, None] - depth[:, None, :]
  taps = []
  for distance in reversed(range(kernel)):
    at = jnp.argmax(tree & (back == distance), axis=-1) + kernel - 1
    taps.append(jnp.where(distance < depth, at, kernel - 2 - distance + depth))
  found = Above(self_or_above=tree, taps=jnp.stack(taps, axis=-1))
  if cache is None or cache.recurrent is None:
    return found
  count = cache.length - cache.recurrent.base
  return dataclasses.replace(
    found, count=jnp.maximum(count, 0), lost=count < 0, idle=cache.idle
  )


class GatedDelta(nnx.Module):
  """A layer of the gated delta rule, in the place of attention.

  Projections have the channels of a key head next to each other: its query, its
  key, its values; so they are cut over devices by key heads.

  Args:
    config: the model's.
    dtype: of parameters and activations. What is after the convolution and
      before the output is float32 at least.
    index: of the layer in the model.
    rngs: for the initial weights.
  """

  def __init__(
    self, config: TransformerConfig, dtype, *, index: int, rngs: nnx.Rngs
  ):
    s = config.layer(index).attention
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

  def __call__(self, x, rotary, sees, kv, start, *, layer=None):
    """As `models.networks.layers.Attention`.

    Args:
      x: `[B, T, D]`.
      rotary, start, layer: not looked at.
      sees: an `Above`.
      kv: the layer's `specjax.recurrent.Memory`; None without a cache.

    Returns:
      `[B, T, D]` and what is remembered; None without a cache.
    """
    del rotary, start, layer
    s = self.spec
    batch, fed, _ = x.shape
    wide = jnp.promote_types(x.dtype, jnp.float32)
    raw = self.qkv(x).reshape(batch, fed, s.num_key_heads, s.channels)
    raw = jnp.swapaxes(raw, 1, 2)  # [B, K, T, W]
    if kv is None:
      read, window = None, jnp.zeros_like(raw, shape=(
        batch, s.num_key_heads, s.kernel - 1, s.channels
      ))  # fmt: skip
    else:
      held, count = _begun(kv, fed, sees.count)
      window = recurrent.window_after(held, count)
      read = lambda x: jnp.where(
        sees.lost[:, None, None, None, None],
        jnp.nan,
        recurrent.said(held, count, x),
      )
    mixed = self._convolved(window, raw, sees.taps, wide)
    q, k, v = jnp.split(mixed, (s.key_dim, 2 * s.key_dim), axis=-1)
    v = v.reshape(batch, s.num_key_heads, fed, -1, s.value_dim)
    v = jnp.swapaxes(v, 2, 3)  # [B, K, R, T, V]
    per_head = lambda y: jnp.moveaxis(
      y.astype(wide).reshape(batch, fed, s.num_key_heads, -1), 1, 3
    )  # [B, K, R, T]
    strength = jax.nn.sigmoid(per_head(self.b(x)))
    steps = self.a(x).astype(wide) + self.step_bias[...].astype(wide)
    decay = jnp.exp(self.log_decay[...].astype(wide))
    gates = per_head(-decay * jax.nn.softplus(steps))
    # What is not finite must reach those below it alone; see `_broken`.
    broken = _broken(mixed, strength, gates)  # [B, K, T]
    heal = lambda y: jnp.where(broken[..., None], 0, y)
    heal_heads = lambda y: jnp.where(broken[:, :, None], 0, y)
    q, k = _unit(heal(q)) * s.key_dim**-0.5, _unit(heal(k))
    v = jnp.where(broken[:, :, None, :, None], 0, v)
    out, updates, total = _solved(
      q, k, v, heal_heads(gates), heal_heads(strength), read,
      sees.self_or_above,
    )  # fmt: skip
    on_path = jnp.any(sees.self_or_above[:, None] & broken[:, :, None], axis=-1)
    out = jnp.where(on_path[:, :, None, :, None], jnp.nan, out)
    total = jnp.where(broken[:, :, None], jnp.nan, total)
    out = jnp.moveaxis(out, 3, 1)  # [B, T, K, R, V]
    y = self.delta_out(self._gated(out, self.z(x), wide).astype(x.dtype))
    if kv is None:
      return y, None
    value_heads = lambda y: y.reshape(batch, s.num_value_heads, *y.shape[3:])
    new = k, value_heads(updates), value_heads(total)[..., None], raw
    new = recurrent.written(held, new, count)
    if sees.idle is not None:  # such rows stay as they are
      left, old = sees.idle[:, None, None, None], _roomy(kv, fed)
      new = jax.tree.map(lambda x, y: jnp.where(left, x, y), old, new)
    return y, new

  def _convolved(self, window, raw, taps, wide):
    """What the rule reads, `f[B, K, T, W]`, after the activation."""
    whole = jnp.concatenate([window.astype(raw.dtype), raw], axis=2)
    weights = self.conv[...].astype(wide)
    weights = weights.reshape(self.spec.num_key_heads, 1, -1, self.spec.kernel)
    total = 0
    for tap in range(self.spec.kernel):
      at = jnp.broadcast_to(taps[:, None, :, tap, None], (*raw.shape[:3], 1))
      read = jnp.take_along_axis(whole, at, axis=2).astype(wide)
      total = total + read * weights[..., tap]
    return ACTIVATIONS[self.spec.activation](total)

  def _gated(self, out, z, wide):
    """Normed heads times a gate, `[B, T, K, R, V] -> [B, T, H V]`."""
    mean = jnp.mean(jnp.square(out), axis=-1, keepdims=True)
    out = out * lax.rsqrt(mean + self.eps) * self.norm[...].astype(wide)
    return out.reshape(z.shape) * jax.nn.silu(z.astype(wide))


def _unit(x: Array) -> Array:
  """Queries or keys of length one, all but."""
  square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * lax.rsqrt(square + _TINY)


def _broken(mixed: Array, strength: Array, gates: Array) -> Array:
  """Tokens with a number that is none, by key head, `bool[B, K, T]`.

  They are computed with zeros instead, which change no other token, and NaN is
  put where they are seen: into what the tokens below them say, and into their
  gates, and with these into the state if they are committed.
  """
  of = lambda x, axis: ~jnp.all(jnp.isfinite(x), axis=axis)
  return of(mixed, -1) | of(strength, 2) | of(gates, 2)


def _solved(q, k, v, gates, strength, read, tree):
  """What all tokens say, their updates, and their gates added up.

  Args:
    q, k: `f[B, K, T, C]`.
    v: `f[B, K, R, T, V]`.
    gates, strength: `f[B, K, R, T]`.
    read: `f[B, K, T, C] -> f[B, K, R, T, V]`, what the state before them says
      of queries or keys; None: nothing.
    tree: `bool[B or 1, T, T]`.

  Returns:
    `f[B, K, R, T, V]` twice, and `f[B, K, R, T]`.
  """
  fed = q.shape[2]
  tree = jnp.broadcast_to(tree, (len(q), fed, fed))
  total = _along_paths(tree, gates)
  fade = total[..., :, None] - total[..., None, :]
  fade = jnp.exp(jnp.where(tree[:, None, None], fade, -jnp.inf))
  others = ~np.eye(fed, dtype=bool)
  alike = _einsum("bkic,bkjc->bkij", k, k)[:, :, None]
  system = strength[..., None] * alike * fade * others
  wanted = v
  if read is not None:
    faded = jnp.exp(total)[..., None]
    of_keys, of_queries = jnp.split(  # of a state that is read once for both
      read(jnp.concatenate([k, q], axis=2)), 2, axis=3
    )
    wanted = v - faded * of_keys
  updates = lax.linalg.triangular_solve(
    system + jnp.eye(fed, dtype=q.dtype),
    strength[..., None] * wanted,
    left_side=True,
    lower=True,
    unit_diagonal=True,
  )
  found = _einsum("bkic,bkjc->bkij", q, k)[:, :, None] * fade
  out = _einsum("bkrij,bkrjv->bkriv", found, updates)
  if read is not None:
    out = out + faded * of_queries
  return out, updates, total


def _along_paths(tree: Array, gates: Array) -> Array:
  """Gates of each token and all above it, added up, `f[B, K, R, T]`."""
  return _einsum("bij,bkrj->bkri", tree.astype(gates.dtype), gates)


def _roomy(memory: Memory, fed: int) -> Memory:
  """A memory with room for so many pending tokens at least."""
  more = max(fed - memory.keys.shape[2], 0)
  wider = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))
  return memory.with_pending(tuple(map(wider, memory.pending)))


def _begun(memory: Memory, fed: int, count: Array) -> tuple[Memory, Array]:
  """A memory with room for a pass, and pending tokens that are left in it.

  Args:
    memory: of the layer.
    fed: T, tokens of the pass.
    count: `i32[B]`, pending tokens that are committed.
  """
  memory = _roomy(memory, fed)
  fold = recurrent.num_folded(memory.keys.shape[2], fed, count)
  return recurrent.advanced(memory, fold), count - fold
