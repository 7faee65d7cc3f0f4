"""Initial weights of heads, copied from the target where possible.

The target's last layer has already learned to turn features into the next
token's. A head with the target's shapes starts as that layer, reading the
feature instead of the hidden state, with the target's output projection; it
needs far less text than with random weights. Embedding and, unless the head has
its own, output projection are shared with the target.

A head's layer is Llama's or Qwen3's: dense, with norms before its blocks. A
block that cannot be copied is random, with a zero output projection: the MLP if
the target has a mixture of experts, attention with partial rotary embeddings or
latents, and both blocks for Gemma, OLMo and gpt-oss.
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
from models.networks.dflash2 import DFlash2, DFlash2Config
from models.networks.dspark import DSpark, DSparkConfig
from models.networks.eagle import Eagle, EagleConfig
from models.networks.layers import Layer, PlusOneNorm
from models.networks.medusa import Medusa, MedusaConfig
from models.networks.mtp import Mtp, MtpConfig
from models.networks.rope import Rope
from models.networks.transformer import Features, Transformer

_CONFIGS: dict[type[Parallel], type[ParallelConfig]] = {
  Parallel: ParallelConfig, DSpark: DSparkConfig, DFlash2: DFlash2Config,
}  # fmt: skip


def output_rows(target: Transformer) -> Array:
  """The output projection, `f[V, D]`.

  Raises:
    ValueError: if the logits are soft-capped; heads are trained without a cap.
  """
  if target.config.logit_softcap is not None:
    raise ValueError(
      "cannot train heads on a target with a logit soft cap, got "
      f"{target.config.logit_softcap}"
    )
  if target.config.tied_embeddings:
    return target.embed.embedding[...]
  return target.lm_head.weight[...]


def check_layers(layers: Features, num_layers: int, *, first: int) -> Features:
  """Checks the target layers whose inputs a head reads.

  Raises:
    ValueError: if they are not ascending in `first .. num_layers - 1`, the
      order in which servers collect features.
  """
  if [*layers] != sorted({*range(first, num_layers)} & {*layers}):
    raise ValueError(
      f"cannot read a target with {num_layers} layers at layers "
      f"{','.join(map(str, layers))}: set config.head.layers to ascending "
      f"layers in {first}..{num_layers - 1}"
    )
  return layers


def eagle3(
  target: Transformer,
  *,
  layers: Features,
  draft_vocab: np.ndarray | None,
  mlp_dim: int = 0,
  num_layers: int = 1,
  mask_token: int | None = None,
  rngs: nnx.Rngs,
) -> Eagle:
  """Starts EAGLE-3's head as the last layers, reading the highest feature.

  Args:
    target: the model that it drafts for.
    layers: layers whose inputs are fused.
    draft_vocab: ids of its draft vocabulary, ascending; None for all tokens.
    mlp_dim: width of the MLP's hidden layer, 0 for the target's. Additional
      channels, or all of a narrower MLP, have zero output at first.
    num_layers: the head's number of layers.
    mask_token: id of the mask, for P-EAGLE; its vector for unknown features
      starts out random.
    rngs: for weights that the target does not have.

  Raises:
    ValueError: for more layers than the target has.
  """
  above = _last_layers(target, num_layers)
  config = EagleConfig(
    layers=_layers(target.config, num_layers, mlp_dim=mlp_dim),
    generation=3,
    num_fused=len(layers),
    draft_vocab_size=None if draft_vocab is None else len(draft_vocab),
    mask_token=mask_token,
  )
  module = Eagle(config, dtype=target.dtype, rngs=rngs)
  # At first it reads only the last feature, the highest layer's. Others can be
  # hundreds of times as large.
  _read_last(module.fc)
  # The first layer reads the embedding, then the state.
  for ours, theirs in zip((module, *module.later), above, strict=True):
    copy_layer(ours, theirs, target)
  _copy_norms(module, target)
  _copy_tables(module, target, draft_vocab)
  return module


def eagle1(target: Transformer, *, rngs: nnx.Rngs) -> Eagle:
  """Starts EAGLE-1's head as the last layer, reading the final hidden state.

  That state is normed, but the outputs of attention and MLP can be hundreds of
  times as large, so they are zeroed: at first the head predicts what the target
  predicted one token before. It has no norms on queries and keys, which no
  format supports.
  """
  config = EagleConfig(layers=_layers(target.config, qk_norm=None))
  module = Eagle(config, dtype=target.dtype, rngs=rngs)
  # The embedding comes first, then the feature.
  width, fc = target.config.embed_dim, module.fc.weight
  fc[...] = fc[...].at[:, width:].set(jnp.eye(width))
  copy_layer(module, target.layers[-1], target)
  _zero(module.attention.out)
  _zero(module.mlp.down)
  _copy_tables(module, target)
  return module


def mtp(target: Transformer, *, rngs: nnx.Rngs) -> Mtp:
  """Starts an MTP head as the last layer, reading the final hidden state.

  Like EAGLE-1's, at first it predicts what the target predicted one token
  before, though with another temperature where the state, which is normed
  again, has an unusual norm.
  """
  config = MtpConfig(layers=_layers(target.config))
  module = Mtp(config, dtype=target.dtype, rngs=rngs)
  _read_last(module.fc)
  copy_layer(module.layer, target.layers[-1], target)
  _zero(module.layer.attention.out)
  _zero(module.layer.mlp.down)
  usual = jnp.sqrt(jnp.mean(jnp.square(_scale(target.final_norm))))
  module.final_norm.scale[...] = jnp.full_like(module.final_norm.scale, usual)
  _copy_tables(module, target)
  return module


def medusa(
  target: Transformer,
  *,
  num_heads: int,
  rngs: nnx.Rngs,
) -> Medusa:
  """Starts Medusa's heads, each as the target's output."""
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
  """Starts DFlash's head as the last layers, reading the highest feature.

  Args:
    target: the model that it drafts for.
    num_layers: the head's number of layers.
    layers: layers whose inputs are fused.
    block_size: tokens of a block: the newest, and those to draft.
    mask_token: id of the mask.
    draft_vocab: ids of its draft vocabulary, ascending; None for all tokens.
    rngs: for weights that the target does not have.
    kind: class of the network; DSpark's starts with zero Markov bias, DFlash
      2's like DFlash's, with a selector that adds nothing.
    **more: other fields of its configuration.

  Raises:
    ValueError: for more layers than the target has.
  """
  above = _last_layers(target, num_layers)
  config = _CONFIGS[kind](
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
  if isinstance(module, DFlash2):
    for layer in module.layers:
      _zero(layer.attention_conv.kernel_projection)
      _zero(layer.mlp_conv.kernel_projection)
    codes = module.candidate_selector.successor_codebook
    codes[...] = jnp.zeros_like(codes[...])
  _read_last(module.fc)
  for ours, theirs in zip(module.layers, above, strict=True):
    copy_layer(ours, theirs, target)
  _copy_norms(module, target)
  _copy_tables(module, target, draft_vocab)
  return module


# ------------------------------------------------------------------- the layer


def _last_layers(target: Transformer, count: int) -> list[Layer]:
  """The target's layers that a head's layers start from."""
  most = target.config.num_layers
  if not 1 <= count <= most:
    raise ValueError(f"head.num_layers must be in 1..{most}, got {count}")
  return list(target.layers)[-count:]


def copy_layer(ours: Any, theirs: Layer, target: Transformer) -> None:
  """Starts a head's layer from the target's; other blocks output zero.

  A compatible block gets the target's parameters. If ours are larger, as for
  queries that also read the embedding, theirs are last along each axis. The
  output projection of any other block is set to zero.

  Args:
    ours: a module with `attention` and `mlp`, and optional norms before them.
    theirs: a layer of the target.
    target: the target.
  """
  copied = set()
  if _has_usual_norms(theirs.spec, target.config):
    copied = {"attention_norm", "mlp_norm"}
    if _is_compatible(ours.attention.spec, theirs.spec.attention):
      copied.add("attention")
    if _is_compatible(ours.mlp.spec, theirs.spec.feed_forward):
      copied.add("mlp")
  _zero(ours.attention.out)
  _zero(ours.mlp.down)  # also for a wider MLP's additional channels
  given = dict(nnx.to_flat_state(nnx.state(theirs, nnx.Param)))
  state = nnx.state(ours, nnx.Param)
  for key, variable in nnx.to_flat_state(state):
    if key[0] in copied and key in given:
      array, mine = given[key][...], variable[...]
      corner = tuple(slice(-size, None) for size in array.shape)
      variable[...] = mine.at[corner].set(array)
  nnx.update(ours, state)


def _has_usual_norms(layer: LayerSpec, target: TransformerConfig) -> bool:
  """True if a layer's norms are like those of a head's layer."""
  return (
    layer.norms == "pre" and not layer.parallel and not layer.scaled
    and target.norm == "rms"
  )  # fmt: skip


def _is_compatible(ours: Any, theirs: Any) -> bool:
  """True if blocks differ at most in parts that may be added or left out.

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
  """The configuration of a head's layers, all like the target's last.

  They have its heads, its MLP's width (of a token's experts together) and its
  rotary embeddings, as far as head formats can express these.

  Raises:
    ValueError: for a target with layer norms, or whose last layer has no
      attention with rotary embeddings.
  """
  if target.norm == "layer":
    raise ValueError("heads need a target with RMS norms, got layer norms")
  a, block = target.layers[-1].attention, target.layers[-1].feed_forward
  if not isinstance(a, AttentionSpec) or a.rope is None:
    raise ValueError(
      "heads need a target whose last layer attends with rotary embeddings"
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
  """Makes a projection return the last of its inputs unchanged."""
  width = fc.weight.shape[0]
  zero = jnp.zeros_like(fc.weight)
  fc.weight[...] = zero.at[:, -width:].set(jnp.eye(width))


def _zero(added: nnx.Module) -> None:
  """Sets a projection to 0, so that it adds nothing to the residual stream."""
  nnx.update(added, jax.tree.map(jnp.zeros_like, nnx.state(added)))


def _scale(norm: nnx.Module) -> Array:
  """The factors that a norm multiplies by."""
  scale = norm.scale[...]
  return 1 + scale if isinstance(norm, PlusOneNorm) else scale


def _copy_norms(module, target: Transformer) -> None:
  """Copies the norms of fused features and of the output."""
  last = target.layers[-1]
  if _has_usual_norms(last.spec, target.config):
    nnx.update(module.hidden_norm, nnx.state(last.attention_norm))
  module.final_norm.scale[...] = _scale(target.final_norm)


def _copy_tables(module, target: Transformer, draft_vocab=None) -> None:
  """Copies embeddings, and the output projection of the draft vocabulary."""
  rows = output_rows(target)
  if draft_vocab is not None:
    module.target_ids = nnx.Variable(jnp.asarray(draft_vocab, jnp.int32))
    rows = rows[draft_vocab]
  module.lm_head.weight[...] = rows
  module.embed.embedding[...] = target.embed.embedding[...]
