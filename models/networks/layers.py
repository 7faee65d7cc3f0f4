"""What a transformer is built of: its configuration, attention, MLP, layer.

GPT-2, GPT-NeoX (Pythia), Llama, Mistral, Qwen2 and Qwen3 differ in a dozen
switches of `TransformerConfig`.

Letters in shapes: B rows, T fed tokens, S cache slots, D model width, H query
heads, K key/value heads, G = H / K queries per key head, C channels per head.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from models.networks.attention import attend, attend_slots
from specjax import cache as cache_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Llama 3's rescaling of the rotary frequencies.

  Long wavelengths are stretched by `factor`, short ones are kept, those between
  `original_max_positions / high` and `original_max_positions / low` blended.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Shapes and switches of one model.

  Attributes:
    vocab_size: rows of the embedding, padding included.
    embed_dim: D.
    num_layers: number of layers.
    num_heads: H.
    num_kv_heads: K; must divide H.
    head_dim: C.
    mlp_dim: width of the MLP's hidden layer.
    max_positions: longest sequence the model is meant for (and the number of
      rows of a learned position table); None if that is not known.
    norm: "rms" or "layer".
    norm_eps: added to the variance.
    activation: "silu", "gelu" (exact), "gelu_tanh", "quick_gelu" or "relu".
    gated_mlp: `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
    learned_positions: a table added to the embeddings instead of rotary.
    rope_theta: base of the rotary frequencies.
    rotary_dim: channels of each head that rotate (the first ones).
    rope_scaling: Llama 3's rescaling, if any.
    rope_factors: what each rotary frequency is divided by: a rescaling that is
      known by its outcome alone.
    rope_scale: of cosines and sines, and squared of what queries find in keys.
    parallel_residual: attention and MLP both read the layer's input (NeoX).
    qkv_bias, out_bias, mlp_bias: biases of the projections.
    qk_norm: RMS norm of each head's queries and keys (Qwen3).
    tied_embeddings: the output projection is the embedding's transpose.
    windows: per layer, the sliding-window size, or None for full attention.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  max_positions: int | None
  norm: str = "rms"
  norm_eps: float = 1e-5
  activation: str = "silu"
  gated_mlp: bool = True
  learned_positions: bool = False
  rope_theta: float = 10_000.0
  rotary_dim: int | None = None
  rope_scaling: RopeScaling | None = None
  rope_factors: tuple[float, ...] | None = None
  rope_scale: float = 1.0
  parallel_residual: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  tied_embeddings: bool = False
  windows: tuple[int | None, ...] | None = None

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and "
        f"{self.num_heads}"
      )
    if self.norm not in ("rms", "layer"):
      raise ValueError(f"norm must be 'rms' or 'layer', got {self.norm!r}")
    if self.activation not in _ACTIVATIONS:
      raise ValueError(
        f"activation must be one of {sorted(_ACTIVATIONS)}, got "
        f"{self.activation!r}"
      )
    if self.windows is not None and len(self.windows) != self.num_layers:
      raise ValueError(
        f"windows must have one entry per layer ({self.num_layers}), got "
        f"{len(self.windows)}"
      )
    if self.learned_positions and self.max_positions is None:
      raise ValueError("learned positions need max_positions")
    pairs = (self.rotary_dim or self.head_dim) // 2
    if self.rope_factors is not None and len(self.rope_factors) != pairs:
      raise ValueError(
        f"rope_factors must have one entry per rotated pair ({pairs}), got "
        f"{len(self.rope_factors)}"
      )

  def window(self, layer: int) -> int | None:
    """Sliding-window size of a layer, or None."""
    return self.windows[layer] if self.windows else None


_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
  "relu": jax.nn.relu,
}


# ------------------------------------------------------------------- rotary


def rotary_frequencies(config: TransformerConfig) -> np.ndarray:
  """Angular frequency of each rotated channel pair, `f32[rotary_dim / 2]`."""
  dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
  freq = 1.0 / config.rope_theta ** (np.arange(0, dim, 2) / dim)
  scaling = config.rope_scaling
  if scaling is not None:
    wavelength = 2 * math.pi / freq
    ratio = scaling.original_max_positions / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((ratio - low) / (high - low), 0.0, 1.0)
    freq = keep * freq + (1 - keep) * freq / scaling.factor
  if config.rope_factors is not None:
    freq = freq / np.array(config.rope_factors)
  return freq.astype(np.float32)


def rotary_table(
  config: TransformerConfig, positions: Array
) -> tuple[Array, Array]:
  """Cosines and sines for `positions`, each `f32[B, T, 1, rotary_dim / 2]`."""
  freq = rotary_frequencies(config)
  angle = positions[..., None, None].astype(jnp.float32) * freq
  scale = config.rope_scale
  return scale * jnp.cos(angle), scale * jnp.sin(angle)


def rotate(x: Array, table: tuple[Array, Array]) -> Array:
  """Rotates the first channels of every head.

  Args:
    x: `[B, T, H, C]`.
    table: from `rotary_table`.

  Returns:
    `[B, T, H, C]`, in x's dtype.
  """
  cos, sin = table
  half = cos.shape[-1]
  a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


# ------------------------------------------------------------------- layers


def make_norm(config: TransformerConfig, dim: int, dtype, rngs: nnx.Rngs):
  """A norm of the configuration's kind over `dim` channels."""
  make = nnx.RMSNorm if config.norm == "rms" else nnx.LayerNorm
  return make(
    dim,
    epsilon=config.norm_eps,
    dtype=dtype,
    param_dtype=dtype,
    use_fast_variance=False,
    rngs=rngs,
  )


