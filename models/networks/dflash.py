"""DFlash's head: a few layers over a block of masks and the target's features.

Chen et al. (2026). Features of several layers are fused into H channels, from
which every layer computes keys and values for each token that the target has
read; the fused features are the same for all layers, without a norm per layer.
Queries come from a block, the newest token and masks; its tokens attend to all
features and to each other, in both directions. Embedding and output projection
are the target's, except with a draft vocabulary, as in the `speculators`
library.

Letters in shapes: B rows, T tokens, H the head's width, F width of all features
that it reads, K tokens drafted, V vocabulary.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models import draft_vocabulary
from models.networks.heads import (
  HeadConfig,
  embedding,
  first_ids,
  init_cache,
  is_stacked,
  pairs,
  place,
  with_pairs,
)
from models.networks.layers import (
  Layer,
  Linear,
  TransformerConfig,
  make_norm,
)
from models.networks.params import split
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax.cache import Cache, Visible
from specjax.types import BlockModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(HeadConfig):
  """Configuration of a head that drafts a block in one pass.

  Attributes:
    layers: its layers: `embed_dim` is H, `vocab_size` V. Rotary frequencies are
      the head's own.
    num_fused: target layers whose features are concatenated to F channels.
    block_size: the newest token and the masks; K + 1, or K with `from_newest`.
    mask_token: id of the mask.
    draft_vocab_size: size of the draft vocabulary; None for all V.
    causal_windows: whether blocks are causal in layers with a window.
    windows_before_block: whether a window of W is the W tokens before the block
      for all its tokens, not the W up to each token.
    causal: whether blocks are causal in all layers (JetSpec).
    from_newest: whether the newest token's row predicts too, and each row
      predicts the next token (DSpark); otherwise each mask predicts its own.
  """

  layers: TransformerConfig
  num_fused: int = 1
  block_size: int
  mask_token: int
  draft_vocab_size: int | None = None
  causal_windows: bool = True
  windows_before_block: bool = False
  causal: bool = False
  from_newest: bool = False

  def __post_init__(self):
    if self.block_size < 2:
      raise ValueError(f"block_size must be at least 2, got {self.block_size}")
    if not 0 <= self.mask_token < self.layers.vocab_size:
      raise ValueError(
        f"mask_token must be in 0..{self.layers.vocab_size - 1}, got "
        f"{self.mask_token}"
      )

  kind = "dflash"

  @property
  def shared(self) -> frozenset[str]:
    """Modules that share the target's arrays."""
    whole = self.draft_vocab_size is None
    return frozenset({"embed", "lm_head"} if whole else {"embed"})

  @property
  def num_predicted(self) -> int:
    """K."""
    return self.block_size - (not self.from_newest)


