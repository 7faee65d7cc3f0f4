"""Keeps quantized weights as published, without rounding them again."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.formats.quantized_files import fits
from models.formats.weights import Source, abstract, in_layout, locate, split_at
from models.networks import stacked
from models.networks.quantized import GROUPS, Quantization
from models.networks.quantized_tensor import QuantizedTensor, is_quantized

Weights = dict[tuple, QuantizedTensor | None]
_EMBEDDING, _OUTPUT = ("embed", "embedding"), ("lm_head", "weight")


def keep(
  source: Source, how: Quantization | None = None, *, on_mesh: bool = False
) -> Weights:
  """The quantized weights by parameter; None for those that cannot be kept.

  Args:
    source: the checkpoint of a model that can be quantized like this.
    how: keeps weights that match this quantization. None keeps each in its
      published form, or in a common form for all layers of a stack.
    on_mesh: whether layers are stacked.
  """
  config = source.config
  if how is not None:
    as_how = lambda x: _in_form(x, how.dtype, x.group, minima=False)
    return {
      path: as_how(x) if x is not None and fits(x, how) else None
      for path, x in _weights(source, how).items()
    }
  if config.deltas and on_mesh:
    return {}
  every = Quantization(dtype="int8", embedding=not config.tied_embeddings)
  weights = _weights(source, every)
  groups = [(path,) for path in weights if path[0] != "layers" or not on_mesh]
  if on_mesh:
    for of in stacked.kinds(config).values():
      rest = [path[2:] for path in weights if path[:2] == ("layers", of[0])]
      groups += [tuple(("layers", i, *r) for i in of) for r in rest]
  for paths in groups:
    each = [x for path in paths if (x := weights[path]) is not None]
    kinds = {x.values.kind for x in each}
    if len(each) < len(paths) or not (len(kinds) == 1 or kinds == _INTEGERS):
      weights |= dict.fromkeys(paths)
      continue
    group = math.gcd(*(x.group for x in each))
    minima = any(x.minima is not None for x in each)
    for path, weight in zip(paths, each, strict=True):
      weights[path] = _in_form(weight, max(kinds), group, minima=minima)
  return weights


_INTEGERS = {"int4", "int8"}


def summary(
  source: Source, weights: Weights
) -> tuple[Quantization | None, str]:
  """The `Quantization` nearest to the kept weights, and their description.

  None if no layer's weights are kept.
  """
  kept = {path: x for path, x in weights.items() if x is not None}
  layers = {*kept} - {_EMBEDDING, _OUTPUT}
  if not layers:
    return None, ""
  tied = source.config.tied_embeddings
  kinds = {x.values.kind for x in kept.values()}
  # MXFP4 has groups of 32, even if the inputs are just one group.
  groups = {32} if "fp4" in kinds else set()
  groups |= {x.group for x in kept.values() if x.num_groups > 1}
  form = Quantization(
    dtype="int8" if "int8" in kinds else min(kinds),
    group=min(groups & {*GROUPS}, default=None),
    output=(_EMBEDDING if tied else _OUTPUT) in kept,
    embedding=not tied and _EMBEDDING in kept,
    dense=any("experts" not in path for path in layers),
  )
  words = str(form)
  if not all(fits(x, form) for x in kept.values()):
    sizes = " and ".join(map(str, sorted(groups)))
    words = f"{form.dtype} in groups of {sizes}"
  rest = [
    locate(path, source.table)[0]
    for path in {*weights} - {*kept, _EMBEDDING, _OUTPUT}
    if form.dense or "experts" in path
  ]
  if rest:
    words += f", but for {len(rest)} weights, such as {min(rest)}"
  return form, words


def _weights(source: Source, how: Quantization) -> Weights:
  """The files' weights that `how` quantizes, by path, in parameters' layout.

  None for a weight that is not published quantized, or is in another layout.
  """
  config = source.config
  state = nnx.state(abstract(config, jnp.float32, how))
  weights: Weights = {}
  for path, param in nnx.to_flat_state(state):
    if is_quantized(like := param.get_value()):
      name, layout = locate(path, source.table)
      tensor, weights[path] = source.tensors.get(name), None
      if tensor is None or tensor.quantized is None or not layout.of_parts:
        continue
      weight = jax.tree.map(
        lambda part, layout=layout: in_layout(part, layout, config),
        tensor.quantized,
      )
      weights[path] = dataclasses.replace(weight, inputs=like.inputs)
  return weights


def _in_form(
  weight: QuantizedTensor, kind: str, group: int, *, minima: bool
) -> QuantizedTensor:
  """Changes the type of values and the group size, and may add minima."""
  times, axis = weight.group // group, weight.inputs
  shape = [*weight.scales.shape]
  shape[axis] *= times

  def finer(part, factor: float = 1):
    def read(index):
      index = index or (slice(None),) * len(shape)  # () means all
      whole, rest = split_at(index, axis)
      return factor * np.repeat(part.read(whole), times, axis=axis)[rest]

    return dataclasses.replace(part, shape=tuple(shape), read=read)

  scales, least = weight.scales, weight.minima
  if minima and least is None:
    least = finer(scales, 0)
  elif times > 1 and least is not None:
    least = finer(least)
  return dataclasses.replace(
    weight,
    values=dataclasses.replace(weight.values, kind=kind),
    scales=finer(scales) if times > 1 else scales,
    minima=least,
  )
