"""`Packing`, the interface of a quantization format."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from models.formats.families.family import Settings
from models.formats.quantized_files import tensor
from models.formats.weights import CheckpointError, Tensor

Tensors = Mapping[str, Tensor]
_FLOATS = ("F32", "BF16", "F16", "F8_E8M0", "U8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsed:
  """A parsed `quantization_config`.

  Attributes:
    label: a description of the quantization, for messages.
    join: replaces the parts of each packed weight in a checkpoint's tensors
      by one tensor, `NAME.weight`. Raises CheckpointError if parts do not fit
      together.
  """

  label: str
  join: Callable[[Tensors], dict[str, Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
  """A quantization format.

  Attributes:
    open: parses the settings. Raises ValueError if they are not supported.
    defaults: values of missing keys.
    fixed: keys with the values that they may have.
    harmless: keys that change no weight.
  """

  open: Callable[[Settings], Parsed]
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
  harmless: frozenset[str] = frozenset()


def join(
  tensors: Tensors,
  *,
  mark: str,
  parts: tuple[str, ...],
  make: Callable[[dict[str, Tensor]], Tensor | None],
) -> dict[str, Tensor]:
  """Joins the parts of every packed weight.

  Args:
    tensors: by name.
    mark: the part that every packed weight has, such as `qweight`.
    parts: names of all parts.
    make: makes a weight from its parts by name; None if it is not packed.
      Raises ValueError.
  """
  joined = dict(tensors)
  for name in tensors:
    stem, _, last = name.rpartition(".")
    if last != mark:
      continue
    given = {
      p: tensors[f"{stem}.{p}"] for p in parts if f"{stem}.{p}" in tensors
    }
    try:
      made = make(given)
    except (ValueError, KeyError) as error:
      reason = f"{error} is missing" if type(error) is KeyError else error
      raise CheckpointError(f"the parts of {stem}: {reason}") from error
    if made is None:
      continue
    for part in given:
      del joined[f"{stem}.{part}"]
    name = given[mark].name.removesuffix(mark) + "weight"
    joined[f"{stem}.weight"] = dataclasses.replace(made, name=name)
  return joined


def check_shape(part: str, tensor: Tensor, shape: tuple, kinds: tuple) -> None:
  """Raises ValueError for a part with the wrong shape or type."""
  if tensor.shape != shape or tensor.kind not in kinds:
    raise ValueError(
      f"{part} must be {shape} of {' or '.join(kinds)}, got {tensor.shape} of "
      f"{tensor.kind}"
    )


def group_of(inputs: int, size: int) -> np.ndarray:
  """The group of each input; a `size` of -1 means one group."""
  return np.arange(inputs) // (inputs if size == -1 else size)


def in_blocks(
  shape: tuple[int, int],
  sizes: Sequence[int] | None,
  scales: Tensor,
  values: Callable[[slice], np.ndarray],
  dtype: str | None,
) -> Tensor:
  """A weight with a scale per block.

  Args:
    shape: `(N, D)`.
    sizes: outputs and inputs of a block; None for one block.
    scales: scales of the blocks.
    values, dtype: as for `models.formats.quantized_files.tensor`.

  Raises:
    ValueError: if the shape of the scales does not fit.
  """
  outputs, inputs = shape
  high, wide = sizes or shape
  grid = (-(-outputs // high), -(-inputs // wide))
  if sizes is not None or scales.shape not in ((), (1,)):
    check_shape("scales", scales, grid, _FLOATS)

  def of_rows(rows: slice) -> np.ndarray:
    return floats(scales).reshape(grid)[np.arange(outputs)[rows] // high]

  groups = np.arange(inputs) // wide
  return tensor(
    shape, dtype=dtype, group_of=groups, values=values, scales=of_rows
  )


def floats(scales: Tensor) -> np.ndarray:
  """Scales as float32, from floats or biased exponents in bytes."""
  values = scales.read(())
  if scales.kind == "U8":
    return np.ldexp(np.float32(1), values.astype(np.int32) - 127)
  return values.astype(np.float32)
