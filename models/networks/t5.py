"""T5, an encoder-decoder (Flax NNX).

Raffel et al. (2020), 1.0 and 1.1: RMS norms before each sub-layer, no biases,
unscaled attention scores, and a learned bias by distance between query and key,
which all layers of a stack share. The encoder runs once per row; keys and
values for cross-attention (`Memory`) are kept in `Cache.context`.

Letters in shapes: B rows, T fed tokens, S keys (cache slots, or tokens of the
input), D model width, H heads, C channels per head.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.networks.layers import Attention, Mlp
from models.networks.linear import Embed, Linear
from models.networks.params import shapes_of, split
from models.networks.t5_config import (
  MAX_DISTANCE,
  NUM_BUCKETS,
  T5Config,
  bucket_table,
)
from models.networks.transformer import within_rows
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax.cache import Cache, Visible
from specjax.structs import struct
from specjax.types import Inputs, LanguageModel, ModelOutput


@struct
class Memory:
  """Keys and values of the inputs for the decoder's cross-attention.

  Attributes:
    keys, values: `[B, H, S, C]` of every decoder layer.
    mask: `bool[B, S]`, True for tokens of the row's input.
  """

  keys: tuple[Array, ...]
  values: tuple[Array, ...]
  mask: Array

  def visible(self, tokens: Array, cache: Cache | None) -> Visible | Array:
    """The slots that `tokens: i32[B, T]` see, for `Attention`."""
    if cache is None:
      return _seen_by_all(self.mask, tokens.shape[1])
    lengths = jnp.sum(self.mask, axis=1, dtype=jnp.int32)
    return Visible(
      text=lengths, fed_mask=None, positions=jnp.zeros_like(tokens),
      own_positions=None, slots=None, window=None,
      first=jnp.zeros((), jnp.int32), stop=jnp.max(lengths),
    )  # fmt: skip


# ------------------------------------------------------------------- layers


def _seen_by_all(mask: Array, count: int) -> Array:
  """`bool[B, S] -> bool[B, T, S]`, the same for T = `count` queries."""
  return jnp.repeat(mask[:, None], count, axis=1)


def _norm(config: T5Config, dtype, rngs: nnx.Rngs):
  return nnx.RMSNorm(  # which casts what it reads to its dtype
    config.embed_dim, epsilon=config.norm_eps, dtype=_wide(dtype),
    param_dtype=dtype, use_fast_variance=False, rngs=rngs,
  )  # fmt: skip


def _wide(dtype):
  """Dtype of the residual stream: float32 for float16, which overflows."""
  return jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype


class Layer(nnx.Module):
  """Self-attention, cross-attention in a decoder, feed-forward; pre-norm."""

  def __init__(
    self, config: T5Config, dtype, *, is_decoder: bool, rngs: nnx.Rngs
  ):
    c = config
    self.attention_norm = _norm(c, dtype, rngs)
    self.attention = Attention(c, dtype, rngs=rngs)
    if is_decoder:
      self.cross_norm = _norm(c, dtype, rngs)
      self.cross = Attention(c, dtype, rngs=rngs)
    self.mlp_norm = _norm(c, dtype, rngs)
    self.mlp = Mlp(c, dtype, rngs=rngs)
    # Float32 in a float16 model, where its output would overflow.
    self.mlp.down = Linear(c.mlp_dim, c.embed_dim, False, _wide(dtype), rngs)
    for _, module in list(nnx.iter_modules(self)):
      for name, linear in vars(module).items():
        if isinstance(linear, Linear):
          std = linear.weight.shape[1] ** -0.5
          # Scores are not scaled; queries are initialized smaller instead.
          std *= c.head_dim**-0.5 if name == "q" else 1
          linear.weight[...] *= std / 0.02

  def __call__(self, x, bias, visible, *, kv=None, start=None, memory=None):
    """Runs the layer.

    Args:
      x: `[B, T, D]`.
      bias, visible, kv, start: of self-attention, as for `layers.Attention`;
        without a cache tokens attend to the fed tokens.
      memory: in a decoder, keys, values and visibility of the input.

    Returns:
      `[B, T, D]`, and the keys and values including the fed tokens'.
    """
    read = self.attention_norm(x)
    y, kv = self.attention(read, None, visible, kv, start, bias=bias)
    x = x + y
    if memory is not None:
      *given, inputs = memory
      x = x + self.cross.attend_to(self.cross_norm(x), None, inputs, given)
    return x + self.mlp(self.mlp_norm(x)), kv


class Stack(nnx.Module):
  """Layers that share a bias by distance, and the final norm."""

  def __init__(
    self, config: T5Config, dtype, num_layers: int, is_decoder: bool, *, rngs
  ):
    self.position_bias = nnx.Embed(
      NUM_BUCKETS, config.num_heads, dtype=dtype, param_dtype=dtype,
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
    """The bias of scores by key position - query position.

    `i32[..., T, S] -> f32[..., H, T, S]`. If `bidirectional`, keys to the right
    have their own buckets; a causal stack does not see these.
    """
    table = jnp.asarray(bucket_table(bidirectional=bidirectional))
    away = jnp.abs(distance) if bidirectional else jnp.maximum(-distance, 0)
    bucket = table[jnp.minimum(away, MAX_DISTANCE)]
    if bidirectional:
      bucket = bucket + (distance > 0) * (NUM_BUCKETS // 2)
    bias = jnp.moveaxis(self.position_bias(bucket), -1, -3)
    return bias.astype(jnp.promote_types(bias.dtype, jnp.float32))


# -------------------------------------------------------------------- model


class T5(nnx.Module):
  """Embedding, encoder, decoder and output projection.

  Args:
    config: shapes and switches.
    dtype: dtype of parameters and activations (softmax, biases and logits are
      float32; so is the residual stream of a float16 model).
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
    self.encoder = stack(config.num_encoder_layers, False)
    self.decoder = stack(config.num_layers, True)
    if not config.tied_embeddings:
      self.lm_head = Linear(
        config.embed_dim, config.vocab_size, False, dtype, rngs,
        config.embed_dim**-0.5,
      )  # fmt: skip

  def encode(self, inputs: Inputs, sharding: Sharding | None = None) -> Memory:
    """Encodes the inputs; padding changes nothing.

    `sharding` has the rules for activations and the memory on a mesh.
    """
    place = np.arange(inputs.tokens.shape[1])
    is_text = place < inputs.lengths[:, None]
    tokens = jnp.where(is_text, inputs.tokens, inputs.tokens[:, :1])
    bias = self.encoder.bias(place[None] - place[:, None], bidirectional=True)
    visible = _seen_by_all(is_text, len(place))
    x = self.widen(self.embed(tokens))
    for layer in self.encoder.layers:
      x = constrain(x, "act_btd", sharding=sharding)
      x, _ = layer(x, bias[None], visible)
    states = self.encoder.final_norm(x)
    memory = [
      [
        constrain(x, "cache_lbksc", sharding=sharding)
        for x in cache_lib.contain(*layer.cross.keys_and_values(states, None))
      ]
      for layer in self.decoder.layers
    ]
    keys, values = map(tuple, zip(*memory, strict=True))
    return Memory(keys=keys, values=values, mask=is_text)

  def __call__(
    self,
    tokens: Array,
    memory: Memory,
    cache: Cache | None = None,
    *,
    positions: Array | None = None,
    mask: np.ndarray | Array | None = None,
    logits_at: Array | None = None,
    sharding: Sharding | None = None,
  ) -> tuple[ModelOutput, Cache | None]:
    """Feeds T tokens to the decoder; see `specjax.types.ApplyFn`.

    Without a cache the tokens are whole rows (training). `sharding` has the
    rules for activations and the cache on a mesh.
    """
    put = functools.partial(constrain, sharding=sharding)
    batch, fed = tokens.shape
    start = jnp.zeros((batch,), jnp.int32) if cache is None else cache.length
    if positions is None:
      positions = start[:, None] + jnp.arange(fed)
    by_distance = lambda at, keys: self.decoder.bias(
      keys[:, None] - at[..., None], bidirectional=False
    )
    bias: Callable | Array = by_distance
    visible: Visible | Array
    if cache is None:
      bias = by_distance(positions, positions)
      visible = within_rows(positions, mask)
    else:
      cache = cache_lib.write_positions(cache, positions)
      visible = cache_lib.visible(cache, positions, mask)
    x, inputs, pairs = (
      self.widen(self.embed(tokens)), memory.visible(tokens, cache), [],
    )  # fmt: skip
    for i, layer in enumerate(self.decoder.layers):
      x, kv = layer(
        put(x, "act_btd"), bias, visible, start=start,
        kv=None if cache is None else (cache.keys[i], cache.values[i]),
        memory=(memory.keys[i], memory.values[i], inputs),
      )  # fmt: skip
      pairs.append([put(one, "cache_lbksc") for one in kv])
    if cache is not None:
      keys, values = map(tuple, zip(*pairs, strict=True))
      cache = cache.replace(keys=keys, values=values, length=start + fed)
    logits = put(self.logits(x, logits_at), "logits_btv")
    return ModelOutput(logits=logits), cache

  def logits(self, x: Array, at: Array | None = None) -> Array:
    """Final norm and logits, `[B, T, D] -> f32[B, T or W, V]`.

    `at`, `i32[B, W]`, are the tokens whose logits are needed; None for all.
    """
    if at is not None:
      x = jnp.take_along_axis(x, at[..., None], axis=1)
    x = self.decoder.final_norm(x)
    if self.config.scale_outputs:
      x = x * self.config.embed_dim**-0.5
    tied = self.config.tied_embeddings
    logits = self.embed.logits(x) if tied else self.lm_head(x)
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

  def widen(self, x: Array) -> Array:
    """Embedded tokens in the dtype of the residual stream."""
    return x.astype(_wide(self.dtype))


