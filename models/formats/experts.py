"""Experts of files, which are one tensor of all, or one each.

The families' tables (`models.formats.families`) name one tensor of all experts,
with a * for them.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from models.formats import packed
from models.formats.families.family import Table
from models.formats.weights import Tensor, locate

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
    parts = [t.packed for t in experts if t.packed is not None]
    rest[name] = Tensor(
      name=name,
      shape=(len(experts), *experts[0].shape),
      kind=experts[0].kind,
      read=functools.partial(_read_experts, experts),
      packed=packed.of_experts(parts) if len(parts) == len(each) else None,
    )
  return rest


def _read_experts(
  experts: Sequence[Tensor], index: tuple[slice, ...]
) -> np.ndarray:
  chosen = experts[index[0]] if index else experts
  return np.stack([tensor.read(index[1:]) for tensor in chosen])


_FUSED = re.compile(r"layers\.(\d{1,9})\.mlp\.experts\.(gate_up|down)_proj")
_ROUTER = re.compile(r"layers\.(\d{1,9})\.mlp\.gate\.weight")


def of_projections(
  tensors: Mapping[str, Tensor], table: Table
) -> dict[str, Tensor]:
  """As if experts that are one tensor were many, where the family's are many.

  transformers saves them so if it is asked not to use the family's own format;
  routers then have the usual name too.

  Args:
    tensors: by name. `experts.gate_up_proj` is `[E, 2 I, D]`, gates before the
      rest, and `experts.down_proj` `[E, D, I]`.
    table: the model's.

  Returns:
    The tensors, named as by `of_experts`; what has another shape stays as it
    is.
  """
  joined = dict(tensors)
  if not any(".experts.*." in name for name in table.tensors.values()):
    return joined
  named = lambda layer, *of: locate(("layers", int(layer), "mlp", *of), table)
  for name, tensor in tensors.items():
    if parts := _ROUTER.fullmatch(name):
      own, _ = named(parts[1], "router", "weight")
      if own not in tensors:
        joined[own] = joined.pop(name)
    elif (parts := _FUSED.fullmatch(name)) and len(tensor.shape) == 3:
      halves = ["gate", "up"] if parts[2] == "gate_up" else ["down"]
      experts, rows, width = tensor.shape
      count = rows // len(halves)
      if rows % len(halves):
        continue
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
