"""The network of SpecDec's drafter, with T5's layers.

Xia et al. (Findings of EMNLP 2023) use a transformer with learned positions,
whose masks are initialized by attention over the source's embeddings. Here the
layers are T5's (`models.networks.t5`), positions are T5's bidirectional
buckets, and each of the k masks has its own embedding. The configuration sets
the numbers of layers: the paper recommends a deep encoder and a shallow
decoder, but its released script has six layers in each.

A checkpoint is a directory like a T5's, whose `config.json` has `"model_type":
"t5_block"` and `num_masks`, with a tensor `mask.weight` of `[k, D]`.

Letters in shapes as in `models.networks.t5`; L tokens of text, k masks, V
vocabulary.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.formats import huggingface, json_files, loading
from models.networks import t5_config
from models.networks.params import shapes_of, split
from models.networks.t5 import T5, Memory
from models.networks.t5_config import T5Config
from models.tokenizers import Tokenizer
from specjax.types import Inputs, TextBlockModel

MODEL_TYPE = "t5_block"
_MASK = "mask.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
  """Shapes of one drafter.

  Attributes:
    t5: configuration of its encoder and decoder.
    num_masks: k, tokens that it predicts at once.
  """

  t5: T5Config
  num_masks: int

  @property
  def vocab_size(self) -> int:
    """V."""
    return self.t5.vocab_size


class BlockDrafter(nnx.Module):
  """A T5 with a bidirectional decoder that fills in masks."""

  def __init__(self, config: BlockConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
    self.config = config
    self.t5 = T5(config.t5, dtype=dtype, rngs=rngs)
    first = nnx.initializers.normal(1.0)
    shape = (config.num_masks, config.t5.embed_dim)
    self.mask = nnx.Param(first(rngs.params(), shape, jnp.dtype(dtype)))

  def encode(self, inputs: Inputs) -> Memory:
    """Encodes the inputs for the decoder's cross-attention."""
    return self.t5.encode(inputs)

  def __call__(
    self,
    tokens: Array,
    length: Array,
    memory: Memory,
    *,
    revealed: Array | None = None,
    shown: Array | None = None,
  ) -> Array:
    """The logits of the k tokens after the first `length` tokens.

    Args:
      tokens: `i32[B, L]`; only the first `length` are visible.
      length: `i32[B]` in 1..L.
      memory: from `encode`.
      revealed: `i32[B, k]`, tokens that replace masks (glancing).
      shown: `bool[B, k]`, which masks they replace.

    Returns:
      `f32[B, k, V]`.
    """
    t5, count = self.t5, self.config.num_masks
    batch, width = tokens.shape
    masks = jnp.broadcast_to(self.mask[...], (batch, *self.mask.shape))
    if shown is not None:
      masks = jnp.where(shown[..., None], t5.embed(revealed), masks)
    x = jnp.concatenate([t5.embed(tokens), masks.astype(t5.dtype)], axis=1)
    x = t5.widen(x)
    place = jnp.broadcast_to(jnp.arange(width), (batch, width))
    ahead = length[:, None] + jnp.arange(count)
    positions = jnp.concatenate([place, ahead], axis=1)
    is_text = jnp.concatenate(
      [place < length[:, None], jnp.ones((batch, count), bool)], axis=1
    )
    visible = jnp.repeat(is_text[:, None], width + count, axis=1)
    bias = t5.decoder.bias(
      positions[:, None] - positions[..., None], bidirectional=True
    )
    for i, layer in enumerate(t5.decoder.layers):
      kv = memory.keys[i], memory.values[i], memory.visible(positions, None)
      x, _ = layer(x, bias, visible, memory=kv)
    return t5.logits(x[:, width:])


def as_block_model(module: BlockDrafter) -> tuple[TextBlockModel, nnx.State]:
  """Splits a module into pure functions and their parameters."""
  merge, params = split(module)

  model = TextBlockModel(
    vocab_size=module.config.t5.vocab_size,
    num_depths=module.config.num_masks,
    encode=lambda params, inputs: merge(params).encode(inputs),
    predict=lambda params, *given: merge(params)(*given),
  )
  return model, params


# -------------------------------------------------------------- checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """A loaded drafter.

  Attributes:
    module: its network.
    params: its parameters, replicated on a mesh.
  """

  module: BlockDrafter
  params: Any

  @property
  def config(self) -> BlockConfig:
    """Its shapes."""
    return self.module.config

  def functions(self) -> TextBlockModel:
    """Decoder and encoder as pure functions."""
    return as_block_model(self.module)[0]


def is_block(directory: str) -> bool:
  """True if a directory's `config.json` is that of a block drafter."""
  try:
    config = json_files.read_object(pathlib.Path(directory) / "config.json")
  except (ValueError, FileNotFoundError):
    return False
  return config.get("model_type") == MODEL_TYPE


def load(
  directory: str, *, dtype=jnp.float32, mesh: Mesh | None = None
) -> Block:
  """Loads a block drafter, replicated on a mesh.

  Raises:
    FileNotFoundError, ValueError, CheckpointError: like `loading.load`.
  """
  path = pathlib.Path(directory)
  config = t5_config.config_from_json(
    json_files.read_object(path / "config.json")
  )
  source = huggingface.t5_source(path, config)
  tensors = dict(source.tensors)
  mask = tensors.pop(_MASK).read(())
  source = dataclasses.replace(source, tensors=tensors)
  t5 = loading.load(source, dtype=dtype)
  block = BlockConfig(t5=source.config, num_masks=len(mask))
  module = shapes_of(lambda rngs: BlockDrafter(block, dtype=dtype, rngs=rngs))
  module.t5 = t5
  module.mask = nnx.Param(jnp.asarray(mask, dtype))
  params = nnx.state(module)
  if mesh is not None:
    whole = NamedSharding(mesh, P())

    def put(x):
      array = np.asarray(x)
      return jax.make_array_from_callback(x.shape, whole, array.__getitem__)

    params = jax.tree.map(put, params)
  return Block(module=module, params=params)


def save(
  module: BlockDrafter,
  directory: str,
  *,
  tokenizer: Tokenizer | None = None,
  dtype=jnp.float32,
) -> None:
  """Writes a block drafter for `load`; see `huggingface.save_t5`."""
  huggingface.save_t5(
    module.t5,
    directory,
    tokenizer=tokenizer,
    dtype=dtype,
    settings=dict(
      model_type=MODEL_TYPE, architectures=["BlockDrafter"],
      num_masks=module.config.num_masks,
    ),
    tensors={_MASK: np.asarray(module.mask[...])},
  )  # fmt: skip
