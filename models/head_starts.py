"""Initial weights of heads, copied from the target where they can be.

The target's last layer has already learned to turn features into the next
token's. A head of the target's shapes begins as that layer, reading the feature
in place of the hidden state, with the target's output rows: it needs far less
text than one of random weights. Embedding and, where a head has none of its
own, output projection are the target's arrays.

A head's layer is Llama's or Qwen3's: dense, with norms before its blocks. Of a
described target whose last layer is another, each block that cannot begin as
the target's is random, and adds nothing at first: the MLP where the target has
a mixture of experts, the attention where a share of each head rotates or where
latents are cached, both blocks of Gemma's, OLMo's and gpt-oss's layers.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.formats import dflash_format
from models.networks import eagle
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
  mlp_width,
)
from models.networks.dflash import Parallel, ParallelConfig
from models.networks.eagle import Eagle, Eagle3, EagleConfig
from models.networks.layers import Layer, PlusOneNorm
from models.networks.medusa import (
  Blockwise,
  BlockwiseConfig,
  Medusa,
  MedusaConfig,
)
from models.networks.mixture import Mixture
from models.networks.mtp import Mtp, MtpConfig
from models.networks.rope import Rope
from models.networks.transformer import Features, Transformer


def output_rows(target: Transformer) -> Array:
  """The output projection, `f[V, D]`.

  Raises:
    ValueError: for a target whose logits are more than a projection: heads are
      trained on it.
  """
  if target.config.logit_softcap is not None:
    raise ValueError(
      "heads are trained on plain logits, and those of the target have a soft "
      f"cap, {target.config.logit_softcap}"
    )
  if target.config.tied_embeddings:
    return target.embed.embedding[...]
  return target.lm_head.weight[...]


def fused_layers(num_layers: int, asked: tuple[int, ...]) -> Features:
  """The layers whose inputs EAGLE-3 fuses, lowest first.

  Args:
    num_layers: N, of the target.
    asked: them, or () for EAGLE-3's own: 2, N / 2 and N - 3.

  Raises:
    ValueError: if the target has no such layers, or too few for EAGLE-3's; or
      if they are not in order: servers collect what they read layer by layer.
  """
  layers = asked or tuple(sorted((2, num_layers // 2, num_layers - 3)))
  if layers[0] < 0 or max(layers) >= num_layers or sorted(layers) != [*layers]:
    raise ValueError(
      f"a target of {num_layers} layers cannot be read at layers "
      f"{','.join(map(str, layers))}: give config.head.layers, lowest first"
    )
  return layers


def eagle3(
  target: Transformer,
  *,
  layers: Features,
  draft_vocab: np.ndarray | None,
  mlp_dim: int = 0,
  rngs: nnx.Rngs,
) -> Eagle3:
  """EAGLE-3's head: the last layer, reading the highest of the features.

  Args:
    target: the model that it drafts for.
    layers: whose inputs are fused.
    draft_vocab: ids of the tokens that it can say, rising; None for all.
    mlp_dim: width of the MLP's hidden layer, 0 for the target's. What is wider
      adds nothing at first.
    rngs: for weights that the target does not have: those that read the
      embedding beside the features.

  Raises:
    ValueError: if the MLP is narrower than the target's.
  """
  layer, (attends, feeds) = _layer(target.config), _alike(target.config)
  spec = layer.layers[0]
  known = mlp_width(spec)
  if feeds and mlp_dim and mlp_dim < known:
    raise ValueError(
      f"head.mlp_dim must be {known}, the target's, or more, got {mlp_dim}: a "
      "head begins as the target's last layer"
    )
  mlp = dataclasses.replace(spec.feed_forward, width=mlp_dim or known)
  layer = dataclasses.replace(
    layer, layers=(dataclasses.replace(spec, feed_forward=mlp),)
  )
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
  fc = module.fc.weight
  fc[...] = jnp.zeros_like(fc[...]).at[:, -width:].set(jnp.eye(width))
  for name in ("q", "k", "v") if attends else ():  # embedding, then state
    ours, theirs = (
      getattr(module.attention, name),
      getattr(last.attention, name),
    )
    ours.weight[...] = ours.weight[...].at[:, width:].set(theirs.weight[...])
    if ours.bias is not None:
      ours.bias[...] = theirs.bias[...]
  _copy_rest(module, last, attends, feeds)
  if attends:
    module.hidden_norm.scale[...] = last.attention_norm.scale[...]
  _copy_ends(module, target, draft_vocab)
  return module


def say(
  module: Eagle3 | Parallel | Medusa,
  target: Transformer,
  draft_vocab: np.ndarray,
) -> None:
  """Gives a head another draft vocabulary, in place.

  What it could say before it says as before; other tokens begin with the
  target's rows.

  Args:
    module: the head.
    target: the model that it drafts for.
    draft_vocab: ids of the tokens that it can say from now on, rising.
  """
  config, theirs = module.config, output_rows(target).astype(module.dtype)
  for head in module.heads if isinstance(module, Medusa) else (module,):
    rows = head.lm_head.weight[...]
    if config.draft_vocab_size is not None:
      rows = theirs.at[module.target_ids[...]].set(rows)
    head.lm_head.weight = nnx.Param(rows[draft_vocab])
  size = len(draft_vocab)
  module.config = dataclasses.replace(config, draft_vocab_size=size)
  module.target_ids = nnx.Variable(jnp.asarray(draft_vocab, jnp.int32))


def eagle1(target: Transformer, *, rngs: nnx.Rngs) -> Eagle:
  """EAGLE-1's head: the last layer, reading the final hidden state.

  That state is normed, and what the layer adds to its stream is not: it can be
  hundreds of times as large. So attention and MLP add nothing at first, and the
  head predicts what the target predicted one token before.

  Raises:
    ValueError: if a head cannot have the target's layer.
  """
  layer = _layer(target.config)
  if layer.attention.qk_norm:
    raise ValueError(
      "EAGLE-1's layer has no norms of queries and keys, and the target's has: "
      "no format could hold it"
    )
  attends, feeds = _alike(target.config)
  width = layer.embed_dim
  module = eagle.Eagle(
    EagleConfig(layer=layer, generation=1, num_features=width),
    dtype=target.dtype,
    rngs=rngs,
  )
  last = target.layers[-1]
  # The embedding comes first, then the feature.
  module.fc.weight[...] = (
    module.fc.weight[...].at[:, width:].set(jnp.eye(width))
  )
  for name in ("q", "k", "v") if attends else ():
    ours, theirs = (
      getattr(module.attention, name),
      getattr(last.attention, name),
    )
    ours.weight[...] = theirs.weight[...]
    if ours.bias is not None:
      ours.bias[...] = theirs.bias[...]
  _copy_rest(module, last, attends, feeds)
  for added in (module.attention.out, module.mlp.down):
    _silence(added)
  module.lm_head.weight[...] = output_rows(target)
  module.embed.embedding[...] = target.embed.embedding[...]
  return module


def mtp(target: Transformer, *, rngs: nnx.Rngs) -> Mtp:
  """A head of multi-token prediction: the last layer, reading the final state.

  As EAGLE-1's it says at first what the target said one token before, if less
  or more surely where the state's norm is not the usual one: it is normed
  again.

  Raises:
    ValueError: if a head cannot have the target's layer.
  """
  layer, (attends, feeds) = _layer(target.config), _alike(target.config)
  width = layer.embed_dim
  module = Mtp(
    MtpConfig(layer=layer, num_features=width), dtype=target.dtype, rngs=rngs
  )
  fc, last, head_layer = module.fc.weight, target.layers[-1], module.layer
  fc[...] = jnp.zeros_like(fc[...]).at[:, width:].set(jnp.eye(width))
  for name in ("q", "k", "v") if attends else ():
    _copy(getattr(head_layer.attention, name), getattr(last.attention, name))
  if attends:
    _copy(head_layer.attention_norm, last.attention_norm)
  _copy_rest(head_layer, last, attends, feeds)
  for added in (head_layer.attention.out, head_layer.mlp.down):
    _silence(added)
  usual = jnp.sqrt(jnp.mean(jnp.square(_scale(target.final_norm))))
  module.final_norm.scale[...] = jnp.full(width, usual, module.dtype)
  module.lm_head.weight[...] = output_rows(target)
  module.embed.embedding[...] = target.embed.embedding[...]
  return module


def medusa(
  target: Transformer,
  *,
  num_heads: int,
  draft_vocab: np.ndarray | None = None,
  rngs: nnx.Rngs,
) -> Medusa:
  """Medusa's heads: each is the target's own output at first.

  `draft_vocab` are ids of the tokens that they can say, rising; None for all.
  """
  c = target.config
  module = Medusa(
    MedusaConfig(
      num_heads=num_heads,
      num_layers=1,
      embed_dim=c.embed_dim,
      vocab_size=c.vocab_size,
      draft_vocab_size=None if draft_vocab is None else len(draft_vocab),
    ),
    dtype=target.dtype,
    rngs=rngs,
  )
  rows = _said(module, target, draft_vocab)
  for head in module.heads:
    head.lm_head.weight[...] = rows
  return module


def blockwise(
  target: Transformer, *, num_heads: int, hidden_dim: int, rngs: nnx.Rngs
) -> Blockwise:
  """Blockwise heads: each is the target's own output at first."""
  c = target.config
  module = Blockwise(
    BlockwiseConfig(
      num_heads=num_heads,
      hidden_dim=hidden_dim or c.embed_dim,
      embed_dim=c.embed_dim,
      vocab_size=c.vocab_size,
    ),
    dtype=target.dtype,
    rngs=rngs,
  )
  module.out.weight[...] = jnp.zeros_like(module.out.weight[...])
  module.lm_head.weight[...] = output_rows(target)
  return module


