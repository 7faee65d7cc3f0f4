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
  return (
    (jnp.cos(angle), jnp.sin(angle))
    if scale == 1.0
    else (jnp.cos(angle) * scale, jnp.sin(angle) * scale)
  )


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


def make_linear(n_in: int, n_out: int, bias: bool, dtype, rngs: nnx.Rngs):
  """A projection with small random weights."""
  return nnx.Linear(
    n_in,
    n_out,
    use_bias=bias,
    dtype=dtype,
    param_dtype=dtype,
    kernel_init=nnx.initializers.normal(0.02),
    rngs=rngs,
  )


# Queries that are read at once, where there are more than four times as many.
# The scores of a long prompt, in float32, are most of the memory that it takes,
# and stay in no processor's cache: on two cores 1,343 queries take 2.2 to 2.8
# times as long at once.
_QUERIES = 128
_EACH = ((0, 1), (0, 1))  # rows and heads of keys, in a product


def scores_of(q: Array, keys: Array) -> Array:
  """What queries find in the keys of their groups, in float32.

  The queries of a group are rows of one product, `[G T, C]` by `[C, S]`: with G
  and T apart, XLA:CPU makes a loop of small products of it, which takes three
  times as long.

  Args:
    q: `[B, T, H, C]`.
    keys: `[B, K, S, C]`.

  Returns:
    `f32[B, K, G, T, S]`, H = K G.
  """
  batch, fed, heads, channels = q.shape
  count, slots = keys.shape[1:3]
  groups = (batch, count, heads // count)
  q = jnp.moveaxis(q.reshape(batch, fed, *groups[1:], channels), 1, 3)
  q = q.reshape(batch, count, groups[2] * fed, channels)
  product = functools.partial(
    lax.dot_general,
    dimension_numbers=(((3,), (3,)), _EACH),
    preferred_element_type=jnp.float32,
  )
  if fed > 1:
    found = product(q, keys)
  else:
    found = lax.platform_dependent(
      q, keys, default=product, cpu=functools.partial(_keys_first, product)
    )
  return found.reshape(*groups, fed, slots)


def _keys_first(product, q: Array, keys: Array) -> Array:
  """`product(q, keys)` as XLA:CPU does it fast for the heads of one token each.

  With three heads a group and 566 slots, attention takes a third of the time
  for 32 rows and 0.8 of it for 8. Without the barrier the compiler turns the
  product round again.
  """
  return jnp.swapaxes(lax.optimization_barrier(product(keys, q)), 2, 3)


def values_of(weights: Array, values: Array) -> Array:
  """The mean of values that each query weighs, `[B, T, H, C]`.

  Args:
    weights: `[B, K, G, T, S]`, in the values' type.
    values: `[B, K, S, C]`.
  """
  batch, count, grouped, fed, slots = weights.shape
  found = lax.dot_general(
    weights.reshape(batch, count, grouped * fed, slots),
    values,
    (((3,), (2,)), _EACH),
  )
  channels = values.shape[-1]
  found = found.reshape(batch, count, grouped, fed, channels)
  found = jnp.moveaxis(found, 3, 1)
  return found.reshape(batch, fed, count * grouped, channels)


def attend(q: Array, keys: Array, values: Array, mask: Array) -> Array:
  """Grouped-query attention; the softmax is taken in float32.

  Many queries are read a block after the other: scores are `[B, H, 512, S]` at
  most, however long the prompt is.

  Args:
    q: `[B, T, H, C]`.
    keys: `[B, K, S, C]`.
    values: `[B, K, S, C]`.
    mask: `bool[B, T, S]`, True where attention is allowed.

  Returns:
    `[B, T, H * C]`.
  """
  fed = q.shape[1]
  if fed <= 4 * _QUERIES:
    return _attend(q, keys, values, mask)
  count = -(-fed // _QUERIES)
  blocks = [
    jnp.moveaxis(
      jnp.pad(x, ((0, 0), (0, count * _QUERIES - fed)) + ((0, 0),) * more)
      .reshape(len(x), count, _QUERIES, *x.shape[2:]),
      1, 0,
    )
    for x, more in ((q, 2), (mask, 1))
  ]  # fmt: skip
  out = lax.map(lambda block: _attend(block[0], keys, values, block[1]), blocks)
  return jnp.moveaxis(out, 0, 1).reshape(len(q), -1, out.shape[-1])[:, :fed]


def _attend(q: Array, keys: Array, values: Array, mask: Array) -> Array:
  """As `attend`, all queries at once."""
  batch, fed, heads, channels = q.shape
  count = keys.shape[1]
  alone = batch * fed == 1
  if alone:
    # Keys first: with the query first, XLA:CPU repeats the cache write inside
    # the product's fusion and copies the whole cache for it.
    scores = jnp.einsum(
      "bksc,btkgc->bksgt",
      keys,
      q.reshape(batch, fed, count, heads // count, channels),
      preferred_element_type=jnp.float32,
    )
    scores = jnp.moveaxis(scores, 2, -1)  # [B, K, G, T, S]
  else:
    scores = scores_of(q, keys)
  scores = jnp.where(
    mask[:, None, None],
    scores / math.sqrt(channels),
    jnp.finfo(scores.dtype).min,
  )  # every query sees itself, so no row is empty
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  if alone:
    out = jnp.einsum("bkgts,bksc->btkgc", weights, values)
  else:
    out = values_of(weights, values)
  return out.reshape(batch, fed, heads * channels)


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
    self.q = make_linear(read, width, c.qkv_bias, dtype, rngs)
    self.k = make_linear(read, kv_width, c.qkv_bias, dtype, rngs)
    self.v = make_linear(read, kv_width, c.qkv_bias, dtype, rngs)
    self.out = make_linear(width, c.embed_dim, c.out_bias, dtype, rngs)
    if c.qk_norm:
      self.q_norm = make_norm(c, c.head_dim, dtype, rngs)
      self.k_norm = make_norm(c, c.head_dim, dtype, rngs)

  def __call__(self, x, rotary, mask, kv, start, *, layer=None):
    """Attends.

    Args:
      x: `[B, T, D]`.
      rotary: from `rotary_table`, or None.
      mask: `bool[B, T, S]`.
      kv: this layer's `(keys, values)` of the cache, or all layers' if `layer`
        is given; None to attend among the fed tokens alone (then S == T).
      start: `i32[B]`, the slot of the first fed token.
      layer: `i32[]`, which layer of stacked keys and values this one is.

    Returns:
      `[B, T, D]` and the updated `(keys, values)`.
    """
    q = self.queries(x, rotary)
    if kv is None:
      k, v = self.keys_and_values(x, rotary)
      return self.out(attend(q, k, v, mask)), (k, v)
    kv = self.remember(x, rotary, kv, start, layer=layer)
    k, v = kv if layer is None else (buffer[layer] for buffer in kv)
    return self.out(attend(q, k, v, mask)), kv

  def remember(self, x, rotary, kv, start, *, layer=None):
    """Writes keys and values of what is read, and attends to nothing.

    Args:
      x, rotary, kv, start, layer: as of `__call__`.

    Returns:
      The updated `(keys, values)`.
    """
    new = cache_lib.contain(*self.keys_and_values(x, rotary))
    return tuple(
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
    self.up = make_linear(c.embed_dim, c.mlp_dim, c.mlp_bias, dtype, rngs)
    self.down = make_linear(c.mlp_dim, c.embed_dim, c.mlp_bias, dtype, rngs)
    if c.gated_mlp:
      self.gate = make_linear(c.embed_dim, c.mlp_dim, c.mlp_bias, dtype, rngs)

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
    self, x, rotary, mask, kv, start, *, layer=None, attention=True, mlp=True
  ):
    """As `Attention`; `attention=False` or `mlp=False` skips that sub-layer."""
    residual = x
    if attention:
      out, kv = self.attention(
        self.attention_norm(x), rotary, mask, kv, start, layer=layer
      )
      x = x + out
    if mlp:
      source = residual if self.config.parallel_residual else x
      x = x + self.mlp(self.mlp_norm(source))
    return x, kv
