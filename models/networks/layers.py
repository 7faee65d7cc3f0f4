"""Building blocks of a transformer: norms, attention, MLP, layer.

`Layer` builds every layer that `models.networks.description` can describe.

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
from models.networks.linear import Linear, fuse, outputs
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
  """An RMS norm that scales by 1 + w (Gemma).

  It computes in float32 at least, and rounds to `dtype` at the end.
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
    config: the model's configuration.
    dtype: dtype of parameters and activations.
    index: index of its layer in the model.
    input_dim: width of its input, by default D; its output has width D.
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

  def __call__(self, x, rotary, visible, kv, start, *, layer=None, bias=None):
    """Attends.

    Args:
      x: `[B, T, D]`.
      rotary: from the layer's `Rope.table`, or None.
      visible: a `specjax.cache.Visible`; without a cache `bool[B, T, T]`; for a
        recurrent layer `models.networks.gated_delta.Paths`.
      kv: this layer's `(keys, values)` in the cache, or all layers' if `layer`
        is given; None to attend to the fed tokens only. For a layer with a
        source, what the source returned.
      start: `i32[B]`, the slot of the first fed token.
      layer: `i32[]`, this layer's index in stacked keys and values.
      bias: added to scores, as for `attend_slots`, or `attend` without a cache.

    Returns:
      `[B, T, D]` and the updated `(keys, values)`.
    """
    if self.spec.source is not None:
      return self.attend_to(x, rotary, visible, kv, start, layer=layer), kv
    q, *raw = outputs(self, self.names, x)
    q, new = self._queries(q, rotary), self._keys_and_values(raw, rotary)
    if kv is None:
      return self._output(x, q, attend, *new, visible, bias=bias), new
    new, kv = _write(new, kv, start, layer)
    read = attend_slots, new, kv, visible
    y = self._output(x, q, *read, layer=layer, bias=bias)
    return y, kv

  def attend_to(self, x, rotary, visible, kv, start=None, *, layer=None):
    """Attends to existing keys and values, of another layer or a text.

    Args:
      x, rotary, kv, start, layer: as for `__call__`.
      visible: likewise; without `fed_mask` the fed tokens are not in `kv`, and
        rows where that is empty get zeros.

    Returns:
      `[B, T, D]`.
    """
    q = self.queries(x, rotary)
    if not isinstance(visible, cache_lib.Visible):
      return self._output(x, q, attend, *kv, visible)
    new = None
    if visible.fed_mask is not None:
      rows = lambda b: cache_lib.read_rows(b, start, x.shape[1], layer=layer)
      new = tuple(cache_lib.as_read(rows(b)) for b in kv)
    some = None if new else visible.text > 0
    return self._output(
      x, q, attend_slots, new, kv, visible, layer=layer, some=some
    )

  def _output(self, x, q, attention, *given, some=None, **more):
    """Output of `attention`, `[B, T, D]`; zeros for rows not in `some`."""
    y = attention(
      q, *given, scale=self.spec.scale,
      softcap=self.spec.softcap,
      sinks=self.sinks[...] if self.spec.sinks else None, **more,
    )  # fmt: skip
    if some is not None:
      y = jnp.where(some[:, None, None], y, 0)
    if self.spec.output_gate:
      y = y * jax.nn.sigmoid(self.gate(x))
    return self.out(y)

  def remember(self, x, rotary, kv, start, *, layer=None):
    """Writes keys and values of x to the cache; arguments as for `__call__`.

    Returns:
      These keys and values, `[B, K, T, C]`, and the updated `kv`.
    """
    return _write(self.keys_and_values(x, rotary), kv, start, layer)

  def queries(self, x, rotary):
    """Queries, `[B, T, H, C]`."""
    return self._queries(self.q(x), rotary)

  def keys_and_values(self, x, rotary):
    """Keys and values, each `[B, K, T, C]`."""
    raw = [getattr(self, name)(x) for name in self.names[1:]]
    return self._keys_and_values(raw, rotary)

  @property
  def names(self) -> tuple[str, ...]:
    """The projections of queries, keys and values, to be fused."""
    return tuple(name for name in "qkv" if hasattr(self, name))

  def _queries(self, raw, rotary):
    return self._rotated(raw, getattr(self, "q_norm", None), rotary)

  def _keys_and_values(self, raw, rotary):
    k = self._rotated(raw[0], getattr(self, "k_norm", None), rotary)
    v = self._heads(raw[-1])
    if self.spec.v_norm:
      wide = v.astype(jnp.promote_types(v.dtype, jnp.float32))
      mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
      v = (wide * lax.rsqrt(mean + self.norm_eps)).astype(v.dtype)
    return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

  def _rotated(self, y, norm, rotary):
    """Norms and rotates heads of a projection, `[B, T, N, C]`."""
    if self.spec.qk_norm == "width":
      y = norm(y)
    y = self._heads(y)
    if self.spec.qk_norm == "head":
      y = norm(y)
    return y if rotary is None else rotate(y, rotary)

  def _heads(self, y):
    """Splits a projection into heads, clipped if configured."""
    if (most := self.spec.clip) is not None:
      y = jnp.clip(y, -most, most)
    return y.reshape(*y.shape[:-1], -1, self.spec.head_dim)


