"""What a head is before it is trained: made of the target that it drafts for.

The target's last layer has already learned to turn features into the next
token's. A head of the target's shapes begins as that layer, reading the feature
where it has one, with the target's output rows: it needs far less text than one
of random weights. Embedding and, where a head has none of its own, output
projection are the target's arrays.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models import eagle, heads
from models.eagle import Eagle, Eagle3, EagleConfig
from models.heads import Blockwise, BlockwiseConfig, Medusa, MedusaConfig
from models.layers import TransformerConfig
from models.transformer import FINAL, Features, Transformer


def output_rows(target: Transformer) -> Array:
  """The output projection, `f[D, V]`."""
  if target.config.tied_embeddings:
    return target.embed.embedding[...].T
  return target.lm_head.kernel[...]


def fused_layers(num_layers: int, asked: tuple[int, ...]) -> Features:
  """The layers whose inputs EAGLE-3 fuses, lowest first.

  Args:
    num_layers: N, of the target.
    asked: them, or () for EAGLE-3's own: 2, N / 2 and N - 3.

  Raises:
    ValueError: if the target has no such layers, or too few for EAGLE-3's.
  """
  found = asked or (2, num_layers // 2, num_layers - 3)
  if min(found) < 0 or max(found) >= num_layers:
    raise ValueError(
      f"a target of {num_layers} layers cannot be read at layers "
      f"{','.join(map(str, found))}: give config.head.layers"
    )
  return tuple(found)


def eagle3(
  target: Transformer,
  *,
  layers: Features,
  draft_vocab: np.ndarray | None,
  rngs: nnx.Rngs,
) -> Eagle3:
  """EAGLE-3's head: the last layer, reading the highest of the features.

  Args:
    target: the model that it drafts for.
    layers: whose inputs are fused.
    draft_vocab: ids of the tokens that it can say, rising; None for all.
    rngs: for what the target does not have: what reads the embedding beside
      the features.
  """
  layer = _layer(target.config)
  width = layer.embed_dim
  words = None if draft_vocab is None else len(draft_vocab)
  module = eagle.Eagle3(
    EagleConfig(
      layer=layer,
      generation=3,
      num_features=len(layers) * width,
      num_fused=len(layers),
      draft_vocab_size=words,
    ),
    dtype=target.dtype,
    rngs=rngs,
  )
  last = target.layers[-1]
  # Of features next to each other, the last is the highest layer's: it is read
  # alone at first. What others are can be hundreds of times as large.
  fc = module.fc.kernel
  fc[...] = jnp.zeros_like(fc[...]).at[-width:].set(jnp.eye(width))
  for name in ("q", "k", "v"):  # embedding first, then the state
    ours, theirs = (
      getattr(module.attention, name),
      getattr(last.attention, name),
    )
    ours.kernel[...] = ours.kernel[...].at[width:].set(theirs.kernel[...])
    if ours.bias is not None:
      ours.bias[...] = theirs.bias[...]
  _copy_rest(module, last)
  module.hidden_norm.scale[...] = last.attention_norm.scale[...]
  module.final_norm.scale[...] = target.final_norm.scale[...]
  rows = output_rows(target)
  if draft_vocab is not None:
    rows = rows[:, draft_vocab]
    module.target_ids = nnx.Variable(jnp.asarray(draft_vocab, jnp.int32))
  module.lm_head.kernel[...] = rows
  module.embed.embedding[...] = target.embed.embedding[...]
  return module


def eagle1(target: Transformer, *, rngs: nnx.Rngs) -> Eagle:
  """EAGLE-1's head: the last layer, reading the final hidden state."""
  layer = _layer(target.config)
  width = layer.embed_dim
  module = eagle.Eagle(
    EagleConfig(layer=layer, generation=1, num_features=width),
    dtype=target.dtype,
    rngs=rngs,
  )
  last = target.layers[-1]
  # The embedding comes first, then the feature.
  module.fc.kernel[...] = module.fc.kernel[...].at[width:].set(jnp.eye(width))
  for name in ("q", "k", "v"):
    ours, theirs = (
      getattr(module.attention, name),
      getattr(last.attention, name),
    )
    ours.kernel[...] = theirs.kernel[...]
    if ours.bias is not None:
      ours.bias[...] = theirs.bias[...]
  _copy_rest(module, last)
  module.lm_head.kernel[...] = output_rows(target)
  module.embed.embedding[...] = target.embed.embedding[...]
  return module


def medusa(target: Transformer, *, num_heads: int, rngs: nnx.Rngs) -> Medusa:
  """Medusa's heads: each is the target's own output at first."""
  c = target.config
  module = heads.Medusa(
    MedusaConfig(
      num_heads=num_heads,
      num_layers=1,
      embed_dim=c.embed_dim,
      vocab_size=c.vocab_size,
    ),
    dtype=target.dtype,
    rngs=rngs,
  )
  for head in module.heads:
    head.lm_head.kernel[...] = output_rows(target)
  return module


def blockwise(
  target: Transformer, *, num_heads: int, hidden_dim: int, rngs: nnx.Rngs
) -> Blockwise:
  """Blockwise heads: each is the target's own output at first."""
  c = target.config
  module = heads.Blockwise(
    BlockwiseConfig(
      num_heads=num_heads,
      hidden_dim=hidden_dim or c.embed_dim,
      embed_dim=c.embed_dim,
      vocab_size=c.vocab_size,
    ),
    dtype=target.dtype,
    rngs=rngs,
  )
  module.out.kernel[...] = jnp.zeros_like(module.out.kernel[...])
  module.lm_head.kernel[...] = output_rows(target)
  return module


def features_of(module, layers: Features) -> Features:
  """What a head reads of the target."""
  return layers if isinstance(module, Eagle3) else (FINAL,)


def _layer(c: TransformerConfig) -> TransformerConfig:
  """The configuration of a layer like the target's last one.

  Raises:
    ValueError: if heads cannot have such a layer.
  """
  if c.norm != "rms" or not c.gated_mlp or c.learned_positions:
    raise ValueError(
      "EAGLE's heads are Llama layers, and the target's are not: its norm is "
      f"{c.norm!r}, gated_mlp {c.gated_mlp}, learned_positions "
      f"{c.learned_positions}"
    )
  fields = dict(vars(c), num_layers=1, tied_embeddings=False, windows=None)
  return TransformerConfig(**fields)


def _copy_rest(module: Eagle | Eagle3, last) -> None:
  """Copies what the layer of a head has as the target's layers have it."""
  _copy(module.attention.out, last.attention.out)
  if last.config.qk_norm:
    _copy(module.attention.q_norm, last.attention.q_norm)
    _copy(module.attention.k_norm, last.attention.k_norm)
  _copy(module.mlp, last.mlp)
  _copy(module.mlp_norm, last.mlp_norm)


def _copy(ours: nnx.Module, theirs: nnx.Module) -> None:
  nnx.update(ours, nnx.state(theirs))
