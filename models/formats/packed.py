"""Weights in few bits as files have them: `w = (q - z) s`.

A `Packed` says how the numbers `q - z` of a matrix and its scales are read,
whatever its file calls them. What it stands for is `Packed.read`; its `Parts`
are what `models.networks.quantized` may hold as they are.

Letters in shapes: N outputs, D inputs, G groups of inputs, E experts.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from models.networks.quantized import Quantization

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """Numbers and scales of a weight, or of those of all experts.

  Attributes:
    kind: the narrowest of `models.networks.quantized.KINDS` that has all
      numbers; None if none has.
    group: inputs of a group; None if groups are not of one size, in turn.
    num_groups: G.
    values: the numbers, or a part of them, `[N, D]` or `[E, N, D]`; all of them
      at `()`.
    scales: likewise, `f32[N, G]` or `f32[E, N, G]`.
  """

  kind: str | None
  group: int | None
  num_groups: int
  values: Callable[[Index], np.ndarray]
  scales: Callable[[Index], np.ndarray]

  def fits(self, form: Quantization) -> bool:
    """True if a format holds these numbers and scales as they are."""
    if self.kind is None or self.group is None:
      return False
    if form.dtype not in {self.kind} | _WIDER.get(self.kind, set()):
      return False
    one = self.num_groups == 1 and form.group is None
    return one or self.group == form.group


_WIDER = {"int4": {"int8"}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
  """A matrix in few bits.

  Attributes:
    kind: as of `Parts`.
    group_of: `i[D]`, the group of each input.
    numbers: `q - z` of some outputs, `[n, D]`, in a type that has them.
    scales: of the same, `f32[n, G]`.
  """

  kind: str | None
  group_of: np.ndarray
  numbers: Callable[[slice], np.ndarray]
  scales: Callable[[slice], np.ndarray]

  def read(self, index: Index) -> np.ndarray:
    """The weight, or a part of it, `f32[n, d]`; all of it at `()`.

    Numbers have eight bits and a sign at most, so products with scales of 16
    bits are exact, and those with scales of float32 rounded once.
    """
    rows, *inner = index or (slice(None),)
    numbers = self.numbers(rows).astype(np.float32)
    return (numbers * self.scales(rows)[:, self.group_of])[:, *inner]

  def parts(self) -> Parts:
    """Its numbers and scales."""

    def some(read: Callable[[slice], np.ndarray], index: Index) -> np.ndarray:
      rows, *inner = index or (slice(None),)
      return read(rows)[:, *inner]

    count = int(self.group_of.max(initial=0)) + 1
    size = len(self.group_of) // count
    consecutive = np.repeat(np.arange(count), size)
    return Parts(
      kind=self.kind,
      group=size if np.array_equal(self.group_of, consecutive) else None,
      num_groups=count,
      values=lambda index: some(self.numbers, index),
      scales=lambda index: some(self.scales, index),
    )


def of_experts(each: Sequence[Parts]) -> Parts:
  """The parts of all experts' weights, given those of each."""
  kinds, groups = {x.kind for x in each}, {x.group for x in each}
  kind = "int8" if kinds == {"int4", "int8"} else None
  return Parts(
    kind=kinds.pop() if len(kinds) == 1 else kind,
    group=groups.pop() if len(groups) == 1 else None,
    num_groups=each[0].num_groups,
    values=lambda index: _stacked([one.values for one in each], index),
    scales=lambda index: _stacked([one.scales for one in each], index),
  )


def _stacked(
  reads: Sequence[Callable[[Index], np.ndarray]], index: Index
) -> np.ndarray:
  """Parts of some, one after the other."""
  chosen = reads[index[0]] if index else reads
  return np.stack([read(index[1:]) for read in chosen])


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
  """Whole numbers that words of 32 bits hold, the lowest bits first.

  `i32[..., n] -> i16[..., 32 n / bits]`, from 0 on.
  """
  shifts = np.arange(0, 32, bits, dtype=np.uint32)
  numbers = words.view(np.uint32)[..., None] >> shifts & (2**bits - 1)
  return numbers.astype(np.int16).reshape(*words.shape[:-1], -1)


def within(rows: slice, size: int, count: int) -> tuple[slice, slice]:
  """The words that hold some of `size` numbers, `count` a word; where in them.

  Args:
    rows: the numbers, one after the other.
    size: how many there are.
    count: numbers of a word.
  """
  start, stop, step = rows.indices(size)
  first = start // count
  moved = slice(start - first * count, stop - first * count, step)
  return slice(first, -(-stop // count)), moved
