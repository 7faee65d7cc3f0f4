"""Building blocks of a transformer: norms, attention, MLP, layer.

One `Layer` builds every layer that `models.networks.description` describes.

Letters in shapes: B rows, T fed tokens, S cache slots, D model width, H query
heads, K key/value heads, G = H / K queries per key head, C channels per head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from models.networks.attention import attend, attend_slots
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  DenseSpec,
  TransformerConfig,
)
from models.networks.gated_delta import GatedDelta
from models.networks.latent import LatentAttention
from models.networks.linear import Linear
from models.networks.mixture import ACTIVATIONS, Mixture, MixtureMlp
from models.networks.params import shapes_of
from models.networks.rope import rotate
from models.networks.t5_config import T5Config
from specjax import cache as cache_lib


def make_norm(config: TransformerConfig, dim: int, dtype, rngs: nnx.Rngs):
  """A norm of the configuration's kind over `dim` channels."""
  if config.norm == "rms_plus_one":
    return PlusOneNorm(dim, config.norm_eps, dtype)
  make = nnx.RMSNorm if config.norm == "rms" else nnx.LayerNorm
  return make(
    dim,
    epsilon=config.norm_eps,
    dtype=dtype,
    param_dtype=dtype,
    use_fast_variance=False,
    rngs=rngs,
  )


class PlusOneNorm(nnx.Module):
  """An RMS norm that multiplies by one and its weights (Gemma).

  All is computed in float32 at least, and rounded to `dtype` at the end.
  """

  def __init__(self, dim: int, eps: float, dtype):
    self.eps, self.dtype = eps, jnp.dtype(dtype)
    self.scale = nnx.Param(jnp.zeros(dim, self.dtype))

  def __call__(self, x: Array) -> Array:
    """`[..., dim] -> [..., dim]`."""
    wide = jnp.promote_types(self.dtype, jnp.float32)
    x = x.astype(wide)
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    x = x * lax.rsqrt(mean + self.eps) * (1 + self.scale[...].astype(wide))
    return x.astype(self.dtype)