def spread_layers(
  count: int, num_layers: int, asked: tuple[int, ...]
) -> Features:
  """The layers whose inputs DFlash's head fuses, lowest first.

  Args:
    count: of the head's own layers.
    num_layers: N, of the target.
    asked: them, or () for DFlash's own: as many as the head has, spread evenly.

  Raises:
    ValueError: if the target has no such layers, or too few for DFlash's, or
      if they are not in order.
  """
  usual = (i + 1 for i in dflash_format.usual_layers(count, num_layers))
  layers = tuple(asked or usual)
  # The format numbers layers by what they give: the embedding is no layer's.
  rising = sorted({*layers}) == [*layers]
  if layers[0] < 1 or max(layers) >= num_layers or not rising:
    raise ValueError(
      f"a target of {num_layers} layers cannot be read at layers "
      f"{','.join(map(str, layers))}: give config.head.layers, of "
      f"1..{num_layers - 1}, lowest first"
    )
  return layers


def parallel(
  target: Transformer,
  *,
  num_layers: int,
  layers: Features,
  block_size: int,
  mask_token: int,
  draft_vocab: np.ndarray | None,
  rngs: nnx.Rngs,
) -> Parallel:
  """DFlash's head: the last layers, reading the highest of the features.

  Args:
    target: the model that it drafts for.
    num_layers: of the head.
    layers: whose inputs are fused.
    block_size: tokens of a block: the newest, and those that are drafted.
    mask_token: id that marks a token to draft.
    draft_vocab: ids of the tokens that it can say, rising; None for all.
    rngs: for what the target does not have.

  Raises:
    ValueError: for sizes that no head has.
  """
  if not 1 <= num_layers <= target.config.num_layers:
    raise ValueError(
      f"head.num_layers must be in 1..{target.config.num_layers}, got "
      f"{num_layers}"
    )
  like = _layer(target.config)
  spec = LayerSpec(  # Qwen3's, whatever the target's are
    attention=dataclasses.replace(
      like.attention, qk_norm="head", qkv_bias=False, out_bias=False
    ),
    feed_forward=dataclasses.replace(like.layers[0].feed_forward, bias=False),
  )
  of_qwen3 = dataclasses.replace(like, layers=(spec,) * num_layers)
  width = of_qwen3.embed_dim
  module = Parallel(
    ParallelConfig(
      layers=of_qwen3,
      num_features=len(layers) * width,
      block_size=block_size,
      mask_token=mask_token,
      draft_vocab_size=None if draft_vocab is None else len(draft_vocab),
    ),
    dtype=target.dtype,
    rngs=rngs,
  )
  fc = module.fc.weight
  fc[...] = jnp.zeros_like(fc[...]).at[:, -width:].set(jnp.eye(width))
  above = list(target.layers)[-num_layers:]
  first = target.config.num_layers - num_layers
  for index, (ours, theirs) in enumerate(
    zip(module.layers, above, strict=True)
  ):
    attends, feeds = _alike(target.config, first + index)
    for part, names, same in (
      ("attention", ("q", "k", "v", "out"), attends),
      ("mlp", ("gate", "up", "down"), feeds),
    ):
      if not same:
        _silence(getattr(getattr(ours, part), names[-1]))
      for name in names if same else ():
        mine, given = (getattr(getattr(x, part), name) for x in (ours, theirs))
        mine.weight[...] = given.weight[...]
    if not attends:
      continue
    if theirs.attention.spec.qk_norm:
      _copy(ours.attention.q_norm, theirs.attention.q_norm)
      _copy(ours.attention.k_norm, theirs.attention.k_norm)
    _copy(ours.attention_norm, theirs.attention_norm)
    _copy(ours.mlp_norm, theirs.mlp_norm)
  if attends:
    _copy(module.hidden_norm, above[-1].attention_norm)
  _copy_ends(module, target, draft_vocab)
  return module


