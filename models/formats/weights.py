"""Maps the named tensors of a checkpoint to the parameters of a model.

A `Source` is an open checkpoint in any format: a configuration, and tensors
with Hugging Face's names that can be read in parts. The families' tables map
tensors to parameters.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from flax import nnx

from models import sharding as sharding_lib
from models.formats.families.family import (
  AS_IS,
  SWAPPED,
  TRANSPOSED,
  Layout,
  Table,
)
from models.networks import t5
from models.networks.layers import TransformerConfig
from models.networks.params import shapes_of
from models.networks.quantized import Quantization, quantize_module
from models.networks.quantized_tensor import QuantizedTensor
from models.networks.t5 import T5
from models.networks.t5_config import T5Config
from models.networks.transformer import Transformer


class CheckpointError(ValueError):
  """The tensors of a checkpoint do not match its configuration."""


Index = tuple[slice, ...]
_ROWS = 8192  # compared at once
_FLOATS = ("F16", "BF16", "F32", "F64")  # types that parameters may have


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
  """A tensor in a file, not yet read.

  Attributes:
    name: its name in the file.
    shape: shape of the whole tensor.
    kind: its type in the file.
    read: reads a part, given one slice per axis, or all given `()`.
    quantized: `Tensor`s of the values, scales and minima that `read`
      dequantizes; None if not quantized, or not in groups of one size.
  """

  name: str
  shape: tuple[int, ...]
  kind: str
  read: Callable[[Index], np.ndarray]
  quantized: QuantizedTensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """An open checkpoint.

  Attributes:
    path: path of the directory or the file, for messages.
    config: the model's configuration.
    table: maps parameters to tensors.
    tensors: tensors by Hugging Face's names, without the model's prefix.
    published: describes how the weights are quantized; "" if they are not.
  """

  path: str
  config: TransformerConfig | T5Config
  table: Table
  tensors: Mapping[str, Tensor]
  published: str = ""


# ------------------------------------------------------------------- tensors


def _t5() -> dict[str, str]:
  """T5's two stacks with their numbered sub-layers."""
  table = {"embed": "shared", "lm_head": "lm_head"}
  kinds = {
    "encoder": {"attention": "SelfAttention"},
    "decoder": {"attention": "SelfAttention", "cross": "EncDecAttention"},
  }
  for stack, attentions in kinds.items():
    ours, theirs = f"{stack}.layers.#.", f"{stack}.block.#.layer."
    table[f"{stack}.final_norm"] = f"{stack}.final_layer_norm"
    table[f"{stack}.position_bias"] = (
      f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    )
    for place, (name, kind) in enumerate(attentions.items()):
      table[f"{ours}{name}_norm"] = f"{theirs}{place}.layer_norm"
      for part, letter in zip(("q", "k", "v", "out"), "qkvo", strict=True):
        table[f"{ours}{name}.{part}"] = f"{theirs}{place}.{kind}.{letter}"
    last = f"{theirs}{len(attentions)}"
    table[f"{ours}mlp_norm"] = f"{last}.layer_norm"
    for part, name in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
      table[f"{ours}mlp.{part}"] = f"{last}.DenseReluDense.{name}"
  return table


T5_GATED = Table(name="t5 1.1", tensors=_t5())
T5_PLAIN = Table(
  name="t5 1.0",
  tensors={k: v.replace("wi_1", "wi") for k, v in T5_GATED.tensors.items()},
)


def locate(path: Iterable[str | int], table: Table) -> tuple[str, Layout]:
  """A parameter's tensor name, without prefix, and its layout.

  Args:
    path: path of the parameter in a `Transformer` or a `T5`.
    table: the model's table.
  """
  *module, parameter = path
  number = next((str(p) for p in module if isinstance(p, int)), "")
  key = ".".join("#" if isinstance(p, int) else p for p in module)
  if (whole := f"{key}.{parameter}") in table.tensors:
    key, suffix = whole, ""
  else:
    suffix = ".bias" if parameter == "bias" else ".weight"
  name = table.tensors[key].replace("#", number)
  return f"{name}{suffix}", table.layouts.get(key, AS_IS)


# --------------------------------------------------------------------- parts


@functools.lru_cache(maxsize=4)
def abstract(
  config: TransformerConfig | T5Config, dtype, form: Quantization | None = None
) -> Transformer | T5:
  """The module of a configuration, with shapes instead of parameters."""
  if isinstance(config, T5Config):
    return t5.abstract(config, dtype=dtype)

  def make(rngs):
    module = Transformer(config, dtype=dtype, rngs=rngs)
    if form is not None:
      quantize_module(module, form)
    return module

  return shapes_of(make)