def project(x: Array, weight: Array, result=None) -> Array:
  """Products of x and every row of a weight, `[..., D], [N, D] -> [..., N]`.

  Both are contracted as they lie, over their last axes. On XLA:CPU passes over
  a few tokens read `[N, D]` faster than `[D, N]`, products of two rows are
  faster one by one, and an embedding that is transposed first
  (`nnx.Embed.attend`) is read in a loop that computes x's norm anew for every
  row, whenever x is one token.

  Args:
    x: what is projected.
    weight: of the same type.
    result: type of the products, in which they are added up; by default x's.
  """

  def at_once(x, weight):
    return lax.dot_general(
      x,
      weight,
      (((x.ndim - 1,), (1,)), ((), ())),
      preferred_element_type=result,
    )

  def by_row(x, weight):
    rows = [at_once(row, weight) for row in x.reshape(-1, x.shape[-1])]
    return jnp.stack(rows).reshape(*x.shape[:-1], len(weight))

  if math.prod(x.shape[:-1]) == 2:
    return lax.platform_dependent(x, weight, cpu=by_row, default=at_once)
  return at_once(x, weight)


class Linear(nnx.Module):
  """A projection whose weight lies as files have it, a row for each output.

  Args:
    n_in, n_out: channels; the weight is `[n_out, n_in]`.
    bias: whether there is one, zero at first.
    dtype: of parameters and result.
    rngs: for the initial weight.
    std: the standard deviation of its normal law.
  """

  def __init__(
    self, n_in: int, n_out: int, bias: bool, dtype, rngs: nnx.Rngs, std=0.02
  ):
    self.dtype = jnp.dtype(dtype)
    init = nnx.initializers.normal(std)
    self.weight = nnx.Param(init(rngs.params(), (n_out, n_in), self.dtype))
    self.bias = nnx.Param(jnp.zeros(n_out, self.dtype)) if bias else None

  def __call__(self, x: Array) -> Array:
    """`[..., n_in] -> [..., n_out]`."""
    y = project(x.astype(self.dtype), self.weight[...].astype(self.dtype))
    return y if self.bias is None else y + self.bias[...].astype(self.dtype)


def tied_logits(embed: nnx.Embed, x: Array) -> Array:
  """The logits of a tied embedding, `[B, T, D] -> [B, T, V]`."""
  table = embed.embedding[...].astype(embed.dtype)
  return project(x.astype(embed.dtype), table)