def _layer(c: TransformerConfig) -> TransformerConfig:
  """The configuration of a layer like the target's last one.

  It is that layer, or of what a head's layers cannot be the usual: then it has
  the heads, the width (of the experts of a token together) and the rotary base.

  Raises:
    ValueError: if heads cannot have such a layer.
  """
  last, a = c.layers[-1], c.layers[-1].attention
  if not isinstance(a, AttentionSpec):
    raise ValueError("a head's layers attend, and the target's last does not")
  rope = a.rope
  if rope is None:
    raise ValueError("a head's layers rotate, and the target's last does not")
  if c.norm == "layer":
    raise ValueError("a head's norms are no layer norms, as the target's are")
  attends, feeds = _alike(c)
  if attends:
    attention = dataclasses.replace(a, window=None, scale=None)
  else:
    size = a.head_dim if a.latent is None else a.latent.value_dim
    attention = AttentionSpec(
      num_heads=a.num_heads,
      num_kv_heads=a.num_kv_heads,
      head_dim=size,
      rope=Rope(theta=rope.theta, dim=size, scaling=rope.scaling),
    )
  mlp = DenseSpec(width=_width(last.feed_forward))
  if feeds and isinstance(last.feed_forward, DenseSpec):
    mlp = last.feed_forward
  return TransformerConfig(
    vocab_size=c.vocab_size,
    embed_dim=c.embed_dim,
    layers=(LayerSpec(attention=attention, feed_forward=mlp),),
    max_positions=c.max_positions,
    norm_eps=c.norm_eps,
  )