def _write(new, kv, start, layer):
  """Writes keys and values to the cache; see `Attention.remember`."""
  new = cache_lib.contain(*new)
  new, stored = zip(*map(cache_lib.as_stored, new, kv), strict=True)
  return new, tuple(
    cache_lib.write_rows(buffer, rows, start, layer=layer)
    for buffer, rows in zip(kv, stored, strict=True)
  )


class Mlp(nnx.Module):
  """The feed-forward block, gated or not; arguments as for `Attention`."""

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
    self.names = ("gate", "up") if m.gated else ("up",)
    if m.gated:
      self.gate = Linear(size, m.width, m.bias, dtype, rngs)

  def __call__(self, x: Array) -> Array:
    """`[B, T, D] -> [B, T, D]`."""
    act = ACTIVATIONS[self.spec.activation]
    *gate, up = outputs(self, self.names, x)
    return self.down(act(gate[0]) * up if gate else act(up))


class Layer(nnx.Module):
  """Attention and MLP, with norms and residuals; arguments as for `Attention`.

  `expert_axes` are the mesh axes that experts are distributed over, if any.
  Norms before the blocks are `attention_norm` and `mlp_norm`, those after them
  `attention_out_norm` and `mlp_out_norm`. A mixture parallel to the MLP has
  `beside_norm` and `beside_out_norm`; then `mlp_alone_norm` is after the MLP,
  and `mlp_out_norm` after the sum.
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
    if self.spec.extra is not None:
      self.beside_norm, self.beside_out_norm = norm(), norm()
      self.mlp_alone_norm = norm()
      self.extra = mixture(self.spec.extra)
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
    visible,
    kv,
    start,
    *,
    per_layer=None,
    layer=None,
    at=None,
    attention=True,
    mlp=True,
  ):
    """Like `Attention`; `attention=False` or `mlp=False` skips a sub-layer.

    `per_layer`, `[B, T, P]`, are the layer's own token embeddings, if any. For
    stacked layers `at`, `i32[]`, is the index among those of this kind.
    """
    residual = x
    if attention:
      out, kv = self.attend(x, rotary, visible, kv, start, layer=layer)
      x = x + out
    if mlp:
      source = residual if self.spec.parallel else x
      x = x + self.mlp_output(source, at=at)
    return self.finish(x, per_layer), kv

  def finish(self, x: Array, per_layer: Array | None) -> Array:
    """The layer's output, given the sum after both blocks."""
    if per_layer is not None:
      read = self.per_layer_out(self.act(self.per_layer_gate(x)) * per_layer)
      x = x + self.per_layer_out_norm(read)
    return x * self.scalar[...] if self.spec.scaled else x

  def attend(self, x, rotary, visible, kv, start, *, layer=None):
    """Attention's normed output, before the residual; like `Attention`."""
    if self.spec.norms != "post":
      x = self.attention_norm(x)
    out, kv = self.attention(x, rotary, visible, kv, start, layer=layer)
    if self.spec.norms != "pre":
      out = self.attention_out_norm(out)
    return out, kv

  def mlp_output(self, x: Array, *, at: Array | None = None) -> Array:
    """The MLP's normed output, before the residual, `[B, T, D]`.

    Args:
      x: the layer's input, or with attention's output added.
      at: index of a stacked layer; a mixture's experts are then those of all
        layers.
    """
    residual = x
    if self.spec.norms != "post":
      x = self.mlp_norm(x)
    if isinstance(self.mlp, MixtureMlp):
      out = self.mlp(x, layer=at)
    else:
      out = self.mlp(x)
    if self.spec.extra is not None:
      more = self.extra(
        self.beside_norm(residual), routed_by=residual, layer=at
      )
      out = self.mlp_alone_norm(out) + self.beside_out_norm(more)
    return out if self.spec.norms == "pre" else self.mlp_out_norm(out)


def lay_out(layer: Layer) -> None:
  """Lays out a loaded layer's weights in place, as the device prefers.

  On GPUs projections of one input become one product (`fuse`).
  """
  if jax.default_backend() == "gpu":
    for block in (layer.attention, layer.mlp):
      if isinstance(block, Attention | GatedDelta | Mlp):
        fuse(block, block.names)


@functools.cache
def active_weights(config: TransformerConfig, index: int) -> tuple[int, int]:
  """Weights that a token uses in a layer: in attention, and in its MLP.

  For a mixture, only those of a token's experts.
  """
  layer = shapes_of(
    lambda rngs: Layer(config, jnp.float32, index=index, rngs=rngs)
  )

  def count(module) -> int:
    leaves = jax.tree.leaves(nnx.state(module))
    return sum(x.size for x in leaves if x.ndim > 1)

  mlp = count(layer.mlp)
  if layer.spec.extra is not None:
    mlp += count(layer.extra)
  for block in layer.spec.blocks:
    if isinstance(block, Mixture):
      others = block.num_experts - block.num_chosen
      mlp -= others * block.num_expert_params
  return count(layer.attention), mlp