class Attention(nnx.Module):
  """Self-attention over the fed tokens and, if given, a cache.

  Args:
    config: shapes and switches.
    dtype: of parameters and activations.
    input_dim: width of what it reads; by default D, which it always returns.
    rngs: for the initial weights.
  """

  def __init__(
    self,
    config: TransformerConfig,
    dtype,
    *,
    input_dim: int | None = None,
    rngs: nnx.Rngs,
  ):
    c = config
    self.config = c
    width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    read = c.embed_dim if input_dim is None else input_dim
    self.q = Linear(read, width, c.qkv_bias, dtype, rngs)
    self.k = Linear(read, kv_width, c.qkv_bias, dtype, rngs)
    self.v = Linear(read, kv_width, c.qkv_bias, dtype, rngs)
    self.out = Linear(width, c.embed_dim, c.out_bias, dtype, rngs)
    if c.qk_norm:
      self.q_norm = make_norm(c, c.head_dim, dtype, rngs)
      self.k_norm = make_norm(c, c.head_dim, dtype, rngs)

  def __call__(self, x, rotary, sees, kv, start, *, layer=None):
    """Attends.

    Args:
      x: `[B, T, D]`.
      rotary: from `rotary_table`, or None.
      sees: a `specjax.cache.Visible`; without a cache `bool[B, T, T]`.
      kv: this layer's `(keys, values)` of the cache, or all layers' if `layer`
        is given; None to attend among the fed tokens alone.
      start: `i32[B]`, the slot of the first fed token.
      layer: `i32[]`, which layer of stacked keys and values this one is.

    Returns:
      `[B, T, D]` and the updated `(keys, values)`.
    """
    q = self.queries(x, rotary)
    if kv is None:
      k, v = self.keys_and_values(x, rotary)
      return self.out(attend(q, k, v, sees)), (k, v)
    new, kv = self.remember(x, rotary, kv, start, layer=layer)
    return self.out(attend_slots(q, new, kv, sees, layer=layer)), kv

  def remember(self, x, rotary, kv, start, *, layer=None):
    """Writes keys and values of what is read, and attends to nothing.

    Args:
      x, rotary, kv, start, layer: as of `__call__`.

    Returns:
      Keys and values of what is read, two of `[B, K, T, C]`, and the updated
      `kv`.
    """
    new = cache_lib.contain(*self.keys_and_values(x, rotary))
    new = tuple(x.astype(b.dtype) for x, b in zip(new, kv, strict=True))
    return new, tuple(
      cache_lib.write_rows(buffer, rows, start, layer=layer)
      for buffer, rows in zip(kv, new, strict=True)
    )

  def queries(self, x, rotary):
    """`[B, T, H, C]` of what is read."""
    q = self._heads(self.q(x))
    if self.config.qk_norm:
      q = self.q_norm(q)
    return q if rotary is None else rotate(q, rotary)

  def keys_and_values(self, x, rotary):
    """Two of `[B, K, T, C]`."""
    k, v = self._heads(self.k(x)), self._heads(self.v(x))
    if self.config.qk_norm:
      k = self.k_norm(k)
    if rotary is not None:
      k = rotate(k, rotary)
    return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

  def _heads(self, y):
    return y.reshape(*y.shape[:-1], -1, self.config.head_dim)


class Mlp(nnx.Module):
  """The feed-forward block, gated or not."""

  def __init__(self, config: TransformerConfig, dtype, *, rngs: nnx.Rngs):
    c = config
    self.config = c
    self.up = Linear(c.embed_dim, c.mlp_dim, c.mlp_bias, dtype, rngs)
    self.down = Linear(c.mlp_dim, c.embed_dim, c.mlp_bias, dtype, rngs)
    if c.gated_mlp:
      self.gate = Linear(c.embed_dim, c.mlp_dim, c.mlp_bias, dtype, rngs)

  def __call__(self, x: Array) -> Array:
    """`[B, T, D] -> [B, T, D]`."""
    act = _ACTIVATIONS[self.config.activation]
    up = self.up(x)
    return self.down(
      act(self.gate(x)) * up if self.config.gated_mlp else act(up)
    )


class Layer(nnx.Module):
  """Attention and MLP with pre-norm residuals, serial or parallel."""

  def __init__(self, config: TransformerConfig, dtype, *, rngs: nnx.Rngs):
    self.config = config
    self.attention_norm = make_norm(config, config.embed_dim, dtype, rngs)
    self.attention = Attention(config, dtype, rngs=rngs)
    self.mlp_norm = make_norm(config, config.embed_dim, dtype, rngs)
    self.mlp = Mlp(config, dtype, rngs=rngs)

  def __call__(
    self, x, rotary, sees, kv, start, *, layer=None, attention=True, mlp=True
  ):
    """As `Attention`; `attention=False` or `mlp=False` skips that sub-layer."""
    residual = x
    if attention:
      out, kv = self.attention(
        self.attention_norm(x), rotary, sees, kv, start, layer=layer
      )
      x = x + out
    if mlp:
      source = residual if self.config.parallel_residual else x
      x = x + self.mlp(self.mlp_norm(source))
    return x, kv
