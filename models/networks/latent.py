"""Multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1).

Keys and values of all heads are projections of one latent of R channels per
token; each token also has one rotated key of P channels, shared by all heads.
Both projections are absorbed, that of keys into the queries, that of values
into the heads' outputs, so the cache has R + P channels per token, and
attention has one key/value head.

Letters in shapes: B rows, T fed tokens, D model width, H heads, N channels of
a head's query that do not rotate, P those that do, V channels of its values, R
channels of a latent.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.networks.attention import attend, attend_slots
from models.networks.description import Latent, TransformerConfig
from models.networks.linear import Linear
from models.networks.rope import rotate
from specjax import cache as cache_lib

_EPS = 1e-6  # of latents' norms, whatever the model's other norms have


class LatentAttention(nnx.Module):
  """Self-attention over latents; arguments as for `layers.Attention`."""

  def __init__(
    self, config: TransformerConfig, dtype, *, index: int = 0, rngs: nnx.Rngs
  ):
    a = self.spec = config.layers[index].attention
    m = self.latent = a.latent
    assert isinstance(m, Latent)
    make = lambda read, width, bias: Linear(read, width, bias, dtype, rngs)
    norm = lambda width: nnx.RMSNorm(
      width, epsilon=_EPS, dtype=dtype, param_dtype=dtype,
      use_fast_variance=False, rngs=rngs,
    )  # fmt: skip
    size, heads = config.embed_dim, a.num_heads
    queries = heads * (m.nope_dim + m.rope_dim)
    if m.query_rank is None:
      self.q = make(size, queries, False)
    else:
      self.q_a = make(size, m.query_rank, a.qkv_bias)
      self.q_a_norm = norm(m.query_rank)
      self.q_b = make(m.query_rank, queries, False)
    self.kv_a = make(size, m.rank + m.rope_dim, a.qkv_bias)
    self.kv_a_norm = norm(m.rank)
    self.kv_b = make(m.rank, heads * (m.nope_dim + m.value_dim), False)
    self.out = make(heads * m.value_dim, size, a.out_bias)

  def __call__(self, x, rotary, visible, kv, start, *, layer=None):
    """Like `layers.Attention`; the cache's values have no channels."""
    m, heads = self.latent, self.spec.num_heads
    made = self.kv_b.weight[...].reshape(heads, -1, m.rank).astype(x.dtype)
    to_keys, to_values = jnp.split(made, [m.nope_dim], axis=1)
    if m.query_rank is None:
      q = self.q(x)
    else:
      q = self.q_b(self.q_a_norm(self.q_a(x)))
    q = q.reshape(*x.shape[:2], heads, -1)
    still, turning = jnp.split(q, [m.nope_dim], axis=-1)
    still = jnp.einsum("bthn,hnr->bthr", still, to_keys)
    q = jnp.concatenate([still, self._rotated(turning, rotary)], axis=-1)
    new = self._latents(x, rotary)
    if kv is None:
      out, kv = attend(q, new, new, visible, scale=self.spec.scale), (new, new)
    else:
      new = new.astype(kv[0].dtype)
      keys = cache_lib.write_rows(kv[0], new, start, layer=layer)
      kv, both = (keys, kv[1]), (keys, keys)
      out = attend_slots(
        q, (new, new), both, visible, layer=layer, scale=self.spec.scale
      )
    out = out.reshape(*x.shape[:2], heads, -1)[..., : m.rank]
    out = jnp.einsum("bthr,hvr->bthv", out, to_values)
    return self.out(out.reshape(*x.shape[:2], -1)), kv

  def _latents(self, x: Array, rotary) -> Array:
    """The cached latents of tokens, `[B, T, D] -> [B, K, T, R + P]`.

    Non-finite numbers are kept in the rotated channels only, which no value
    reads (`specjax.cache.contain`).
    """
    m = self.latent
    latent, key = jnp.split(self.kv_a(x), [m.rank], axis=-1)
    latent = self.kv_a_norm(latent)
    key = self._rotated(key[..., None, :], rotary)
    broken = ~jnp.isfinite(latent)
    key = jnp.where(broken.any(-1)[..., None, None], jnp.nan, key)
    latent = jnp.where(broken, 0, latent)[..., None, :]
    joined = jnp.concatenate([latent, key], axis=-1)
    joined = jnp.repeat(joined, self.spec.num_kv_heads, axis=2)
    return jnp.swapaxes(joined, 1, 2)

  def _rotated(self, y: Array, rotary) -> Array:
    """Rotates pairs of adjacent channels, or of two halves."""
    if self.latent.interleaved:
      y = jnp.concatenate([y[..., ::2], y[..., 1::2]], axis=-1)
    return rotate(y, rotary)