def abstract(config: T5Config, *, dtype) -> T5:
  """A module with shapes instead of parameters."""
  return shapes_of(lambda rngs: T5(config, dtype=dtype, rngs=rngs))


def as_language_model(
  module: T5, *, sharding: Sharding | None = None
) -> tuple[LanguageModel, nnx.State]:
  """Splits a module, abstract or not, into pure functions and parameters.

  Args:
    module: the network.
    sharding: rules for activations, memory and cache on the mesh in use; None,
      or no mesh, leaves them to XLA.
  """
  config = module.config
  merge, params = split(module)

  def init_cache(batch: int, slots: int) -> Cache:
    cache = cache_lib.make_cache(
      batch=batch,
      slots=slots,
      num_layers=config.num_layers,
      num_kv_heads=config.num_heads,
      head_dim=config.head_dim,
      dtype=module.dtype,
      with_positions=True,  # for biases by distance, also in trees
    )
    put = lambda one: constrain(one, "cache_lbksc", sharding=sharding)
    return cache.replace(
      keys=tuple(map(put, cache.keys)), values=tuple(map(put, cache.values))
    )

  def apply(params, tokens, cache, **how):
    module = merge(params)
    return module(tokens, cache.context, cache, sharding=sharding, **how)

  model = LanguageModel(
    vocab_size=config.vocab_size,
    init_cache=init_cache,
    apply=apply,
    encode=lambda params, inputs: merge(params).encode(inputs, sharding),
  )
  return model, params