class Attention(nnx.Module):
  """Attention over the fed tokens and, if given, a cache.

  Args:
    config: the model's.
    dtype: of parameters and activations.
    index: of its layer in the model.
    input_dim: width of what it reads; by default D, which it always returns.
    rngs: for the initial weights.
  """

  def __init__(
    self,
    config: TransformerConfig | T5Config,
    dtype,
    *,
    index: int = 0,
    input_dim: int | None = None,
    rngs: nnx.Rngs,
  ):
    a = config.layers[index].attention
    assert isinstance(a, AttentionSpec)
    self.spec = a
    width, kv_width = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    read = config.embed_dim if input_dim is None else input_dim
    self.norm_eps = config.norm_eps
    self.q = Linear(read, width, a.qkv_bias, dtype, rngs)
    if a.source is None:
      self.k = Linear(read, kv_width, a.qkv_bias, dtype, rngs)
      if not a.keys_as_values:
        self.v = Linear(read, kv_width, a.qkv_bias, dtype, rngs)
    self.out = Linear(width, config.embed_dim, a.out_bias, dtype, rngs)
    if a.output_gate:
      self.gate = Linear(read, width, a.qkv_bias, dtype, rngs)
    if a.qk_norm is not None:
      assert isinstance(config, TransformerConfig)
      norm = lambda w: make_norm(
        config, w if a.qk_norm == "width" else a.head_dim, dtype, rngs
      )
      self.q_norm = norm(width)
      if a.source is None:
        self.k_norm = norm(kv_width)
    if a.sinks:
      self.sinks = nnx.Param(jnp.zeros(a.num_heads, jnp.dtype(dtype)))

  def __call__(self, x, rotary, sees, kv, start, *, layer=None, bias=None):
    """Attends.

    Args:
      x: `[B, T, D]`.
      rotary: from the layer's `Rope.table`, or None.
      sees: a `specjax.cache.Visible`; without a cache `bool[B, T, T]`. Of a
        layer that is no attention, `models.networks.gated_delta.Above`.
      kv: this layer's `(keys, values)` of the cache, or all layers' if `layer`
        is given; None to attend among the fed tokens alone. Of a layer with a
        source what that has returned.
      start: `i32[B]`, the slot of the first fed token.
      layer: `i32[]`, which layer of stacked keys and values this one is.
      bias: of the scores, as of `attend_slots`; without a cache of `attend`.

    Returns:
      `[B, T, D]` and the updated `(keys, values)`.
    """
    if self.spec.source is not None:
      return self.attend_to(x, rotary, sees, kv, start, layer=layer), kv
    if kv is None:
      kv = self.keys_and_values(x, rotary)
      return self._attended(x, rotary, attend, *kv, sees, bias=bias), kv
    new, kv = self.remember(x, rotary, kv, start, layer=layer)
    y = self._attended(
      x, rotary, attend_slots, new, kv, sees, layer=layer, bias=bias
    )
    return y, kv

  def attend_to(self, x, rotary, sees, kv, start=None, *, layer=None):
    """Attends to keys and values that another layer or a text has made.

    Args:
      x, rotary, kv, start, layer: as of `__call__`.
      sees: likewise; without `fed_mask` nothing of the fed tokens is in `kv`,
        and where that is empty they are given nothing.

    Returns:
      `[B, T, D]`.
    """
    if not isinstance(sees, cache_lib.Visible):
      return self._attended(x, rotary, attend, *kv, sees)
    new = None
    if sees.fed_mask is not None:
      rows = lambda b: cache_lib.read_rows(b, start, x.shape[1], layer=layer)
      new = tuple(cache_lib.as_read(rows(b)) for b in kv)
    some = None if new else sees.text > 0
    return self._attended(
      x, rotary, attend_slots, new, kv, sees, layer=layer, some=some
    )

  def _attended(self, x, rotary, attention, *given, some=None, **more):
    """Output of `attention`, `[B, T, D]`; zeros of rows that are not `some`."""
    y = attention(
      self.queries(x, rotary), *given, scale=self.spec.scale,
      softcap=self.spec.softcap,
      sinks=self.sinks[...] if self.spec.sinks else None, **more,
    )  # fmt: skip
    if some is not None:
      y = jnp.where(some[:, None, None], y, 0)
    if self.spec.output_gate:
      y = y * jax.nn.sigmoid(self.gate(x))
    return self.out(y)

  def remember(self, x, rotary, kv, start, *, layer=None):
    """Writes keys and values of x; arguments as of `__call__`.

    Returns:
      These, two of `[B, K, T, C]`, and the updated `kv`.
    """
    new = cache_lib.contain(*self.keys_and_values(x, rotary))
    new, stored = zip(*map(cache_lib.as_stored, new, kv), strict=True)
    return new, tuple(
      cache_lib.write_rows(buffer, rows, start, layer=layer)
      for buffer, rows in zip(kv, stored, strict=True)
    )

  def queries(self, x, rotary):
    """`[B, T, H, C]` of what is read."""
    return self._rotated(self.q(x), getattr(self, "q_norm", None), rotary)

  def keys_and_values(self, x, rotary):
    """Two of `[B, K, T, C]`."""
    raw = self.k(x)
    k = self._rotated(raw, getattr(self, "k_norm", None), rotary)
    v = raw if self.spec.keys_as_values else self.v(x)
    v = self._heads(v)
    if self.spec.v_norm:
      wide = v.astype(jnp.promote_types(v.dtype, jnp.float32))
      mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
      v = (wide * lax.rsqrt(mean + self.norm_eps)).astype(v.dtype)
    return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

  def _rotated(self, y, norm, rotary):
    """Heads of a projection, `[B, T, N, C]`, normed and rotated."""
    if self.spec.qk_norm == "width":
      y = norm(y)
    y = self._heads(y)
    if self.spec.qk_norm == "head":
      y = norm(y)
    return y if rotary is None else rotate(y, rotary)

  def _heads(self, y):
    """Heads of a projection, which may be clipped."""
    if (most := self.spec.clip) is not None:
      y = jnp.clip(y, -most, most)
    return y.reshape(*y.shape[:-1], -1, self.spec.head_dim)


class Mlp(nnx.Module):
  """The feed-forward block, gated or not; arguments as of `Attention`."""

  def __init__(
    self,
    config: TransformerConfig | T5Config,
    dtype,
    *,
    index: int = 0,
    rngs: nnx.Rngs,
  ):
    m, size = config.layers[index].feed_forward, config.embed_dim
    assert isinstance(m, DenseSpec)
    self.spec = m
    self.up = Linear(size, m.width, m.bias, dtype, rngs)
    self.down = Linear(m.width, size, m.bias, dtype, rngs)
    if m.gated:
      self.gate = Linear(size, m.width, m.bias, dtype, rngs)

  def __call__(self, x: Array) -> Array:
    """`[B, T, D] -> [B, T, D]`."""
    act = ACTIVATIONS[self.spec.activation]
    up = self.up(x)
    return self.down(act(self.gate(x)) * up if self.spec.gated else act(up))


