"""Quantized weights in files: `w = (q - z) s`, or `w = q s + m`.

The values, scales and minima of a weight become a `QuantizedTensor` of unread
`Tensor`s, whatever the file format.

Letters in shapes: N outputs, D inputs, G groups of inputs.
"""

from collections.abc import Callable

import numpy as np

from models.formats.weights import Index, Tensor
from models.networks.quantized import Quantization
from models.networks.quantized_tensor import QuantizedTensor


def tensor(
  shape: tuple[int, ...],
  *,
  dtype: str | None,
  group_of: np.ndarray,
  values: Callable[[slice], np.ndarray],
  scales: Callable[[slice], np.ndarray],
  minima: Callable[[slice], np.ndarray] | None = None,
) -> Tensor:
  """A quantized weight in a file, without a name.

  Reading it dequantizes. Values have at most eight bits and a sign, so products
  with 16-bit scales are exact and those with float32 scales are rounded once.

  Args:
    shape: `(N, D)`, or with a leading axis of experts.
    dtype: the narrowest of `models.networks.quantized_tensor.DTYPES` that fits
      all values; None if none does.
    group_of: `i[D]`, the group of each input.
    values: reads `q - z` for some outputs, `[n, D]`.
    scales, minima: read the same outputs' scales and minima, `f32[n, G]`.
  """

  def dequantized(rows: slice) -> np.ndarray:
    weight = values(rows).astype(np.float32) * scales(rows)[..., group_of]
    return weight if minima is None else weight + minima(rows)[..., group_of]

  def part(of_rows: Callable[[slice], np.ndarray]):
    def read(index: Index) -> np.ndarray:
      rows, *inner = index or (slice(None),)
      return of_rows(rows)[:, *inner]

    return read

  count = int(group_of.max(initial=0)) + 1
  in_turn = np.repeat(np.arange(count), len(group_of) // count)
  quantized = None
  if dtype is not None and np.array_equal(group_of, in_turn):
    of_groups = lambda of_rows: Tensor(
      name="", shape=(*shape[:-1], count), kind="F32", read=part(of_rows)
    )
    quantized = QuantizedTensor(
      values=Tensor(name="", shape=shape, kind=dtype, read=part(values)),
      scales=of_groups(scales),
      minima=None if minima is None else of_groups(minima),
    )
  return Tensor(
    name="", shape=shape, kind="F32", read=part(dequantized),
    quantized=quantized,
  )  # fmt: skip


def fits(weight: QuantizedTensor | None, how: Quantization) -> bool:
  """True if a quantization can keep a weight's values and scales unchanged."""
  if weight is None:
    return False
  dtype = weight.values.kind
  if dtype != how.dtype and (dtype, how.dtype) != ("int4", "int8"):
    return False
  if weight.minima is not None:
    return False
  one = weight.num_groups == 1 and how.group is None
  return one or weight.group == how.group


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
  """Unpacks unsigned integers from 32-bit words, lowest bits first.

  `i32[..., n] -> i16[..., 32 n / bits]`.
  """
  shifts = np.arange(0, 32, bits, dtype=np.uint32)
  numbers = words.view(np.uint32)[..., None] >> shifts & (2**bits - 1)
  return numbers.astype(np.int16).reshape(*words.shape[:-1], -1)


def within(rows: slice, size: int, count: int) -> tuple[slice, slice]:
  """The slice of words that hold some packed numbers, and the slice in those.

  Args:
    rows: the numbers, without gaps.
    size: how many numbers there are in all.
    count: numbers per word.
  """
  start, stop, step = rows.indices(size)
  first = start // count
  moved = slice(start - first * count, stop - first * count, step)
  return slice(first, -(-stop // count)), moved
