"""A configurable decoder-only transformer (Flax NNX).

The embedding, the layers of `models.networks.layers`, the final norm and the
output projection; and `as_language_model`, which makes the pure functions that
`specjax` decodes with.

Letters in shapes as in `models.networks.layers`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.networks import gated_delta
from models.networks.attention import capped
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.layers import Layer, Linear, make_norm
from models.networks.linear import Embed
from models.networks.mixture import Mixture
from models.networks.params import split
from models.networks.quantized import check_cache
from models.networks.rope import Rope
from specjax import cache as cache_lib
from specjax import recurrent
from specjax.cache import Cache, Visible
from specjax.recurrent import Memory, Recurrent, make_memory
from specjax.types import LanguageModel, ModelOutput

FINAL = "final"
# Hidden states that a model returns, concatenated on the last axis: i in 0..L
# is the residual stream before layer i (L: after the last layer), FINAL is that
# after the final norm, the input of the output projection.
Features = tuple[int | str, ...]


def check_features(features: Features, num_layers: int) -> None:
  """Raises ValueError for features that do not exist."""
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
      angles and the logits are float32 at least).
    rngs: for the initial weights.
    with_layers: False for everything except the layers.
  """

  def __init__(
    self,
    config: TransformerConfig,
    *,
    dtype=jnp.float32,
    rngs: nnx.Rngs,
    with_layers: bool = True,
  ):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    embed = functools.partial(
      Embed,
      features=config.embed_dim,
      dtype=dtype,
      param_dtype=dtype,
      embedding_init=nnx.initializers.normal(0.02),
      rngs=rngs,
    )
    self.embed = embed(config.vocab_size)
    if config.learned_positions:
      self.position_embed = embed(config.max_positions)
    if width := config.num_layers * config.per_layer_dim:
      self.per_layer_embed = embed(config.per_layer_vocab, features=width)
      self.per_layer_projection = Linear(
        config.embed_dim, width, False, dtype, rngs
      )
      self.per_layer_norm = make_norm(config, config.per_layer_dim, dtype, rngs)
    self.layers = nnx.List(
      [
        Layer(config, dtype, index=i, rngs=rngs)
        for i in range(config.num_layers * with_layers)
      ]
    )
    self.final_norm = make_norm(config, config.embed_dim, dtype, rngs)
    if not config.tied_embeddings:
      self.lm_head = Linear(
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
    packed from contiguous documents: `segments`, `i32[B, T]`, has the document
    of each token, and `positions` its position there; tokens only see their
    own document.
    """
    c = self.config
    fed = self.enter(
      tokens, cache, positions=positions, mask=mask, segments=segments
    )
    x, cache = fed.x, fed.cache
    kvs, seen = _entries(c, cache), {}
    for i, layer in enumerate(self.layers):
      seen[i] = x
      source = c.source(i)
      where = i if source is None else source
      x, kvs[where] = layer(
        x,
        *fed.of(layer.spec),
        kvs.get(where),
        fed.start,
        per_layer=fed.per_layer_of(i),
        attention=not {i, where} & {*skipped.attention},
        mlp=i not in skipped.mlp,
      )
    if cache is not None:
      memories = tuple(kvs[i] for i in c.deltas)
      cache = cache.replace(
        keys=tuple(kvs[i][0] for i in c.cached),
        values=tuple(kvs[i][1] for i in c.cached),
        recurrent=after_pass(cache, memories, fed.start, tokens.shape[1]),
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
    """Computes the inputs of the layers; arguments as for `__call__`."""
    c = self.config
    batch, fed = tokens.shape
    start = jnp.zeros((batch,), jnp.int32) if cache is None else cache.length
    if positions is None:
      positions = start[:, None] + jnp.arange(fed)
    windows = {a.window for a in c.attentions.values()}
    visible: dict[int | None, Visible | Array]
    paths: dict[int, gated_delta.Paths] = {}
    for kernel in {delta.kernel for delta in c.deltas.values()}:
      if mask is None:
        paths[kernel] = gated_delta.chain(fed, segments, kernel, cache)
      else:
        full = within_rows(positions, mask, segments) if cache is None else mask
        paths[kernel] = gated_delta.from_mask(full, kernel, cache)
    if cache is not None:
      cache = cache_lib.write_positions(cache, positions)
      visible = {
        w: cache_lib.visible(cache, positions, mask, window=w) for w in windows
      }
    else:
      visible = {w: within_rows(positions, mask, segments, w) for w in windows}
    x = self.embed(tokens)
    if c.embed_scale is not None:
      x = x * jnp.asarray(c.embed_scale, x.dtype)
    if c.learned_positions:
      # Draft nodes may be beyond the table (`LanguageModel.max_positions`).
      x = x + self.position_embed(jnp.minimum(positions, c.max_positions - 1))
    ropes = {a.rope for a in c.attentions.values()}
    rotary = {rope: rope and rope.table(positions) for rope in ropes}
    return Fed(
      x=x,
      rotary=rotary,
      visible=visible,
      paths=paths,
      start=start,
      cache=cache,
      per_layer=self._per_layer(tokens, x) if c.per_layer_dim else None,
    )

  def _per_layer(self, tokens: Array, x: Array) -> Array:
    """The layers' own token embeddings, `[B, T, L, P]`."""
    c = self.config
    shape = (*tokens.shape, c.num_layers, c.per_layer_dim)
    scale = jnp.asarray(c.per_layer_dim**0.5, x.dtype)
    table = (self.per_layer_embed(tokens) * scale).reshape(shape)
    read = (self.per_layer_projection(x) * c.embed_dim**-0.5).reshape(shape)
    return (self.per_layer_norm(read) + table) * 0.5**0.5

  def leave(
    self,
    x: Array,
    logits_at: Array | None = None,
    seen: Mapping[int, Array] | None = None,
    features: Features = (),
  ) -> ModelOutput:
    """Final norm, logits and features, from `x: [B, T, D]`; see `ApplyFn`.

    `seen` has the input of each layer, and finally x.
    """
    read = hidden = self.final_norm(x)
    if logits_at is not None:
      read = jnp.take_along_axis(hidden, logits_at[..., None], axis=1)
    if self.config.tied_embeddings:
      logits = self.embed.logits(read)
    else:
      logits = self.lm_head(read)
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    logits = capped(logits.astype(wide), self.config.logit_softcap)
    chosen = [hidden if i == FINAL else seen[i] for i in features]
    return ModelOutput(
      logits=logits,
      features=jnp.concatenate(chosen, axis=-1) if chosen else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fed:
  """Inputs of the layers for T fed tokens.

  Attributes:
    x: `[B, T, D]`, the embedded tokens.
    rotary: tables of rotary embeddings, by `Rope`.
    visible: what tokens see, by window; without a cache `bool[B, T, T]`.
    paths: ancestors for recurrent layers, by their kernels.
    start: `i32[B]`, the slot of the first fed token.
    cache: with the tokens' positions recorded, or None.
    per_layer: `[B, T, L, P]`, the layers' own token embeddings, or None.
  """

  x: Array
  rotary: dict[Rope | None, tuple[Array, Array] | None]
  visible: dict[int | None, Visible | Array]
  paths: dict[int, gated_delta.Paths]
  start: Array
  cache: Cache | None
  per_layer: Array | None = None

  def of(self, layer: LayerSpec):
    """The rotary table of a layer, and what its tokens see."""
    a = layer.attention
    if not isinstance(a, AttentionSpec):
      return None, self.paths[a.kernel]
    return self.rotary[a.rope], self.visible[a.window]

  def per_layer_of(self, index: int | Array) -> Array | None:
    """A layer's part of `per_layer`, `[B, T, P]`."""
    if self.per_layer is None:
      return None
    return jnp.take(self.per_layer, index, axis=2)


def _entries(config: TransformerConfig, cache: Cache | None) -> dict[int, Any]:
  """A cache's entries by layer: keys and values, or a `Memory`."""
  if cache is None:
    return {}
  kvs = zip(cache.keys, cache.values, strict=True)
  entries: dict[int, Any] = dict(zip(config.cached, kvs, strict=True))
  if cache.recurrent is not None:
    memories = cache.recurrent.layers
    entries |= zip(config.deltas, memories, strict=True)
  return entries


def after_pass(
  cache: Cache, memories: tuple[Memory, ...], start: Array, fed: int
) -> Recurrent | None:
  """Recurrent states after a pass over `fed` tokens from slots `start`.

  Those of idle rows are unchanged.
  """
  before = cache.recurrent
  if before is None:
    return None
  count = jnp.maximum(start - before.base, 0)
  base = before.base + recurrent.num_folded(before.width, fed, count)
  if cache.idle is not None:
    base = jnp.where(cache.idle, before.base, base)
  return Recurrent(base=base, layers=memories)


def within_rows(
  positions: Array,
  mask: np.ndarray | Array | None,
  segments: Array | None = None,
  window: int | None = None,
) -> Array:
  """Attention mask of whole rows, without a cache, `bool[B, T, T]`.

  Args:
    positions: `i32[B, T]`, of each token in its document.
    mask: `bool[T, T]` or `bool[B, T, T]`; None for a causal chain.
    segments: `i32[B, T]`, the document of each token; None for one per row.
    window: sliding-window size, or None.
  """
  rows, fed = positions.shape
  visible = jnp.asarray(np.tri(fed, dtype=bool) if mask is None else mask)
  visible = jnp.broadcast_to(visible, (rows, fed, fed))
  if window is not None:
    visible &= positions[:, :, None] - positions[:, None, :] < window
  if segments is not None:
    visible &= segments[:, :, None] == segments[:, None, :]
  return visible


def as_language_model(
  module: Transformer,
  *,
  skipped: SkippedLayers = SkippedLayers(),
  features: Features = (),
  stored: str | None = None,
) -> tuple[LanguageModel, nnx.State]:
  """Splits a module into pure functions and its parameters.

  Args:
    module: the network.
    skipped: sub-layers to skip. Parameters and cache are those of the full
      model; cache entries of skipped layers are unchanged.
    features: contents of `ModelOutput.features`, see `Features`.
    stored: dtype of the KV cache, "int8" or "fp8"; None for the module's.

  Returns:
    The `LanguageModel` and the parameters to call it with.

  Raises:
    ValueError: for layers that do not exist, or another `stored`.
  """
  config = module.config
  skipped.check(config.num_layers)
  check_cache(config, stored)
  check_features(features, config.num_layers)
  merge, params = split(module)

  def init_cache(batch: int, slots: int) -> Cache:
    cached = [config.attentions[i] for i in config.cached]
    cache = cache_lib.make_cache(
      batch=batch,
      slots=slots,
      num_layers=len(cached),
      num_kv_heads=[a.num_kv_heads for a in cached],
      head_dim=[a.head_dim for a in cached],
      value_dim=[a.value_dim for a in cached],
      dtype=module.dtype,
      with_positions=config.has_windows,
      stored=stored,
    )
    memories = tuple(
      delta_memory(delta, batch, module.dtype)
      for delta in config.deltas.values()
    )
    return with_memories(cache, memories)

  def apply(
    params, tokens, cache, *, positions=None, mask=None, logits_at=None
  ):
    return merge(params)(
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
    takes_rows=True,
    has_states=bool(config.deltas),
  )
  return model, params


def delta_memory(
  delta: DeltaSpec, batch: int, dtype, stack: int | None = None
) -> Memory:
  """An empty recurrent state of a layer, or of `stack` layers."""
  return make_memory(
    batch=batch,
    num_key_heads=delta.num_key_heads,
    num_value_heads=delta.num_value_heads,
    key_dim=delta.key_dim,
    value_dim=delta.value_dim,
    reach=delta.kernel - 1,
    dtype=dtype,
    stack=stack,
  )


def with_memories(cache: Cache, memories: tuple[Memory, ...]) -> Cache:
  """Adds recurrent states, if any, to an empty cache."""
  if not memories:
    return cache
  base = jnp.zeros_like(cache.length)
  return cache.replace(recurrent=Recurrent(base=base, layers=memories))


def mixtures_of(
  config: TransformerConfig, skipped: SkippedLayers = SkippedLayers()
) -> tuple[Mixture, ...]:
  """The mixtures of all layers whose MLP is not skipped."""
  return tuple(
    block
    for i, layer in enumerate(config.layers)
    for block in layer.blocks
    if isinstance(block, Mixture) and i not in skipped.mlp
  )