class Layer(nnx.Module):
  """Attention and MLP, with norms and residuals; arguments as of `Attention`.

  `expert_axes` are the mesh axes that experts are dealt out over, if they are.
  Norms before the blocks are `attention_norm` and `mlp_norm`, those after them
  `attention_out_norm` and `mlp_out_norm`. Of a mixture beside the MLP they are
  `beside_norm` and `beside_out_norm`, and then `mlp_alone_norm` is that after
  the MLP, before `mlp_out_norm` of their sum.
  """

  def __init__(
    self,
    config: TransformerConfig,
    dtype,
    *,
    index: int = 0,
    expert_axes: tuple[str, ...] = (),
    rngs: nnx.Rngs,
  ):
    self.spec = config.layers[index]
    norm = lambda: make_norm(config, config.embed_dim, dtype, rngs)
    before, after = (self.spec.norms in (x, "both") for x in ("pre", "post"))
    if before:
      self.attention_norm = norm()
    make: Any = Attention
    if isinstance(self.spec.attention, DeltaSpec):
      make = GatedDelta
    elif self.spec.attention.latent is not None:
      make = LatentAttention
    self.attention = make(config, dtype, index=index, rngs=rngs)
    if after:
      self.attention_out_norm = norm()
    if before:
      self.mlp_norm = norm()
    mixture = functools.partial(
      MixtureMlp, dtype=dtype, axes=expert_axes, rngs=rngs
    )
    if isinstance(self.spec.feed_forward, DenseSpec):
      self.mlp = Mlp(config, dtype, index=index, rngs=rngs)
    else:
      self.mlp = mixture(self.spec.feed_forward)
    if after:
      self.mlp_out_norm = norm()
    if self.spec.beside is not None:
      self.beside_norm, self.beside_out_norm = norm(), norm()
      self.mlp_alone_norm = norm()
      self.beside = mixture(self.spec.beside)
    if size := config.per_layer_dim:
      self.act = ACTIVATIONS[self.spec.feed_forward.activation]
      self.per_layer_gate = Linear(config.embed_dim, size, False, dtype, rngs)
      self.per_layer_out = Linear(size, config.embed_dim, False, dtype, rngs)
      self.per_layer_out_norm = norm()
    if self.spec.scaled:
      self.scalar = nnx.Param(jnp.ones(1, jnp.dtype(dtype)))

  def __call__(
    self,
    x,
    rotary,
    sees,
    kv,
    start,
    *,
    per_layer=None,
    layer=None,
    at=None,
    attention=True,
    mlp=True,
  ):
    """As `Attention`; `attention=False` or `mlp=False` skips that sub-layer.

    `per_layer`, `[B, T, P]`, are the tokens' embeddings of this layer, if any.
    Of stacked layers `at`, `i32[]`, is the place among those of this kind.
    """
    residual = x
    if attention:
      out, kv = self.attended(x, rotary, sees, kv, start, layer=layer)
      x = x + out
    if mlp:
      source = residual if self.spec.parallel else x
      x = x + self.fed_forward(source, at=at)
    return self.finished(x, per_layer), kv

  def finished(self, x: Array, per_layer: Array | None) -> Array:
    """The layer's output, of what both blocks have been added to."""
    if per_layer is not None:
      read = self.per_layer_out(self.act(self.per_layer_gate(x)) * per_layer)
      x = x + self.per_layer_out_norm(read)
    return x * self.scalar[...] if self.spec.scaled else x

  def attended(self, x, rotary, sees, kv, start, *, layer=None):
    """Output of attention, norms included, to be added; as `Attention`."""
    if self.spec.norms != "post":
      x = self.attention_norm(x)
    out, kv = self.attention(x, rotary, sees, kv, start, layer=layer)
    if self.spec.norms != "pre":
      out = self.attention_out_norm(out)
    return out, kv

  def fed_forward(self, x: Array, *, at: Array | None = None) -> Array:
    """Output of the MLP, norms included, to be added: `[B, T, D]`.

    Args:
      x: what the layer was given, or what attention has added to it.
      at: which of stacked layers it is: a mixture's experts are those of all
        layers then.
    """
    residual = x
    if self.spec.norms != "post":
      x = self.mlp_norm(x)
    if isinstance(self.mlp, MixtureMlp):
      out = self.mlp(x, layer=at)
    else:
      out = self.mlp(x)
    if self.spec.beside is not None:
      more = self.beside(
        self.beside_norm(residual), routed_by=residual, layer=at
      )
      out = self.mlp_alone_norm(out) + self.beside_out_norm(more)
    return out if self.spec.norms == "pre" else self.mlp_out_norm(out)


@functools.cache
def weights_met(config: TransformerConfig, index: int) -> tuple[int, int]:
  """Weights that a token meets in a layer: in attention, and in its MLP.

  Of a mixture those of the experts that a token is given.
  """
  layer = shapes_of(
    lambda: Layer(config, jnp.float32, index=index, rngs=nnx.Rngs(0))
  )

  def count(module) -> int:
    leaves = jax.tree.leaves(nnx.state(module))
    return sum(x.size for x in leaves if x.ndim > 1)

  mlp = count(layer.mlp)
  if layer.spec.beside is not None:
    mlp += count(layer.beside)
  for block in layer.spec.blocks:
    if isinstance(block, Mixture):
      others = block.num_experts - block.num_chosen
      mlp -= others * block.num_expert_params
  return count(layer.attention), mlp