def _width(block: DenseSpec | Mixture) -> int:
  """Width of the hidden layer, or of the experts of a token together."""
  if isinstance(block, DenseSpec):
    return block.width
  return block.num_chosen * block.expert_dim + block.shared_dim


# What a head's attention takes of the target's last layer, or does not look at.
_READ = (
  "num_heads", "num_kv_heads", "head_dim", "rope", "scale", "qk_norm",
  "window", "qkv_bias", "out_bias",
)  # fmt: skip


def _alike(c: TransformerConfig, index: int = -1) -> tuple[bool, bool]:
  """True for attention, and for the MLP, if they can begin as a layer's.

  Its layers have the sizes and the rotation of the target's last.
  """
  layer, last = c.layers[index], c.layers[-1]
  block = layer.feed_forward
  if layer.norms != "pre" or layer.parallel or c.norm != "rms" or layer.scaled:
    return False, False
  return (
    _attends_alike(layer.attention, last.attention),
    isinstance(block, DenseSpec)
    and block
    == dataclasses.replace(
      DenseSpec(width=_width(last.feed_forward)), bias=block.bias
    ),
  )


def _attends_alike(
  a: AttentionSpec | DeltaSpec, last: AttentionSpec | DeltaSpec
) -> bool:
  if not isinstance(a, AttentionSpec) or not isinstance(last, AttentionSpec):
    return False
  of = lambda spec: (
    spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rope,
  )  # fmt: skip
  rope, plain = a.rope, AttentionSpec(**{k: getattr(a, k) for k in _READ})
  usual = a.scale is None or math.isclose(a.scale, a.head_dim**-0.5)
  return (
    usual and a == plain and of(a) == of(last) and a.qk_norm != "width"
    and rope is not None and rope.dim == a.head_dim and rope.scale == 1
    and len({*(rope.factors or ())}) < 2
  )  # fmt: skip


