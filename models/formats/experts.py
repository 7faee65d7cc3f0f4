"""Experts of files, which are one tensor of all, or one each.

The families' tables (`models.formats.families`) name one tensor of all experts,
with a * for them.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from models.formats.families.family import Table
from models.formats.weights import Index, Tensor, locate
from models.networks.quantized_tensor import QuantizedTensor

_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,9})\.(.+)")


def of_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """Tensors of which those of all experts are one, named with a * for them.

  Experts that are not numbered from 0 on, or are not alike, stay apart.
  """
  by_projection: dict[str, dict[int, Tensor]] = {}
  rest = {}
  for name, tensor in tensors.items():
    if parts := _EXPERT.fullmatch(name):
      each = by_projection.setdefault(f"{parts[1]}.*.{parts[3]}", {})
      each[int(parts[2])] = tensor
    else:
      rest[name] = tensor
  for name, each in by_projection.items():
    experts = [each[i] for i in sorted(each)]
    alike = {(tensor.shape, tensor.kind) for tensor in experts}
    if sorted(each) != [*range(len(each))] or len(alike) > 1:
      rest |= {name.replace("*", str(i)): t for i, t in each.items()}
      continue
    rest[name] = dataclasses.replace(
      _stacked(experts, name),
      quantized=_stacked_quantized([t.quantized for t in experts], name),
    )
  return rest


def _stacked(each: Sequence[Tensor], name: str) -> Tensor:
  """Tensors of one shape as one, with an axis for them."""

  def read(index: Index) -> np.ndarray:
    chosen = each[index[0]] if index else each
    return np.stack([tensor.read(index[1:]) for tensor in chosen])

  shape = (len(each), *each[0].shape)
  return Tensor(name=name, shape=shape, kind=each[0].kind, read=read)


def _stacked_quantized(
  each: Sequence[QuantizedTensor | None], name: str
) -> QuantizedTensor | None:
  """Quantized weights of one shape as one; None if they are not alike."""
  weights = [x for x in each if x is not None]
  if len(weights) < len(each) or len({x.num_groups for x in weights}) > 1:
    return None
  dtypes = {x.values.kind for x in weights}
  if len(dtypes) > 1 and dtypes != {"int4", "int8"}:
    return None
  values = _stacked([x.values for x in weights], name)
  return QuantizedTensor(
    values=dataclasses.replace(values, kind=max(dtypes)),
    scales=_stacked([x.scales for x in weights], name),
  )


_FUSED = re.compile(r"layers\.(\d{1,9})\.mlp\.experts\.(gate_up|down)_proj")


def of_projections(
  tensors: Mapping[str, Tensor], table: Table
) -> dict[str, Tensor]:
  """As if experts that are one tensor were many, as Qwen3.5 is released.

  Args:
    tensors: by name. `experts.gate_up_proj` is `[E, 2 I, D]`, gates before the
      rest, and `experts.down_proj` `[E, D, I]`.
    table: the model's.

  Returns:
    The tensors, named as by `of_experts` where the family's are many.
  """
  joined = dict(tensors)
  if not any(".experts.*." in name for name in table.tensors.values()):
    return joined
  named = lambda layer, *of: locate(("layers", int(layer), "mlp", *of), table)
  for name, tensor in tensors.items():
    if parts := _FUSED.fullmatch(name):
      halves = ["gate", "up"] if parts[2] == "gate_up" else ["down"]
      experts, rows, width = tensor.shape
      count = rows // len(halves)
      del joined[name]
      for i, half in enumerate(halves):
        joined[named(parts[1], "experts", half)[0]] = dataclasses.replace(
          tensor,
          shape=(experts, count, width),
          read=functools.partial(_read_rows, tensor, i * count, count),
        )
  return joined


def _read_rows(
  tensor: Tensor, first: int, count: int, index: tuple[slice, ...]
) -> np.ndarray:
  experts, rows, *rest = index or (slice(None), slice(None))
  start, stop, step = rows.indices(count)
  return tensor.read((experts, slice(first + start, first + stop, step), *rest))
