"""T5, an encoder-decoder (Flax NNX).

Raffel et al. (2020), 1.0 and 1.1: RMS norms before each sub-layer, no biases,
no scaling of the scores, and a learned bias for the distance between query and
key that all layers of a stack share. The encoder reads a row's input once; what
each decoder layer's cross-attention needs of it (`Memory`) is kept in
`Cache.context` and never written again.

Letters in shapes: B rows, T fed tokens, S keys (cache slots, or tokens of the
input), D model width, H heads, C channels per head.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.networks.attention import attend_slots, scores_of, values_of
from models.networks.linear import Embed, Linear
from models.networks.mixture import ACTIVATIONS
from models.networks.params import split
from models.networks.t5_config import T5Config, bucket_table
from models.networks.transformer import within_rows
from specjax import cache as cache_lib
from specjax.cache import Cache, Visible
from specjax.structs import struct
from specjax.types import Inputs, LanguageModel, ModelOutput


@struct
class Memory:
  """Keys and values of the inputs for the decoder's cross-attention.

  Attributes:
    keys, values: `[B, H, S, C]` of every decoder layer, or one array of all,
      `[L, B, H, S, C]` (`models.networks.t5_stacked`).
    mask: `bool[B, S]`, which of the S are tokens of the row's input.
  """

  keys: tuple[Array, ...]
  values: tuple[Array, ...]
  mask: Array

  def seen(self, tokens: Array, cache: Cache | None) -> Visible | Array:
    """The part of it that `tokens: i32[B, T]` see, for `Attention`."""
    if cache is None:
      return self.mask[:, None]
    lengths = jnp.sum(self.mask, axis=1, dtype=jnp.int32)
    return Visible(
      text=lengths, fed_mask=None, positions=jnp.zeros_like(tokens),
      own_positions=None, slots=None, window=None,
      first=jnp.zeros((), jnp.int32), stop=jnp.max(lengths),
    )  # fmt: skip


@struct
class Encoded:
  """Output of an encoder, which several decoders may share.

  Attributes:
    states: `[B, S, D]`, after the encoder's last norm.
    mask: `bool[B, S]`, as that of `Memory`.
  """

  states: Array
  mask: Array


# ------------------------------------------------------------------- layers


def _norm(config: T5Config, dtype, rngs: nnx.Rngs):
  return nnx.RMSNorm(  # which casts what it reads to its dtype
    config.embed_dim, epsilon=config.norm_eps, dtype=_wide(dtype),
    param_dtype=dtype, use_fast_variance=False, rngs=rngs,
  )  # fmt: skip


class Attention(nnx.Module):
  """Attention of either kind; scores are not scaled, the softmax is float32."""

  def __init__(self, config: T5Config, dtype, *, rngs: nnx.Rngs):
    c = config
    self.config = c
    width = c.num_heads * c.head_dim
    narrow, wide = c.embed_dim**-0.5, width**-0.5
    # Unscaled scores: queries begin smaller instead.
    first = (c.embed_dim * c.head_dim) ** -0.5
    self.q = Linear(c.embed_dim, width, False, dtype, rngs, first)
    self.k = Linear(c.embed_dim, width, False, dtype, rngs, narrow)
    self.v = Linear(c.embed_dim, width, False, dtype, rngs, narrow)
    self.out = Linear(width, c.embed_dim, False, dtype, rngs, wide)

  def _heads(self, y: Array) -> Array:
    return y.reshape(*y.shape[:-1], -1, self.config.head_dim)

  def keys_values(self, x: Array) -> tuple[Array, Array]:
    """Keys and values of `x: [B, S, D]`, each `[B, H, S, C]`."""
    k, v = (jnp.swapaxes(self._heads(f(x)), 1, 2) for f in (self.k, self.v))
    return cache_lib.contain(k, v)

  def __call__(self, x, new, sees, bias=None, *, kv=None, layer=None) -> Array:
    """Attends.

    Args:
      x: `[B, T, D]`.
      new: keys and values to attend to, each `[B, H, S, C]`; with a cache those
        of what is fed, or None for cross-attention.
      sees: `bool[B or 1, T or 1, S]`, True where attention is allowed; with a
        cache a `specjax.cache.Visible`.
      bias: `[B or 1, H, T, S]`, added to the scores, or None; with a cache a
        function, as `models.networks.attention.attend_slots` has it.
      kv: this layer's `(keys, values)` of a cache, `[B, H, S, C]` each, or all
        layers' if `layer` is given.
      layer: `i32[]`, which layer of stacked keys and values this one is.

    Returns:
      `[B, T, D]`.
    """
    q = self._heads(self.q(x))
    if kv is not None:
      return self.out(
        attend_slots(q, new, kv, sees, layer=layer, scale=1, bias=bias)
      )
    scores = scores_of(q, new[0])[:, :, 0]
    if bias is not None:
      scores = scores + bias
    scores = jnp.where(sees[:, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(new[1].dtype)
    out = values_of(weights[:, :, None], new[1])
    return self.out(out.reshape(*out.shape[:2], -1))


class FeedForward(nnx.Module):
  """The feed-forward block, gated or not.

  Its output projection stays float32 in a float16 model: it would overflow.
  """

  def __init__(self, config: T5Config, dtype, *, rngs: nnx.Rngs):
    c = config
    self.config = c
    std = c.embed_dim**-0.5
    self.up = Linear(c.embed_dim, c.mlp_dim, False, dtype, rngs, std)
    self.down = Linear(
      c.mlp_dim, c.embed_dim, False, _wide(dtype), rngs, c.mlp_dim**-0.5
    )
    if c.gated_mlp:
      self.gate = Linear(c.embed_dim, c.mlp_dim, False, dtype, rngs, std)

  def __call__(self, x: Array) -> Array:
    """`[B, T, D] -> [B, T, D]`."""
    act, up = ACTIVATIONS[self.config.activation], self.up(x)
    return self.down(
      act(self.gate(x)) * up if self.config.gated_mlp else act(up)
    )


def _wide(dtype):
  """Dtype of the residual stream: float32 where float16 overflows."""
  return jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype


class Layer(nnx.Module):
  """Self-attention, cross-attention in a decoder, feed-forward; pre-norm."""

  def __init__(
    self, config: T5Config, dtype, *, is_decoder: bool, rngs: nnx.Rngs
  ):
    self.attention_norm = _norm(config, dtype, rngs)
    self.attention = Attention(config, dtype, rngs=rngs)
    if is_decoder:
      self.cross_norm = _norm(config, dtype, rngs)
      self.cross = Attention(config, dtype, rngs=rngs)
    self.mlp_norm = _norm(config, dtype, rngs)
    self.mlp = FeedForward(config, dtype, rngs=rngs)

  def __call__(
    self, x, bias, sees, *, kv=None, start=None, layer=None, memory=None
  ):
    """Runs the layer.

    Args:
      x: `[B, T, D]`.
      bias, sees, kv, layer: of self-attention; without a cache tokens attend
        to those that are fed.
      start: `i32[B]`, the slot of the first fed token.
      memory: of a decoder: keys, values and which of the input it sees, the
        first two of all layers if `layer` is given.

    Returns:
      `[B, T, D]`, and the keys and values with the fed tokens' among them.
    """
    y = self.attention_norm(x)
    new = self.attention.keys_values(y)
    if kv is not None:
      new = tuple(x.astype(b.dtype) for x, b in zip(new, kv, strict=True))
      kv = tuple(
        cache_lib.write_rows(buffer, rows, start, layer=layer)
        for buffer, rows in zip(kv, new, strict=True)
      )
    x = x + self.attention(y, new, sees, bias, kv=kv, layer=layer)
    if memory is not None:
      *given, inputs = memory
      y = self.cross_norm(x)
      if isinstance(inputs, Visible):
        x = x + self.cross(y, None, inputs, kv=given, layer=layer)
      else:
        x = x + self.cross(y, given, inputs)
    return x + self.mlp(self.mlp_norm(x)), new if kv is None else kv


class Stack(nnx.Module):
  """Layers that share a bias by distance, and the norm after them."""

  def __init__(
    self,
    config: T5Config,
    dtype,
    *,
    num_layers: int,
    is_decoder: bool,
    rngs: nnx.Rngs,
  ):
    self.config = config
    self.position_bias = nnx.Embed(
      config.num_buckets, config.num_heads, dtype=dtype, param_dtype=dtype,
      embedding_init=nnx.initializers.normal(config.embed_dim**-0.5), rngs=rngs,
    )  # fmt: skip
    self.layers = nnx.List(
      [
        Layer(config, dtype, is_decoder=is_decoder, rngs=rngs)
        for _ in range(num_layers)
      ]
    )
    self.final_norm = _norm(config, dtype, rngs)

  def bias(self, distance: Array, *, bidirectional: bool) -> Array:
    """The bias of scores by the distance of their keys.

    Args:
      distance: `i32[..., T, S]`, key position - query position.
      bidirectional: whether keys to the right have buckets of their own; those
        of a causal stack are not seen.

    Returns:
      `f32[..., H, T, S]`.
    """
    c = self.config
    table = bucket_table(
      c.num_buckets, c.max_distance, bidirectional=bidirectional
    )
    away = jnp.abs(distance) if bidirectional else jnp.maximum(-distance, 0)
    bucket = jnp.asarray(table)[jnp.minimum(away, c.max_distance)]
    if bidirectional:
      bucket = bucket + (distance > 0) * (c.num_buckets // 2)
    bias = jnp.moveaxis(self.position_bias(bucket), -1, -3)
    return bias.astype(jnp.promote_types(bias.dtype, jnp.float32))


# -------------------------------------------------------------------- model


class T5(nnx.Module):
  """Embedding, encoder, decoder and output projection.

  Args:
    config: shapes and switches.
    dtype: of parameters and activations (the softmax, the biases and the logits
      are float32; so is, in a float16 model, what the layers add up).
    rngs: for the initial weights.
  """

  def __init__(self, config: T5Config, *, dtype=jnp.float32, rngs: nnx.Rngs):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    self.embed = Embed(
      config.vocab_size, config.embed_dim, dtype=dtype, param_dtype=dtype,
      embedding_init=nnx.initializers.normal(1.0), rngs=rngs,
    )  # fmt: skip
    stack = functools.partial(Stack, config, dtype, rngs=rngs)
    self.encoder = stack(num_layers=config.num_encoder_layers, is_decoder=False)
    self.decoder = stack(num_layers=config.num_layers, is_decoder=True)
    if not config.tied_embeddings:
      self.lm_head = Linear(
        config.embed_dim, config.vocab_size, False, dtype, rngs,
        config.embed_dim**-0.5,
      )  # fmt: skip

  def encode(self, inputs: Inputs | Encoded) -> Memory:
    """Reads the inputs, unless an encoder has; padding changes nothing."""
    encoded = (
      inputs if isinstance(inputs, Encoded) else self.encode_inputs(inputs)
    )
    memory = [
      layer.cross.keys_values(encoded.states) for layer in self.decoder.layers
    ]
    return Memory(
      keys=tuple(k for k, _ in memory),
      values=tuple(v for _, v in memory),
      mask=encoded.mask,
    )

  def encode_inputs(self, inputs: Inputs) -> Encoded:
    """The encoder."""
    x, bias, is_text = self.open(inputs)
    for layer in self.encoder.layers:
      x, _ = layer(x, bias, is_text[:, None])
    return Encoded(states=self.encoder.final_norm(x), mask=is_text)

  def open(self, inputs: Inputs) -> tuple[Array, Array, Array]:
    """The inputs of the encoder's layers.

    Returns:
      `[B, S, D]`, the embedded inputs; their `f32[1, H, S, S]` bias; and
      `bool[B, S]`, which of them are there.
    """
    place = np.arange(inputs.tokens.shape[1])
    is_text = place < inputs.lengths[:, None]
    tokens = jnp.where(is_text, inputs.tokens, inputs.tokens[:, :1])
    bias = self.encoder.bias(place[None] - place[:, None], bidirectional=True)
    return self.widen(self.embed(tokens)), bias[None], is_text

  def __call__(
    self,
    tokens: Array,
    memory: Memory,
    cache: Cache | None = None,
    *,
    positions: Array | None = None,
    mask: np.ndarray | Array | None = None,
    logits_at: Array | None = None,
  ) -> tuple[ModelOutput, Cache | None]:
    """Feeds T tokens to the decoder; see `specjax.types.ApplyFn`.

    Without a cache the tokens are whole rows (training).
    """
    fed = self.enter(tokens, cache, positions=positions, mask=mask)
    x, cache, pairs = fed.x, fed.cache, []
    for i, layer in enumerate(self.decoder.layers):
      x, kv = layer(
        x, fed.bias, fed.sees, start=fed.start,
        kv=None if cache is None else (cache.keys[i], cache.values[i]),
        memory=(
          memory.keys[i], memory.values[i], memory.seen(tokens, cache)
        ),
      )  # fmt: skip
      pairs.append(kv)
    if cache is not None:
      cache = cache.replace(
        keys=tuple(k for k, _ in pairs),
        values=tuple(v for _, v in pairs),
        length=fed.start + tokens.shape[1],
      )
    return self.leave(x, logits_at), cache

  def enter(
    self,
    tokens: Array,
    cache: Cache | None,
    *,
    positions: Array | None = None,
    mask: np.ndarray | Array | None = None,
  ) -> "Fed":
    """The inputs of the decoder's layers; arguments as of `__call__`."""
    batch, fed = tokens.shape
    start = jnp.zeros((batch,), jnp.int32) if cache is None else cache.length
    if positions is None:
      positions = start[:, None] + jnp.arange(fed)
    bias = lambda at, keys: self.decoder.bias(
      keys[:, None] - at[..., None], bidirectional=False
    )
    if cache is None:
      bias, sees = bias(positions, positions), within_rows(positions, mask)
    else:
      cache = cache_lib.write_positions(cache, positions)
      sees = cache_lib.visible(cache, positions, mask)
    return Fed(
      x=self.widen(self.embed(tokens)),
      bias=bias,
      sees=sees,
      start=start,
      cache=cache,
    )

  def leave(self, x: Array, logits_at: Array | None = None) -> ModelOutput:
    """Final norm and logits, from the last layer's `x: [B, T, D]`."""
    if logits_at is not None:
      x = jnp.take_along_axis(x, logits_at[..., None], axis=1)
    x = self.decoder.final_norm(x)
    if self.config.scale_outputs:
      x = x * self.config.embed_dim**-0.5
    tied = self.config.tied_embeddings
    logits = self.embed.logits(x) if tied else self.lm_head(x)
    exact = jnp.promote_types(logits.dtype, jnp.float32)
    return ModelOutput(logits=logits.astype(exact))

  def widen(self, x: Array) -> Array:
    """Embedded tokens in the dtype that the layers add up in."""
    return x.astype(_wide(self.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fed:
  """Inputs of the decoder's layers for T fed tokens.

  Attributes:
    x: `[B, T, D]`, the embedded tokens.
    bias: of self-attention, a function of positions; without a cache
      `f32[B, H, T, T]`.
    sees: likewise, what the tokens see; without a cache `bool[B, T, T]`.
    start: `i32[B]`, the slot of the first fed token.
    cache: with the tokens' positions recorded, or None.
  """

  x: Array
  bias: Callable[[Array, Array], Array] | Array
  sees: Visible | Array
  start: Array
  cache: Cache | None


def abstract(config: T5Config, *, dtype) -> T5:
  """A module with shapes in place of its parameters."""
  return nnx.eval_shape(lambda: T5(config, dtype=dtype, rngs=nnx.Rngs(0)))


def as_language_model(module: T5) -> tuple[LanguageModel, nnx.State]:
  """Splits a module, abstract or not, into pure functions and parameters.

  `LanguageModel.encode` takes `Inputs`, or what `encode_inputs` made of them.
  """
  config = module.config
  merge, params = split(module)

  def init_cache(batch: int, slots: int) -> Cache:
    return cache_lib.make_cache(
      batch=batch,
      slots=slots,
      num_layers=config.num_layers,
      num_kv_heads=config.num_heads,
      head_dim=config.head_dim,
      dtype=module.dtype,
      with_positions=True,  # of biases by distance, in trees too
    )

  def apply(params, tokens, cache, **how):
    return merge(params)(tokens, cache.context, cache, **how)

  model = LanguageModel(
    vocab_size=config.vocab_size,
    init_cache=init_cache,
    apply=apply,
    encode=lambda params, inputs: merge(params).encode(inputs),
    encode_inputs=lambda params, inputs: merge(params).encode_inputs(inputs),
  )
  return model, params
