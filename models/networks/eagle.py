"""EAGLE's heads: a layer that reads features of the target and drafts.

EAGLE-1 and 2 (Li et al., ICML and EMNLP 2024) share one network, EAGLE-3
(NeurIPS 2025) another; their descendants differ in switches. The file reads
top to bottom: configuration, network, and `as_feature_model`, which turns it
into the pure functions that `specjax.drafters.eagle` drafts with.

Letters in shapes: B rows, T fed tokens, H the head's width, F width of all
features that it reads, V target vocabulary.
"""

import dataclasses
import functools
from typing import Any

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
  pairs,
  place,
  with_pairs,
)
from models.networks.layers import (
  Attention,
  Layer,
  Linear,
  Mlp,
  TransformerConfig,
  make_norm,
)
from models.networks.params import split
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax.types import FeatureModel

# Of EAGLE-3's descendants, all false by default.
EAGLE3_SWITCHES = (
  "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
  """Shapes and switches of a head.

  Attributes:
    layers: of its layers: `embed_dim` is H, `vocab_size` V, and `num_layers` 1
      but in some of speculators' EAGLE-3 heads. Rotary frequencies are the
      head's own, whatever the target's are.
    generation: 1 (of EAGLE-1 and 2) or 3.
    num_fused: layers of the target whose features, next to each other, are F
      channels; EAGLE-1 reads the final hidden state alone.
    target_dim: width of each of them, if it is not H.
    draft_vocab_size: tokens that it can say; None for all V.
    fc_bias: of the projection of what is read (EAGLE-1).
    norm_before_residual: the residual is the normed hidden state.
    norm_before_fc: one norm over all features before they are fused.
    fc_norm: a norm for the features of each fused layer (EAGLE-3.1).
    norm_output: what is fed back is the normed hidden state (EAGLE-3.1).
    mask_token: id that stands for a token not known, of a head that predicts
      all depths in one pass (P-EAGLE); None for the others.
  """

  layers: TransformerConfig
  generation: int = 1
  num_fused: int = 1
  target_dim: int | None = None
  draft_vocab_size: int | None = None
  fc_bias: bool = False
  norm_before_residual: bool = False
  norm_before_fc: bool = False
  fc_norm: bool = False
  norm_output: bool = False
  mask_token: int | None = None

  def __post_init__(self):
    if self.norm_before_fc and self.fc_norm:
      raise ValueError("norm_before_fc and fc_norm exclude each other")
    most = self.layers.vocab_size
    if self.mask_token is not None and not 0 <= self.mask_token < most:
      raise ValueError(
        f"mask_token must be in 0..{most - 1}, got {self.mask_token}"
      )

  @property
  def num_features(self) -> int:
    """F, width of the target's features that it reads."""
    return self.num_fused * (self.target_dim or self.layers.embed_dim)

  @property
  def kind(self) -> str:
    """That of EAGLE-1 and 2, of EAGLE-3, or of P-EAGLE."""
    if self.mask_token is not None:
      return "p_eagle"
    return "eagle" if self.generation == 1 else "eagle3"

  @property
  def shared(self) -> frozenset[str]:
    """Modules whose arrays are the target's."""
    if self.mask_token is not None:  # it has an embedding of its own
      return frozenset()
    first = self.generation == 1
    return frozenset({"embed", "lm_head"} if first else {"embed"})


def anywhere(x: Array, name: str) -> Array:
  """`x`, of whatever name, wherever it lies."""
  del name
  return x


def at(x: Array, places: Array | None) -> Array:
  """`x[B, T, H]` at places `i32[B, W]`, or at all T."""
  if places is None:
    return x
  return jnp.take_along_axis(x, places[..., None], axis=1)


class Eagle(nnx.Module):
  """The network of every generation.

  In EAGLE-1's, which EAGLE-2 drafts trees with, a token's embedding and a
  feature, in this order, are projected to H and go through one layer without a
  norm before its attention. Its output is the next feature, and the target's
  output projection reads it as it is.

  In EAGLE-3's and its descendants' features of several layers are fused to H.
  The first layer's attention reads the normed embedding beside the normed
  state, layers after it are a Llama's; logits are of a vocabulary of its own,
  `target_ids`, and all other tokens have none. P-EAGLE's (arXiv 2602.01469) has
  a vector that stands for features that are not known.
  """

  def __init__(self, config: EagleConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
    c, width, features = (
      config.layers,
      config.layers.embed_dim,
      config.num_features,
    )
    first = config.generation == 1
    self.config = config
    self.dtype = jnp.dtype(dtype)
    norm = lambda dim=width: make_norm(c, dim, dtype, rngs)
    self.embed = embedding(c.vocab_size, width, dtype, rngs)
    if config.norm_before_fc:
      self.input_norm = norm(features)
    if config.fc_norm:
      each = features // config.num_fused
      self.fc_norms = nnx.List([norm(each) for _ in range(config.num_fused)])
    read = 2 * width if first else features
    self.fc = Linear(read, width, config.fc_bias, dtype, rngs)
    if config.mask_token is not None:
      hidden = rngs.params.normal((1, 1, features), dtype)
      self.mask_hidden = nnx.Param(hidden)
    if not first:
      self.embed_norm, self.hidden_norm = norm(), norm()
      self.final_norm = norm()
    read = width if first else 2 * width
    self.attention = Attention(c, dtype, input_dim=read, rngs=rngs)
    self.mlp_norm = norm()
    self.mlp = Mlp(c, dtype, rngs=rngs)
    more = range(c.num_layers - 1)
    self.later = nnx.List([Layer(c, dtype, rngs=rngs) for _ in more])
    words = config.draft_vocab_size or c.vocab_size
    self.lm_head = Linear(width, words, False, dtype, rngs)
    if config.draft_vocab_size is not None:
      self.target_ids = first_ids(words)

  def fuse(self, features: Array) -> Array:
    """`[B, T, F] -> [B, T, H]`, what stands beside a token; EAGLE-1's as is."""
    x, config = features.astype(self.dtype), self.config
    if config.norm_before_fc:
      x = self.input_norm(x)
    if config.fc_norm:
      parts = jnp.split(x, config.num_fused, axis=-1)
      parts = [n(p) for n, p in zip(self.fc_norms, parts, strict=True)]
      x = jnp.concatenate(parts, axis=-1)
    return x if config.generation == 1 else self.fc(x)

  def __call__(
    self, tokens, hidden, rotary, sees, kvs, start, *, stacked=False,
    put=anywhere, logits_at=None,
  ):  # fmt: skip
    """Runs the layers over T tokens.

    Args:
      tokens: `i32[B, T]`.
      hidden: `[B, T, H]`, beside each token the state of the one before it.
      rotary, start: as `models.networks.layers.Attention`.
      sees: its `sees` for every window size that some layer has.
      kvs: the keys and values of each layer; if stacked, one pair of all.
      stacked: see `kvs`.
      put: lays an array out (`models.sharding.constrain`).
      logits_at: `i32[B, W]`, tokens whose logits are wanted; None for all.

    Returns:
      Logits `f32[B, T, V]`, or `f32[B, W, V]`; `[B, T, H]` states, and keys and
      values as given.
    """
    config, kvs = self.config, list(kvs)
    sees = [sees[window] for window in config.layers.windows]
    embedded, x = self.embed(tokens), hidden.astype(self.dtype)
    join = lambda x: jnp.concatenate([embedded, x], axis=-1)
    if config.generation == 1:
      read = x = put(self.fc(join(x)), "act_btd")
    else:
      embedded, normed = self.embed_norm(embedded), self.hidden_norm(x)
      read, x = join(normed), normed if config.norm_before_residual else x
    out, kvs[0] = self.attention(
      read, rotary, sees[0], kvs[0], start, layer=place(0, stacked)[1]
    )
    x = x + out
    x = put(x + self.mlp(self.mlp_norm(x)), "act_btd")
    for i, layer in enumerate(self.later, 1):
      own, number = place(i, stacked)
      x, kvs[own] = layer(x, rotary, sees[i], kvs[own], start, layer=number)
      x = put(x, "act_btd")
    read = x if config.generation == 1 else self.final_norm(x)
    logits = self.lm_head(at(read, logits_at)).astype(jnp.float32)
    logits = put(logits, "logits_btv")
    if config.draft_vocab_size is not None:
      logits = draft_vocabulary.spread(
        logits, self.target_ids[...], config.layers.vocab_size
      )
    return logits, read if config.norm_output else x, tuple(kvs)


def as_feature_model(
  module: Any, *, sharding: Sharding | None = None
) -> tuple[FeatureModel, nnx.State]:
  """Splits a head into pure functions and its parameters.

  Args:
    module: an `Eagle` or `Mtp`, or its shapes (`nnx.eval_shape`).
    sharding: where activations and cache lie on the mesh in use; None for one
      device.

  Returns:
    The `FeatureModel` and the parameters to call it with.
  """
  config, layer = module.config, module.config.layers
  merge, params = split(module)
  put = functools.partial(constrain, sharding=sharding)
  stacked = sharding is not None  # as the target's cache is on a mesh
  windows, rope = {*layer.windows}, layer.attention.rope
  assert rope is not None

  def fuse(params, features):
    return put(merge(params).fuse(features), "act_btd")

  def apply(
    params, tokens, hidden, cache, *, positions=None, mask=None, **more
  ):
    fed, start = tokens.shape[1], cache.length
    if positions is None:
      positions = start[:, None] + np.arange(fed)
    cache = cache_lib.write_positions(cache, positions)
    logits, hidden, kvs = merge(params)(
      tokens,
      hidden,
      rope.table(positions),
      {w: cache_lib.visible(cache, positions, mask, window=w) for w in windows},
      pairs(cache),
      start,
      stacked=stacked,
      put=put,
      **more,
    )
    return (
      logits,
      hidden,
      with_pairs(cache.replace(length=start + fed), kvs, put),
    )

  mask = None
  if getattr(config, "mask_token", None) is not None:
    mask = lambda params: (
      config.mask_token,
      merge(params).mask_hidden[...][0, 0],
    )
  model = FeatureModel(
    vocab_size=layer.vocab_size,
    num_features=config.num_features,
    init_cache=functools.partial(
      init_cache, module, sharding, with_positions=any(windows)
    ),
    fuse=fuse,
    apply=apply,
    max_positions=layer.max_positions,
    mask=mask,
  )
  later = (
    dataclasses.replace(model, apply=functools.partial(apply, depth=depth))
    for depth in range(1, getattr(config, "num_depths", 1))
  )
  return dataclasses.replace(model, later=tuple(later)), params
