"""One configurable decoder-only transformer (Flax NNX).

GPT-2, GPT-NeoX (Pythia), Llama, Mistral, Qwen2 and Qwen3 differ in a dozen
switches of `TransformerConfig`; the file reads top to bottom: configuration,
rotary embedding, attention, MLP, layer, model, and `as_language_model`, which
turns a module into the pure functions that `specjax` decodes with.

Letters in shapes: B rows, T fed tokens, S cache slots, D model width, H query
heads, K key/value heads, G = H / K queries per key head, C channels per head.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.params import check_params
from specjax import cache as cache_lib
from specjax.cache import Cache
from specjax.types import LanguageModel, ModelOutput


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
      rows of a learned position table).
    norm: "rms" or "layer".
    norm_eps: added to the variance.
    activation: "silu", "gelu" (exact) or "gelu_tanh".
    gated_mlp: `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
    learned_positions: a table added to the embeddings instead of rotary.
    rope_theta: base of the rotary frequencies.
    rotary_dim: channels of each head that rotate (the first ones).
    rope_scaling: Llama 3's rescaling, if any.
    rope_factors: what each rotary frequency is divided by: a rescaling that is
      known by its outcome alone.
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
  max_positions: int
  norm: str = "rms"
  norm_eps: float = 1e-5
  activation: str = "silu"
  gated_mlp: bool = True
  learned_positions: bool = False
  rope_theta: float = 10_000.0
  rotary_dim: int | None = None
  rope_scaling: RopeScaling | None = None
  rope_factors: tuple[float, ...] | None = None
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
  return jnp.cos(angle), jnp.sin(angle)


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


def attend(q: Array, keys: Array, values: Array, mask: Array) -> Array:
  """Grouped-query attention; the softmax is taken in float32.

  Args:
    q: `[B, T, H, C]`.
    keys: `[B, K, S, C]`.
    values: `[B, K, S, C]`.
    mask: `bool[B, T, S]`, True where attention is allowed.

  Returns:
    `[B, T, H * C]`.
  """
  batch, fed, heads, channels = q.shape
  kv_heads = keys.shape[1]
  q = q.reshape(batch, fed, kv_heads, heads // kv_heads, channels)
  # Keys first: with the single query of a single row first, XLA:CPU repeats the
  # cache write inside the product's fusion and copies the whole cache for it.
  scores = jnp.einsum(
    "bksc,btkgc->bksgt", keys, q, preferred_element_type=jnp.float32
  ) / math.sqrt(channels)
  scores = jnp.moveaxis(scores, 2, -1)  # [B, K, G, T, S]
  scores = jnp.where(
    mask[:, None, None], scores, jnp.finfo(scores.dtype).min
  )  # every query sees itself, so no row is empty
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  out = jnp.einsum("bkgts,bksc->btkgc", weights, values)
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
    c = self.config
    heads = lambda y: y.reshape(*y.shape[:-1], -1, c.head_dim)
    q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
    if c.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    if rotary is not None:
      q, k = rotate(q, rotary), rotate(k, rotary)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # [B, K, T, C]
    if kv is None:
      return self.out(attend(q, k, v, mask)), (k, v)
    kv = tuple(
      cache_lib.write_rows(buffer, new, start, layer=layer)
      for buffer, new in zip(kv, cache_lib.contain(k, v), strict=True)
    )
    k, v = kv if layer is None else (buffer[layer] for buffer in kv)
    return self.out(attend(q, k, v, mask)), kv


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


# -------------------------------------------------------------------- model


FINAL = "final"
# What a model returns of its hidden states, next to each other on the last
# axis: i in 0..L is the residual stream that layer i is given (L: that after
# the last layer), FINAL is that after the final norm, which logits are read of.
Features = tuple[int | str, ...]


def check_features(features: Features, num_layers: int) -> None:
  """Raises ValueError unless all of them are there."""
  for i in features:
    if i != FINAL and not (isinstance(i, int) and 0 <= i <= num_layers):
      raise ValueError(
        f"features must be in 0..{num_layers} or {FINAL!r}, got {i!r}"
      )


@dataclasses.dataclass(frozen=True)
class SkippedLayers:
  """Sub-layers left out of a forward pass (self-speculative drafting).

  Attributes:
    attention: indices of layers whose attention is skipped.
    mlp: indices of layers whose MLP is skipped.
  """

  attention: tuple[int, ...] = ()
  mlp: tuple[int, ...] = ()

  def check(self, num_layers: int) -> None:
    """Raises ValueError if an index is not a layer of the model."""
    for kind in ("attention", "mlp"):
      wrong = [i for i in getattr(self, kind) if not 0 <= i < num_layers]
      if wrong:
        raise ValueError(
          f"skipped {kind} layers {wrong} do not exist: the model has layers "
          f"0..{num_layers - 1}"
        )


class Transformer(nnx.Module):
  """Embedding, layers, final norm and output projection.

  Args:
    config: shapes and switches.
    dtype: dtype of parameters and of activations (the softmax, the rotary
      angles and the logits are float32).
    rngs: for the initial weights.
  """

  def __init__(
    self, config: TransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs
  ):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    embed = functools.partial(
      nnx.Embed,
      features=config.embed_dim,
      dtype=dtype,
      param_dtype=dtype,
      embedding_init=nnx.initializers.normal(0.02),
      rngs=rngs,
    )
    self.embed = embed(config.vocab_size)
    if config.learned_positions:
      self.position_embed = embed(config.max_positions)
    self.layers = nnx.List(
      [Layer(config, dtype, rngs=rngs) for _ in range(config.num_layers)]
    )
    self.final_norm = make_norm(config, config.embed_dim, dtype, rngs)
    if not config.tied_embeddings:
      self.lm_head = make_linear(
        config.embed_dim, config.vocab_size, False, dtype, rngs
      )

  def __call__(
    self,
    tokens: Array,
    cache: Cache | None = None,
    *,
    positions: Array | None = None,
    mask: np.ndarray | None = None,
    logits_at: Array | None = None,
    segments: Array | None = None,
    skipped: SkippedLayers = SkippedLayers(),
    features: Features = (),
  ) -> tuple[ModelOutput, Cache | None]:
    """Feeds T tokens; see `specjax.types.LanguageModel.apply`.

    Without a cache the tokens are whole rows (training). Rows may then be
    packed from documents: `segments`, `i32[B, T]`, says which token is of which
    document of its row, and `positions` where it stands there; tokens see those
    of their own document alone.

    Raises:
      ValueError: for segments beside a cache.
    """
    c = self.config
    skipped.check(c.num_layers)
    fed = self.enter(
      tokens, cache, positions=positions, mask=mask, segments=segments
    )
    x, cache = fed.x, fed.cache
    keys, values, seen = [], [], {}
    for i, layer in enumerate(self.layers):
      seen[i] = x
      x, kv = layer(
        x,
        fed.rotary,
        fed.masks[c.window(i)],
        None if cache is None else (cache.keys[i], cache.values[i]),
        fed.start,
        attention=i not in skipped.attention,
        mlp=i not in skipped.mlp,
      )
      keys.append(kv and kv[0])
      values.append(kv and kv[1])
    if cache is not None:
      cache = cache.replace(
        keys=tuple(keys),
        values=tuple(values),
        length=fed.start + tokens.shape[1],
      )
    seen[c.num_layers] = x
    return self.leave(x, logits_at, seen, features), cache

  def enter(
    self,
    tokens: Array,
    cache: Cache | None,
    *,
    positions: Array | None = None,
    mask: np.ndarray | None = None,
    segments: Array | None = None,
  ) -> "Fed":
    """What comes before the layers; arguments as of `__call__`."""
    c = self.config
    if segments is not None and cache is not None:
      raise ValueError("segments are of whole rows, without a cache")
    batch, fed = tokens.shape
    start = jnp.zeros((batch,), jnp.int32) if cache is None else cache.length
    if positions is None:
      positions = start[:, None] + jnp.arange(fed)
    if cache is None:
      view = cache_lib.Cache(
        keys=(jnp.zeros((batch, 1, fed, 1)),),
        values=(),
        positions=positions,
        length=start,
      )
    else:
      view = cache = cache_lib.write_positions(cache, positions)
    masks = {
      w: cache_lib.attention_mask(view, positions, mask, window=w)
      for w in {c.window(i) for i in range(c.num_layers)}
    }
    if segments is not None:
      same = segments[:, :, None] == segments[:, None, :]
      masks = {w: visible & same for w, visible in masks.items()}
    x = self.embed(tokens)
    if c.learned_positions:
      # Drafted nodes may lie beyond the table (`LanguageModel.max_positions`).
      x = x + self.position_embed(jnp.minimum(positions, c.max_positions - 1))
    rotary = None if c.learned_positions else rotary_table(c, positions)
    return Fed(x=x, rotary=rotary, masks=masks, start=start, cache=cache)

  def leave(
    self,
    x: Array,
    logits_at: Array | None = None,
    seen: Mapping[int, Array] | None = None,
    features: Features = (),
  ) -> ModelOutput:
    """What comes after the layers, of `x: [B, T, D]`; see `ApplyFn`.

    Args:
      x: what the last layer gave.
      logits_at: which tokens' logits are wanted.
      seen: what each layer was given, and after all of them x.
      features: what to return of it.
    """
    read = hidden = self.final_norm(x)
    if logits_at is not None:
      read = jnp.take_along_axis(hidden, logits_at[..., None], axis=1)
    if self.config.tied_embeddings:
      logits = self.embed.attend(read)
    else:
      logits = self.lm_head(read)
    chosen = [hidden if i == FINAL else seen[i] for i in features]
    return ModelOutput(
      logits=logits.astype(jnp.float32),
      features=jnp.concatenate(chosen, axis=-1) if chosen else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fed:
  """What the layers need of T fed tokens.

  Attributes:
    x: `[B, T, D]`, the embedded tokens.
    rotary: from `rotary_table`, or None.
    masks: `bool[B, T, S]` for every window size that some layer has.
    start: `i32[B]`, the slot of the first fed token.
    cache: with the tokens' positions recorded, or None.
  """

  x: Array
  rotary: tuple[Array, Array] | None
  masks: dict[int | None, Array]
  start: Array
  cache: Cache | None


def as_language_model(
  module: Transformer,
  *,
  skipped: SkippedLayers = SkippedLayers(),
  features: Features = (),
) -> tuple[LanguageModel, nnx.State]:
  """Splits a module into pure functions and its parameters.

  Args:
    module: the network.
    skipped: sub-layers to leave out. The functions then take the same
      parameters and the same cache as the full model: the layers left out keep
      their cache entries as they are.
    features: what `ModelOutput.features` holds, see `Features`.

  Returns:
    The `LanguageModel` and the parameters to call it with.

  Raises:
    ValueError: for layers that are not there.
  """
  config = module.config
  skipped.check(config.num_layers)
  check_features(features, config.num_layers)
  graphdef, params = nnx.split(module)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
  )

  def init_cache(batch: int, slots: int) -> Cache:
    return cache_lib.make_cache(
      batch=batch,
      slots=slots,
      num_layers=config.num_layers,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
      dtype=module.dtype,
      with_positions=any(config.windows or ()),
    )

  def apply(
    params, tokens, cache, *, positions=None, mask=None, logits_at=None
  ):
    check_params(shapes, params)
    return nnx.merge(graphdef, params)(
      tokens,
      cache,
      positions=positions,
      mask=mask,
      logits_at=logits_at,
      skipped=skipped,
      features=features,
    )

  model = LanguageModel(
    vocab_size=config.vocab_size,
    max_positions=config.max_positions,
    init_cache=init_cache,
    apply=apply,
  )
  return model, params