class Parallel(nnx.Module):
  """The network, with two passes, `read` and `__call__`."""

  def __init__(
    self, config: ParallelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs
  ):
    c = config.layers
    self.config = config
    self.dtype = jnp.dtype(dtype)
    self.embed = embedding(c.vocab_size, c.embed_dim, dtype, rngs)
    self.fc = Linear(config.num_features, c.embed_dim, False, dtype, rngs)
    self.hidden_norm = make_norm(c, c.embed_dim, dtype, rngs)
    self.layers = nnx.List(
      [self.make_layer(dtype, rngs) for _ in range(c.num_layers)]
    )
    self.final_norm = make_norm(c, c.embed_dim, dtype, rngs)
    words = config.draft_vocab_size or c.vocab_size
    self.lm_head = Linear(c.embed_dim, words, False, dtype, rngs)
    if config.draft_vocab_size is not None:
      self.target_ids = first_ids(words)

  def make_layer(self, dtype, rngs: nnx.Rngs) -> Layer:
    """Makes one of its layers, which differ only in windows."""
    return Layer(self.config.layers, dtype, rngs=rngs)

  def fuse(self, features: Array, put=None) -> Array:
    """Fuses features, `[B, T, F] -> [B, T, H]`, for all layers.

    Args:
      features: the target's.
      put: as for `read`, or None. The norm's input is replicated: if sharded by
        channels, XLA would also shard the target's activations like that.
    """
    put = put or (lambda x, name: x)
    x = put(self.fc(features.astype(self.dtype)), "act_btd")
    return put(self.hidden_norm(x), "act_btd")

  def block(self, newest: Array) -> Array:
    """The tokens of a block of S, `i32[B, 1] -> i32[B, S]`."""
    c = self.config
    masks = jnp.full((len(newest), c.block_size - 1), c.mask_token)
    return jnp.concatenate([newest, masks.astype(newest.dtype)], axis=1)

  def hidden(self, x: Array) -> Array:
    """Inputs of the output projection, `[B, S, H] -> [B, K, H]`."""
    return self.final_norm(x[:, not self.config.from_newest :])

  def logits(self, hidden: Array) -> Array:
    """Logits in the draft vocabulary, `[B, K, H] -> f32[B, K, W]`."""
    return self.lm_head(hidden).astype(jnp.float32)

  def spread(self, logits: Array) -> Array:
    """Logits in the target's vocabulary, `f32[..., V]`, -inf for others."""
    if self.config.draft_vocab_size is None:
      return logits
    return draft_vocabulary.spread(
      logits, self.target_ids[...], self.config.layers.vocab_size
    )

  def read(self, features: Array, cache: Cache, put) -> Cache:
    """Writes every layer's keys and values of features; see `BlockModel.read`.

    Args:
      features: `[B, T, F]`, the target's features of T tokens.
      cache: its length is the position of the first of them.
      put: constrains an array's layout, see `models.sharding.constrain`.
    """
    c, start, fed = self.config.layers, cache.length, features.shape[1]
    x = self.fuse(features, put)
    rope = c.attention.rope
    assert rope is not None
    rotary = rope.table(start[:, None] + np.arange(fed))
    kvs = list(pairs(cache))
    for i, layer in enumerate(self.layers):
      own, number = place(i, is_stacked(cache))
      _, kvs[own] = layer.attention.remember(
        x, rotary, kvs[own], start, layer=number
      )
    return with_pairs(cache, kvs, put).replace(length=start + fed)

  def visible(self, cache: Cache, window: int | None) -> Visible:
    """The slots that the tokens of a block see in a layer.

    Args:
      cache: has all tokens before the block.
      window: the layer's window, or None.
    """
    size = self.config.block_size
    mask = np.ones((size, size), bool)
    if self.config.causal:
      mask = np.tril(mask)
    positions = cache.length[:, None] + np.arange(size)
    if window is None:
      return cache_lib.visible(cache, positions, mask)
    if self.config.causal_windows:
      mask = np.tril(mask)
    if self.config.windows_before_block:  # as if all were at its start
      positions = jnp.broadcast_to(positions[:, :1], positions.shape)
      window += 1
    slots = jnp.arange(cache.slots, dtype=positions.dtype)  # equal positions
    slots = jnp.broadcast_to(slots, (len(positions), cache.slots))
    cache = cache.replace(positions=slots)
    return cache_lib.visible(cache, positions, mask, window=window)

  def __call__(self, newest: Array, cache: Cache, put) -> tuple[Array, Cache]:
    """The logits of a block; see `BlockModel.predict`."""
    hidden, cache = self.states(newest, cache, put)
    return self.spread(put(self.logits(hidden), "logits_btv")), cache

  def states(self, newest: Array, cache: Cache, put) -> tuple[Array, Cache]:
    """Runs a block, `i32[B, 1] -> [B, K, H]`, the states before logits.

    Args:
      newest: the newest token.
      cache: has all tokens before it.
      put: as for `read`.
    """
    c, start, size = self.config.layers, cache.length, self.config.block_size
    positions = start[:, None] + np.arange(size)
    rope = c.attention.rope
    assert rope is not None
    rotary = rope.table(positions)
    visible = [self.visible(cache, window) for window in c.windows]
    x = put(self.embed(self.block(newest)), "act_btd")
    kvs = list(pairs(cache))
    for i, layer in enumerate(self.layers):
      own, number = place(i, is_stacked(cache))
      x, kvs[own] = layer(x, rotary, visible[i], kvs[own], start, layer=number)
      x = put(x, "act_btd")
    return self.hidden(x), with_pairs(cache, kvs, put)


def as_block_model(
  module: Parallel, *, sharding: Sharding | None = None
) -> tuple[BlockModel, nnx.State]:
  """Splits a head into pure functions and its parameters.

  Args:
    module: the network, or its shapes (`params.shapes_of`).
    sharding: rules for activations and cache on the mesh in use; None for one
      device.

  Returns:
    The `BlockModel` and the parameters to call it with.
  """
  config, layers = module.config, module.config.layers
  merge, params = split(module)
  put = functools.partial(constrain, sharding=sharding)

  model = BlockModel(
    vocab_size=layers.vocab_size,
    num_features=config.num_features,
    num_depths=config.num_predicted,
    init_cache=functools.partial(init_cache, module, sharding),
    read=lambda params, features, cache: merge(params).read(
      features, cache, put
    ),
    predict=lambda params, newest, cache: merge(params)(newest, cache, put),
    max_positions=layers.max_positions,
  )
  return model, params
