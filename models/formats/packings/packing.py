"""Interface of a packing of weights to the reader of files: `Packing`."""

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
class Opened:
  """A `quantization_config` that was read.

  Attributes:
    says: what it says, in words.
    joined: the tensors of a checkpoint, by name, those of which a packed weight
      is made as one, `NAME.weight`. Raises CheckpointError for parts that do
      not go together.
  """

  says: str
  joined: Callable[[Tensors], dict[str, Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
  """A way to pack weights.

  Attributes:
    open: reads the settings. Raises ValueError for what is not supported.
    defaults: what is assumed for keys left out.
    fixed: keys that must have one of some values if they are there at all.
    harmless: keys that change no weight.
  """

  open: Callable[[Settings], Opened]
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
  """The tensors, those of each packed weight as one.

  Args:
    tensors: by name.
    mark: the part that every packed weight has, as `qweight`.
    parts: names of all parts.
    make: the weight of some parts, by their names; None if it is not packed.
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
  """Raises ValueError for a part of another shape or type."""
  if tensor.shape != shape or tensor.kind not in kinds:
    raise ValueError(
      f"{part} must be {shape} of {' or '.join(kinds)}, got {tensor.shape} of "
      f"{tensor.kind}"
    )


def group_of(inputs: int, size: int) -> np.ndarray:
  """The group of each input, of `size` each but the last; -1 is one group."""
  return np.arange(inputs) // (inputs if size == -1 else size)


def in_blocks(
  shape: tuple[int, int],
  sizes: Sequence[int] | None,
  scales: Tensor,
  values: Callable[[slice], np.ndarray],
  dtype: str | None,
) -> Tensor:
  """A weight with a scale for every block of it.

  Args:
    shape: `(N, D)`.
    sizes: outputs and inputs of a block; None for one of all.
    scales: of the blocks.
    values, dtype: as of `models.formats.quantized_files.tensor`.

  Raises:
    ValueError: if the scales are not of these blocks.
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
  """Scales that are floats, or exponents of two in bytes, as float32."""
  values = scales.read(())
  if scales.kind == "U8":
    return np.ldexp(np.float32(1), values.astype(np.int32) - 127)
  return values.astype(np.float32)
