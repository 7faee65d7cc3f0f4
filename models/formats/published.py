"""The quantization that keeps a checkpoint's weights as they are published.

Where the values of every weight that a `Quantization` quantizes are those of
the file, they are read as they are, and not rounded again.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from models.formats.quantized_files import fits
from models.formats.weights import Source, abstract, locate
from models.networks.quantized import Quantization, check_weights
from models.networks.quantized_tensor import QuantizedTensor, is_quantized

_EMBEDDING, _OUTPUT = ("embed", "embedding"), ("lm_head", "weight")


def keeps(source: Source, how: Quantization) -> bool:
  """True if a quantization keeps all weights that it quantizes.

  Args:
    source: the checkpoint, of a model that can be quantized so.
    how: the quantization.
  """
  return all(fits(weight, how) for weight in _weights(source, how).values())


def quantization(
  source: Source, *, on_mesh: bool
) -> tuple[Quantization | None, str]:
  """The quantization that keeps a checkpoint's layers as they are published.

  Output projection and embedding are quantized too if it keeps them.

  Args:
    source: the checkpoint.
    on_mesh: whether its layers are stacked.

  Returns:
    The quantization, or None and the reason why there is none.
  """
  config = source.config
  tied = config.tied_embeddings
  every = Quantization(dtype="int8", embedding=not tied)
  try:
    check_weights(config, every, on_mesh=on_mesh)
    weights = _weights(source, every)
    ends = {path: weights.pop(path, None) for path in (_EMBEDDING, _OUTPUT)}
    experts = {path: x for path, x in weights.items() if path[-2] == "experts"}
    dense = any(weights[p] is not None for p in {*weights} - {*experts})
    weights = weights if dense else experts
    how = _common([x for x in weights.values() if x is not None])
  except ValueError as error:
    return None, str(error)
  if how is None:
    return None, "its layers are not quantized in groups of one size"
  for path, weight in weights.items():
    if not fits(weight, how):
      name, _ = locate(path, source.table)
      return None, f"{name} is not {how}, as others are"
  return dataclasses.replace(
    how,
    output=fits(ends[_EMBEDDING if tied else _OUTPUT], how),
    embedding=not tied and fits(ends[_EMBEDDING], how),
    dense=dense,
  ), ""


def _common(weights: list[QuantizedTensor]) -> Quantization | None:
  """The quantization that most likely keeps some weights; None for none."""
  dtypes = {x.values.kind for x in weights}
  groups = {x.group for x in weights if x.num_groups > 1}
  if not weights:
    return None
  return Quantization(
    dtype="int8" if "int8" in dtypes else min(dtypes),
    # MXFP4 has groups, also where inputs are no more than one.
    group=max(groups, default=32 if "fp4" in dtypes else None),
  )


def _weights(
  source: Source, how: Quantization
) -> dict[tuple, QuantizedTensor | None]:
  """The weights that are to be quantized as files have them, by their paths.

  None where a weight is not published quantized, or lies in another way.
  """
  state = nnx.state(abstract(source.config, jnp.float32, how))
  weights = {}
  for path, param in nnx.to_flat_state(state):
    if is_quantized(param.get_value()):
      name, layout = locate(path, source.table)
      tensor = source.tensors.get(name)
      alike = tensor is not None and layout.of_parts
      weights[path] = tensor.quantized if alike else None
  return weights
