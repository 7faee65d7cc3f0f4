"""Quantizes the weights of models, as a `Quantization` specifies.

Activations are not quantized, and rows of a batch stay independent.
"""

import dataclasses

import jax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.networks.description import TransformerConfig
from models.networks.linear import Embed, projections
from models.networks.mixture import Experts
from models.networks.quantized_tensor import (
  DTYPES,
  QuantizedTensor,
  is_quantized,
  num_bits,
  quantize,
)

GROUPS = (16, 32, 64, 128)
EXPERTS = ("gate", "up", "down")  # of `models.networks.mixture.Experts`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
  """Which weights of a model are quantized, and how.

  Attributes:
    dtype: "int8", "int4", "fp8" (e4m3) or "fp4" (e2m1, as in MXFP4).
    group: inputs that share a scale, one of `GROUPS`; None for one scale per
      output.
    output: whether to quantize the output projection, and a tied embedding
      with it.
    embedding: whether to quantize an untied embedding.
    dense: whether to quantize all projections of layers, or only experts'.

  Raises:
    ValueError: for another type or group.
  """

  dtype: str
  group: int | None = None
  output: bool = True
  embedding: bool = False
  dense: bool = True

  def __post_init__(self):
    if self.dtype not in DTYPES:
      raise ValueError(f"expected one of {sorted(DTYPES)}, got {self.dtype!r}")
    if self.group not in (None, *GROUPS):
      raise ValueError(f"group must be one of {GROUPS}, got {self.group!r}")

  def __str__(self) -> str:
    """As written in configs (`launch.assembly.registry`)."""
    usual = DTYPES[self.dtype].group
    inside = [] if self.group == usual else [f"group={self.group}"]
    inside += [] if self.output else ["output=False"]
    inside += ["embedding=True"] if self.embedding else []
    inside += [] if self.dense else ["dense=False"]
    return f"{self.dtype}({', '.join(inside)})" if inside else self.dtype

  def of(self, weight: Array | QuantizedTensor, inputs: int) -> QuantizedTensor:
    """The nearest quantized weight; raises like `quantize`."""
    return quantize(weight, self.dtype, self.group, inputs=inputs)


def for_copy(how: Quantization, weights: Quantization) -> Quantization:
  """Adapts `how` to a copy of a model with quantized weights.

  The copy quantizes the same weights.

  Raises:
    ValueError: unless the copy has fewer bits.
  """
  ours, theirs = (DTYPES[x.dtype].dtype for x in (how, weights))
  if num_bits(ours) >= num_bits(theirs):
    raise ValueError(
      f"a quantized copy of {weights} weights must have fewer bits, got {how}"
    )
  return dataclasses.replace(
    how,
    output=weights.output,
    embedding=weights.embedding,
    dense=weights.dense,
  )


def quantize_module(
  module: nnx.Module, how: Quantization, *, again: bool = False
) -> None:
  """Quantizes the weights of a model, a layer or a head in place.

  In a mixture, those of the experts, but not of the shared one. Weights that
  are quantized already, such as a table that a head shares with its target, are
  kept unless `again`.
  """

  def convert(param: nnx.Param, inputs: int = -1) -> nnx.Param:
    weight = param.get_value()
    if is_quantized(weight) and not again:
      return param
    return nnx.Param(how.of(weight, inputs))

  for name, child in projections(module):
    if how.output if name == "lm_head" else how.dense:
      child.weight = convert(child.weight)
  for _, node in list(nnx.iter_modules(module)):
    if isinstance(node, Experts):
      for name in EXPERTS:
        setattr(node, name, convert(getattr(node, name), -2))
  table, tied = getattr(module, "embed", None), not hasattr(module, "lm_head")
  if isinstance(table, Embed) and (how.output if tied else how.embedding):
    table.embedding = convert(table.embedding)


def quantize_params(
  params: nnx.State, expected: nnx.State, how: Quantization
) -> nnx.State:
  """Quantizes parameters for a module after `quantize_module`.

  They keep their shardings; `expected` are that module's parameters, or their
  shapes.
  """

  def convert(weight, like):
    if not is_quantized(like):
      return weight
    make = lambda weight: how.of(weight, like.inputs)
    return jax.jit(make, out_shardings=_places(weight, like))(weight)

  return jax.tree.map(convert, params, expected, is_leaf=is_quantized)


def _places(weight: Array | QuantizedTensor, like: QuantizedTensor):
  """Shardings of a weight's values and scales; None without a mesh."""
  values = weight.values if isinstance(weight, QuantizedTensor) else weight
  where = values.sharding
  if not isinstance(where, NamedSharding):
    return None
  spec = P(*where.spec, *[None] * (values.ndim - len(where.spec)))
  return jax.tree.map(
    lambda spec: NamedSharding(where.mesh, spec),
    specs(spec, like),
    is_leaf=lambda x: isinstance(x, P),
  )


def specs(spec: P, weight: QuantizedTensor) -> QuantizedTensor:
  """The specs of a weight's arrays, given that of its values.

  Group scales are split like values; scales per output like outputs.
  """
  axis, scales = len(weight.shape) + weight.inputs, spec
  if weight.num_groups == 1 and axis < len(spec):
    scales = P(*spec[:axis], None, *spec[axis + 1 :])
  minima = None if weight.minima is None else scales
  return dataclasses.replace(weight, values=spec, scales=scales, minima=minima)


def check_weights(
  config: TransformerConfig, how: Quantization | None, *, on_mesh: bool
) -> None:
  """Raises ValueError if a model's weights cannot be quantized like this.

  `on_mesh` says whether its layers are stacked.
  """
  if how is None:
    return
  if config.deltas and on_mesh:
    raise ValueError("recurrent layers cannot be quantized on a mesh")
  if how.embedding and config.tied_embeddings:
    raise ValueError("embedding=True needs an embedding not tied to the output")


def check_cache(config: TransformerConfig, dtype: str | None) -> None:
  """Raises ValueError for a cache that cannot be quantized.

  With values that are keys, a non-finite key would make a non-finite value
  (`specjax.cache.contain`).
  """
  if dtype is None:
    return
  if config.deltas:
    raise ValueError("a cache with recurrent states cannot be quantized")
  if config.attention.latent is not None:
    raise ValueError("a cache of latents cannot be quantized")