def _silence(added: nnx.Module) -> None:
  """Sets a projection to 0, so that it adds nothing to the stream."""
  nnx.update(added, jax.tree.map(jnp.zeros_like, nnx.state(added)))


def _scale(norm: nnx.Module) -> Array:
  """The factors that a norm multiplies by."""
  scale = norm.scale[...]
  return 1 + scale if isinstance(norm, PlusOneNorm) else scale


def _said(module, target: Transformer, draft_vocab) -> Array:
  """The output rows of the tokens that a head can say, which it notes."""
  rows = output_rows(target)
  if draft_vocab is None:
    return rows
  module.target_ids = nnx.Variable(jnp.asarray(draft_vocab, jnp.int32))
  return rows[draft_vocab]


def _copy_ends(module, target: Transformer, draft_vocab) -> None:
  """Copies final norm, output projection and embeddings."""
  module.final_norm.scale[...] = _scale(target.final_norm)
  module.lm_head.weight[...] = _said(module, target, draft_vocab)
  module.embed.embedding[...] = target.embed.embedding[...]


def _copy_rest(
  module: Eagle | Eagle3 | Layer, last, attends: bool, feeds: bool
) -> None:
  """Copies the weights that a head's layer shares with the target's."""
  if attends:
    _copy(module.attention.out, last.attention.out)
    if last.attention.spec.qk_norm:
      _copy(module.attention.q_norm, last.attention.q_norm)
      _copy(module.attention.k_norm, last.attention.k_norm)
    _copy(module.mlp_norm, last.mlp_norm)
  else:
    _silence(module.attention.out)
  if not feeds:
    _silence(module.mlp.down)
    return
  known = last.mlp.spec.width
  for name in ("gate", "up"):
    ours, theirs = getattr(module.mlp, name), getattr(last.mlp, name)
    ours.weight[...] = ours.weight[...].at[:known].set(theirs.weight[...])
    if ours.bias is not None:
      ours.bias[...] = ours.bias[...].at[:known].set(theirs.bias[...])
  ours, theirs = module.mlp.down, last.mlp.down
  ours.weight[...] = (
    jnp.zeros_like(ours.weight[...]).at[:, :known].set(theirs.weight[...])
  )
  if ours.bias is not None:
    ours.bias[...] = theirs.bias[...]


def _copy(ours: nnx.Module, theirs: nnx.Module) -> None:
  nnx.update(ours, nnx.state(theirs))
