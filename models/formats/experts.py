"""Brings experts to one form, whether stored in one tensor or in one each.

The families' tables (`models.formats.families`) name one tensor for all
experts, with a * for the expert's number.
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
  """Stacks the tensors of all experts into one, with a * for the number.

  Experts not numbered from 0, or of different shapes or types, stay separate.
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
  """Stacks tensors of one shape along a new first axis."""

  def read(index: Index) -> np.ndarray:
    chosen = each[index[0]] if index else each
    return np.stack([tensor.read(index[1:]) for tensor in chosen])

  shape = (len(each), *each[0].shape)
  return Tensor(name=name, shape=shape, kind=each[0].kind, read=read)


def _stacked_quantized(
  each: Sequence[QuantizedTensor | None], name: str
) -> QuantizedTensor | None:
  """Stacks quantized weights of one shape; None if their forms differ."""
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
  """Splits fused experts, as Qwen3.5 is released, into projections.

  Args:
    tensors: by name. `experts.gate_up_proj` is `[E, 2 I, D]`, gates first, and
      `experts.down_proj` is `[E, D, I]`.
    table: the model's table.

  Returns:
    The tensors, named as by `of_experts` if the family has separate experts.
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
