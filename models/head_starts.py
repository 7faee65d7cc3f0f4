"""Initial weights of heads, copied from the target where they can be.

The target's last layer has already learned to turn features into the next
token's. A head of the target's shapes begins as that layer, reading the feature
in place of the hidden state, with the target's output rows: it needs far less
text than one of random weights. Embedding and, where a head has none of its
own, output projection are the target's arrays.

A head's layer is Llama's or Qwen3's: dense, with norms before its blocks. A
block that cannot begin as the target's is random and adds nothing at first: the
MLP where the target has a mixture of experts, the attention where a share of
each head rotates or where latents are cached, both blocks of Gemma's, OLMo's
and gpt-oss's layers.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.networks.description import (
  AttentionSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.dflash import Parallel, ParallelConfig
from models.networks.dspark import DSpark, DSparkConfig
from models.networks.eagle import Eagle, EagleConfig
from models.networks.layers import Layer, PlusOneNorm
from models.networks.medusa import Medusa, MedusaConfig
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


def check_layers(layers: Features, num_layers: int, *, first: int) -> Features:
  """The layers whose inputs a head is to read, which a target has.

  Raises:
    ValueError: for others than `first .. num_layers - 1`, or that do not rise:
      servers collect what they read layer by layer.
  """
  if [*layers] != sorted({*range(first, num_layers)} & {*layers}):
    raise ValueError(
      f"a target of {num_layers} layers cannot be read at layers "
      f"{','.join(map(str, layers))}: give config.head.layers, of "
      f"{first}..{num_layers - 1}, lowest first"
    )
  return layers


def eagle3(
  target: Transformer,
  *,
  layers: Features,
  draft_vocab: np.ndarray | None,
  mlp_dim: int = 0,
  rngs: nnx.Rngs,
) -> Eagle:
  """EAGLE-3's head: the last layer, reading the highest of the features.

  Args:
    target: the model that it drafts for.
    layers: whose inputs are fused.
    draft_vocab: ids of the tokens that it can draft, rising; None for all.
    mlp_dim: width of the MLP's hidden layer, 0 for the target's. What is wider
      adds nothing at first, and all of a narrower one.
    rngs: for weights that the target does not have.
  """
  config = EagleConfig(
    layers=_layers(target.config, mlp_dim=mlp_dim),
    generation=3,
    num_fused=len(layers),
    draft_vocab_size=None if draft_vocab is None else len(draft_vocab),
  )
  module = Eagle(config, dtype=target.dtype, rngs=rngs)
  # Of features next to each other, the last is the highest layer's: it is read
  # alone at first. What others are can be hundreds of times as large.
  _read_last(module.fc)
  copy_layer(module, target.layers[-1], target)  # reads embedding, then state
  _copy_norms(module, target)
  _copy_ends(module, target, draft_vocab)
  return module


def eagle1(target: Transformer, *, rngs: nnx.Rngs) -> Eagle:
  """EAGLE-1's head: the last layer, reading the final hidden state.

  That state is normed, and what the layer adds to its stream is not: it can be
  hundreds of times as large. So attention and MLP add nothing at first, and the
  head predicts what the target predicted one token before. It has no norms of
  queries and keys: no format could hold them.
  """
  config = EagleConfig(layers=_layers(target.config, qk_norm=None))
  module = Eagle(config, dtype=target.dtype, rngs=rngs)
  # The embedding comes first, then the feature.
  width, fc = target.config.embed_dim, module.fc.weight
  fc[...] = fc[...].at[:, width:].set(jnp.eye(width))
  copy_layer(module, target.layers[-1], target)
  _silence(module.attention.out)
  _silence(module.mlp.down)
  _copy_ends(module, target)
  return module


def mtp(target: Transformer, *, rngs: nnx.Rngs) -> Mtp:
  """A head of multi-token prediction: the last layer, reading the final state.

  As EAGLE-1's it predicts at first what the target predicted one token before,
  if less or more surely where the state's norm is not the usual one: it is
  normed again.
  """
  config = MtpConfig(layers=_layers(target.config))
  module = Mtp(config, dtype=target.dtype, rngs=rngs)
  _read_last(module.fc)
  copy_layer(module.layer, target.layers[-1], target)
  _silence(module.layer.attention.out)
  _silence(module.layer.mlp.down)
  usual = jnp.sqrt(jnp.mean(jnp.square(_scale(target.final_norm))))
  module.final_norm.scale[...] = jnp.full_like(module.final_norm.scale, usual)
  _copy_ends(module, target)
  return module


def medusa(
  target: Transformer,
  *,
  num_heads: int,
  rngs: nnx.Rngs,
) -> Medusa:
  """Medusa's heads: each is the target's own output at first."""
  config = MedusaConfig(
    num_heads=num_heads,
    num_layers=1,
    embed_dim=target.config.embed_dim,
    vocab_size=target.config.vocab_size,
  )
  module = Medusa(config, dtype=target.dtype, rngs=rngs)
  rows = output_rows(target)
  for head in module.heads:
    head.lm_head.weight[...] = rows
  return module


def parallel(
  target: Transformer,
  *,
  num_layers: int,
  layers: Features,
  block_size: int,
  mask_token: int,
  draft_vocab: np.ndarray | None,
  rngs: nnx.Rngs,
  kind: type[Parallel] = Parallel,
  **more: Any,
) -> Parallel:
  """DFlash's head: the last layers, reading the highest of the features.

  Args:
    target: the model that it drafts for.
    num_layers: of the head.
    layers: whose inputs are fused.
    block_size: tokens of a block: the newest, and those that are drafted.
    mask_token: id that marks a token to draft.
    draft_vocab: ids of the tokens that it can draft, rising; None for all.
    rngs: for what the target does not have.
    kind: of the network; DSpark's begins without a bias of the token before.
    **more: further fields of its configuration.

  Raises:
    ValueError: for more layers than the target has.
  """
  if not 1 <= num_layers <= target.config.num_layers:
    raise ValueError(
      f"head.num_layers must be in 1..{target.config.num_layers}, got "
      f"{num_layers}"
    )
  make = DSparkConfig if kind is DSpark else ParallelConfig
  config = make(
    layers=_layers(  # Qwen3's, whatever the target's are
      target.config, num_layers, mlp_bias=False,
      qk_norm="head", qkv_bias=False, out_bias=False,
    ),
    num_fused=len(layers),
    block_size=block_size,
    mask_token=mask_token,
    draft_vocab_size=None if draft_vocab is None else len(draft_vocab),
    **more,
  )  # fmt: skip
  module = kind(config, dtype=target.dtype, rngs=rngs)
  if isinstance(module, DSpark):
    bias = module.markov_head.markov_w2.weight
    bias[...] = jnp.zeros_like(bias[...])
  _read_last(module.fc)
  above = list(target.layers)[-num_layers:]
  for ours, theirs in zip(module.layers, above, strict=True):
    copy_layer(ours, theirs, target)
  _copy_norms(module, target)
  _copy_ends(module, target, draft_vocab)
  return module


# ------------------------------------------------------------------- the layer


def copy_layer(ours: Any, theirs: Layer, target: Transformer) -> None:
  """Copies what a head's layer can begin as; the rest adds nothing at first.

  A block like the target's has its parameters. Where ours is larger, as of
  queries that read the embedding too, theirs come last along each axis. The
  last projection of a block unlike the target's is zero.

  Args:
    ours: a module with `attention` and `mlp`, and perhaps norms before them.
    theirs: a layer of the target.
    target: the target.
  """
  copied = set()
  if _has_usual_norms(theirs.spec, target.config):
    copied = {"attention_norm", "mlp_norm"}
    if _is_alike(ours.attention.spec, theirs.spec.attention):
      copied.add("attention")
    if _is_alike(ours.mlp.spec, theirs.spec.feed_forward):
      copied.add("mlp")
  _silence(ours.attention.out)
  _silence(ours.mlp.down)  # as what a wider one has besides
  given = dict(nnx.to_flat_state(nnx.state(theirs, nnx.Param)))
  state = nnx.state(ours, nnx.Param)
  for key, variable in nnx.to_flat_state(state):
    if key[0] in copied and key in given:
      array, mine = given[key][...], variable[...]
      corner = tuple(slice(-size, None) for size in array.shape)
      variable[...] = mine.at[corner].set(array)
  nnx.update(ours, state)


def _has_usual_norms(layer: LayerSpec, target: TransformerConfig) -> bool:
  """True if norms stand and multiply as those of a head's layer."""
  return (
    layer.norms == "pre" and not layer.parallel and not layer.scaled
    and target.norm == "rms"
  )  # fmt: skip


