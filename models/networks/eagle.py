"""EAGLE heads: a layer that drafts from features of the target.

EAGLE-1 and 2 (Li et al., ICML and EMNLP 2024) share one network, EAGLE-3
(NeurIPS 2025) has another; their descendants differ in switches. The file has
the configuration, the network, and `as_feature_model`, which makes the pure
functions for `specjax.drafters.eagle`.

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

# Switches of EAGLE-3's descendants, all false by default.
EAGLE3_SWITCHES = (
  "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
  """Shapes and switches of a head.

  Attributes:
    layers: its layers: `embed_dim` is H, `vocab_size` V, and `num_layers` 1,
      except in some of speculators' EAGLE-3 heads. Rotary frequencies are the
      head's own.
    generation: 1 (for EAGLE-1 and 2) or 3.
    num_fused: target layers whose features are concatenated to F channels;
      EAGLE-1 reads only the final hidden state.
    target_dim: width of each feature, if not H.
    draft_vocab_size: size of the draft vocabulary; None for all V.
    fc_bias: whether the input projection has a bias (EAGLE-1).
    norm_before_residual: whether the residual is the normed hidden state.
    norm_before_fc: whether one norm is applied to all features before fusion.
    fc_norm: whether each layer's features have their own norm (EAGLE-3.1).
    norm_output: whether the normed hidden state is fed back (EAGLE-3.1).
    mask_token: id of the mask, for a head that predicts all depths in one pass
      (P-EAGLE); None for others.
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
      raise ValueError("norm_before_fc and fc_norm are mutually exclusive")
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
    """Its kind: "eagle" (1 and 2), "eagle3" or "p_eagle"."""
    if self.mask_token is not None:
      return "p_eagle"
    return "eagle" if self.generation == 1 else "eagle3"

  @property
  def shared(self) -> frozenset[str]:
    """Modules that share the target's arrays."""
    if self.mask_token is not None:  # it has its own embedding
      return frozenset()
    first = self.generation == 1
    return frozenset({"embed", "lm_head"} if first else {"embed"})


def anywhere(x: Array, name: str) -> Array:
  """Returns `x`, whatever its name, in whatever layout it has."""
  del name
  return x


def at(x: Array, places: Array | None) -> Array:
  """`x[B, T, H]` at places `i32[B, W]`, or at all T."""
  if places is None:
    return x
  return jnp.take_along_axis(x, places[..., None], axis=1)


class Eagle(nnx.Module):
  """The network of every generation.

  EAGLE-1 (and EAGLE-2, which drafts trees with it) projects a token's embedding
  and a feature, in this order, to H, then applies one layer without a norm
  before its attention. The output is the next feature, which the target's
  output projection reads without a norm.

  EAGLE-3 and its descendants fuse features of several layers into H. The first
  layer's attention reads the normed embedding and the normed state, further
  layers are Llama's; logits cover the draft vocabulary `target_ids`. P-EAGLE
  (arXiv 2602.01469) has a learned vector for unknown features.
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
      hidden = nnx.initializers.normal(1.0)
      self.mask_hidden = nnx.Param(
        hidden(rngs.params(), (1, 1, features), dtype)
      )
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
    """Fuses features, `[B, T, F] -> [B, T, H]`; EAGLE-1's are unchanged."""
    x, config = features.astype(self.dtype), self.config
    if config.norm_before_fc:
      x = self.input_norm(x)
    if config.fc_norm:
      parts = jnp.split(x, config.num_fused, axis=-1)
      parts = [n(p) for n, p in zip(self.fc_norms, parts, strict=True)]
      x = jnp.concatenate(parts, axis=-1)
    return x if config.generation == 1 else self.fc(x)

  def __call__(
    self, tokens, hidden, rotary, visible, kvs, start, *, stacked=False,
    put=anywhere, logits_at=None,
  ):  # fmt: skip
    """Runs the layers over T tokens.

    Args:
      tokens: `i32[B, T]`.
      hidden: `[B, T, H]`, for each token the state of the one before it.
      rotary, start: as in `models.networks.layers.Attention`.
      visible: its `visible` for every window size of a layer.
      kvs: keys and values of each layer; one pair for all if stacked.
      stacked: see `kvs`.
      put: constrains an array's layout (`models.sharding.constrain`).
      logits_at: `i32[B, W]`, tokens whose logits are needed; None for all.

    Returns:
      Logits `f32[B, T, V]`, or `f32[B, W, V]`; `[B, T, H]` states, and keys and
      values as given.
    """
    config, kvs = self.config, list(kvs)
    visible = [visible[window] for window in config.layers.windows]
    embedded, x = self.embed(tokens), hidden.astype(self.dtype)
    join = lambda x: jnp.concatenate([embedded, x], axis=-1)
    if config.generation == 1:
      read = x = put(self.fc(join(x)), "act_btd")
    else:
      embedded, normed = self.embed_norm(embedded), self.hidden_norm(x)
      read, x = join(normed), normed if config.norm_before_residual else x
    out, kvs[0] = self.attention(
      read, rotary, visible[0], kvs[0], start, layer=place(0, stacked)[1]
    )
    x = x + out
    x = put(x + self.mlp(self.mlp_norm(x)), "act_btd")
    for i, layer in enumerate(self.later, 1):
      own, number = place(i, stacked)
      x, kvs[own] = layer(x, rotary, visible[i], kvs[own], start, layer=number)
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
    module: an `Eagle` or `Mtp`, or its shapes (`params.shapes_of`).
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