def in_layout(tensor: Tensor, layout: Layout, config) -> Tensor:
  """A tensor brought into its parameter's layout."""
  if layout is AS_IS:
    return tensor
  return dataclasses.replace(
    tensor,
    shape=layout.shape(tensor.shape, config),
    read=lambda index: read(tensor, layout, index, config),
  )


def part(
  source: Source,
  parameter: tuple,
  index: Index,
  cut: TransformerConfig | T5Config,
  tensor: Tensor | None = None,
) -> np.ndarray:
  """Reads a part of a parameter, for a model with `cut`'s key/value heads.

  `tensor`, in the parameter's layout, replaces its tensor: for example the
  values of a quantized one.
  """
  config = source.config
  if tensor is None:
    name, layout = locate(parameter, source.table)
    tensor = in_layout(source.tensors[name], layout, config)
  of_decoder = isinstance(config, TransformerConfig) and config != cut
  if of_decoder and parameter[-2] in sharding_lib.of_kv_heads(config):
    spec, wanted = (c.attentions[parameter[1]] for c in (config, cut))
    times = wanted.num_kv_heads // spec.num_kv_heads
    whole = tensor.read(())
    return sharding_lib.repeat_heads(whole, spec.head_dim, times, axis=0)[index]
  return tensor.read(index)


def read(
  tensor: Tensor, layout: Layout, index: tuple[slice, ...], config
) -> np.ndarray:
  """Reads a part of a parameter from a tensor in a layout; () reads all."""
  if layout is AS_IS:
    return tensor.read(index)
  if layout is TRANSPOSED:
    return tensor.read(index[::-1]).T
  if layout is SWAPPED and index:
    experts, *rest = index
    return tensor.read((experts, *rest[::-1])).swapaxes(1, 2)
  return layout.take(tensor.read(()), config)[index]


def split_at(index: Index, axis: int) -> tuple[Index, Index]:
  """Splits an index: all of one axis first, then that axis' part of it."""
  whole, rest = [*index], [slice(None)] * len(index)
  whole[axis], rest[axis] = rest[axis], whole[axis]
  return tuple(whole), tuple(rest)


# -------------------------------------------------------------------- checks


def equal(one: Tensor, other: Tensor) -> bool:
  """True if two matrices are equal; reads a few rows at a time."""
  starts = range(0, one.shape[0], _ROWS)
  parts = [
    (slice(i, min(i + _ROWS, one.shape[0])), slice(None)) for i in starts
  ]
  return one.shape == other.shape and all(
    np.array_equal(one.read(part), other.read(part)) for part in parts
  )


def check(source: Source, module: Transformer | T5) -> None:
  """Compares the tensors of a checkpoint with its `abstract` module.

  Raises:
    CheckpointError: listing all tensors that are extra, missing or of the wrong
      shape or type.
  """
  config, table, tensors = source.config, source.table, source.tensors
  state = nnx.state(module)
  shapes: dict[str, tuple[int, ...]] = {}
  for parameter, variable in nnx.to_flat_state(state):
    name, layout = locate(parameter, table)
    shapes[name] = layout.shape(variable.shape, config)
  if problems := mismatches(tensors, shapes, _copies(source)):
    raise CheckpointError(
      f"the tensors in {source.path} do not match the {table.name} model in "
      "its configuration:\n  " + "\n  ".join(sorted(problems))
    )


def _copies(source: Source) -> dict[str, str]:
  """Tensors that, if present, must equal another."""
  embedding = locate(("embed", "embedding"), source.table)[0]
  names = ["lm_head.weight"] if source.config.tied_embeddings else []
  if isinstance(source.config, T5Config):
    names += [f"{x}.embed_tokens.weight" for x in ("encoder", "decoder")]
  return dict.fromkeys(names, embedding)


def mismatches(
  tensors: Mapping[str, Tensor],
  shapes: Mapping[str, tuple[int, ...]],
  copies: Mapping[str, str] = types.MappingProxyType({}),
) -> list[str]:
  """Lists tensors that are missing, extra or of the wrong shape or type.

  `copies` maps tensors that may be present to those that they must equal.
  """
  problems = [
    f"missing: {name}, of shape {shapes[name]}"
    for name in set(shapes) - set(tensors)
  ]
  for name, tensor in tensors.items():
    shape, tied = tensor.shape, copies.get(name)
    if name not in shapes and tied is None:
      problems.append(f"unexpected: {tensor.name}, of shape {shape}")
    elif (expected := shapes[name if name in shapes else tied]) != shape:
      problems.append(
        f"wrong shape: {tensor.name}, expected {expected}, got {shape}"
      )
    elif tensor.kind not in _FLOATS:
      problems.append(f"wrong type: {tensor.name}, got {tensor.kind}")
    elif name not in shapes and tied in tensors:
      if not equal(tensor, tensors[tied]):
        problems.append(f"not a copy of the tied embedding: {tensor.name}")
  return problems