def _is_alike(ours: Any, theirs: Any) -> bool:
  """True if a block differs in what may be added or left out at most.

  These are windows, biases, norms of heads, and a wider MLP's channels.
  """
  free = ("window", "scale", "qk_norm", "qkv_bias", "out_bias", "width", "bias")
  own = {k: getattr(ours, k) for k in free if hasattr(ours, k)}
  if (
    type(ours) is not type(theirs) or dataclasses.replace(theirs, **own) != ours
  ):
    return False
  if isinstance(theirs, DenseSpec):
    return theirs.width <= ours.width
  usual = theirs.head_dim**-0.5
  return theirs.qk_norm != "width" and math.isclose(
    theirs.scale or usual, usual
  )


def _layers(
  target: TransformerConfig,
  count: int = 1,
  *,
  mlp_dim: int = 0,
  mlp_bias: bool | None = None,
  **attention,
) -> TransformerConfig:
  """A head's layers, all like the target's last one.

  They have that one's heads, the width (of the experts of a token together) and
  the rotation, as far as a head's files can say it.

  Raises:
    ValueError: for a target with layer norms, or whose last layer does not
      attend, or does not rotate.
  """
  if target.norm == "layer":
    raise ValueError("a head has RMS norms, and the target layer norms")
  a, block = target.layers[-1].attention, target.layers[-1].feed_forward
  if not isinstance(a, AttentionSpec) or a.rope is None:
    raise ValueError(
      "a head's layers attend and rotate, and the target's last does not"
    )
  size = a.head_dim if a.latent is None else a.latent.value_dim
  rope, one = a.rope, len({*(a.rope.factors or (1,))}) == 1
  if rope.dim != size or rope.scale != 1 or not one:
    rope = Rope(theta=rope.theta, dim=size, scaling=rope.scaling)
  spec = AttentionSpec(
    num_heads=a.num_heads,
    num_kv_heads=a.num_kv_heads,
    head_dim=size,
    rope=rope,
    qk_norm="head" if a.qk_norm == "head" else None,
    qkv_bias=a.qkv_bias,
    out_bias=a.out_bias,
  )
  if isinstance(block, DenseSpec):
    width, bias = block.width, block.bias
  else:
    width = block.num_chosen * block.expert_dim + block.shared_dim
    bias = False
  layer = LayerSpec(
    attention=dataclasses.replace(spec, **attention),
    feed_forward=DenseSpec(
      width=mlp_dim or width, bias=bias if mlp_bias is None else mlp_bias
    ),
  )
  return TransformerConfig(
    layers=(layer,) * count,
    vocab_size=target.vocab_size,
    embed_dim=target.embed_dim,
    max_positions=target.max_positions,
    norm_eps=target.norm_eps,
  )


def _read_last(fc: Any) -> None:
  """Makes a projection give the last of what it reads, as it is."""
  width = fc.weight.shape[0]
  zero = jnp.zeros_like(fc.weight)
  fc.weight[...] = zero.at[:, -width:].set(jnp.eye(width))


def _silence(added: nnx.Module) -> None:
  """Sets a projection to 0, so that it adds nothing to the stream."""
  nnx.update(added, jax.tree.map(jnp.zeros_like, nnx.state(added)))


def _scale(norm: nnx.Module) -> Array:
  """The factors that a norm multiplies by."""
  scale = norm.scale[...]
  return 1 + scale if isinstance(norm, PlusOneNorm) else scale


def _copy_norms(module, target: Transformer) -> None:
  """Copies the norms of what is fused and of the output."""
  last = target.layers[-1]
  if _has_usual_norms(last.spec, target.config):
    nnx.update(module.hidden_norm, nnx.state(last.attention_norm))
  module.final_norm.scale[...] = _scale(target.final_norm)


def _copy_ends(module, target: Transformer, draft_vocab=None) -> None:
  """Copies output projection, of the tokens it can draft, and embeddings."""
  rows = output_rows(target)
  if draft_vocab is not None:
    module.target_ids = nnx.Variable(jnp.asarray(draft_vocab, jnp.int32))
    rows = rows[draft_vocab]
  module.lm_head.weight[...] = rows
  module.embed.embedding[...] = target.embed.embedding[...]
