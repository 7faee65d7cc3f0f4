"""Reads the metadata and, in parts, the tensors of GGUF files.

GGUF is llama.cpp's format: keys and values; names, shapes, types and offsets of
tensors; then the tensors' data, mostly quantized in blocks along the rows. The
`gguf` package parses it, and dequantizes the rarer types.
"""

import dataclasses
import functools
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFValueType
from jax import Array

from models.networks.quantized_tensor import QuantizedTensor

_LENGTH = struct.Struct("<Q")


class _Reader(gguf.GGUFReader):
  """The package's reader, but it reads the elements of an array together.

  The original makes a NumPy array for every number and string, which takes
  eight seconds for 150,000 tokens with their merges.
  """

  def _get_field_parts(self, orig_offs, raw_type):
    if raw_type != GGUFValueType.ARRAY:
      return super()._get_field_parts(orig_offs, raw_type)
    (raw_kind,), (count,) = (
      self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
    )  # fmt: skip
    kind, count = GGUFValueType(raw_kind), int(count)
    types, begin = [GGUFValueType.ARRAY, kind], orig_offs + 12
    if kind != GGUFValueType.STRING:
      values = self._get(begin, self.gguf_scalar_to_np[kind], count)
      return 12 + values.nbytes, [values], [0], types
    data, at, strings = self.data.view(np.ndarray), begin, []
    for _ in range(count):
      (size,) = _LENGTH.unpack_from(data, at)
      strings.append(data[at + 8 : at + 8 + size])
      at += 8 + size
    return at - orig_offs, strings, list(range(count)), types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
  """The header of a file: everything before the tensors' data.

  Attributes:
    path: the file's path.
    metadata: Python values by key, arrays as lists.
    tensors: tensors by name; they locate the data, which is not read.
  """

  path: pathlib.Path
  metadata: Mapping[str, Any]
  tensors: Mapping[str, gguf.ReaderTensor]


def shape_of(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
  """The shape of a tensor, slowest axis first; blocks are along the last."""
  return tuple(tensor.shape.tolist()[::-1])


def read_header(path: str) -> Header:
  """Reads a header; cached until the file changes.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not a valid GGUF file, or one part of a split model.
  """
  where = pathlib.Path(path).absolute()
  return _read_header(where, where.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_header(path: pathlib.Path, time: int) -> Header:
  del time  # of the last change, part of the cache's key
  try:
    reader = _Reader(path)
    if reader.byte_order != "I":
      raise ValueError("it is big-endian")
    metadata = {
      key: field.contents()
      for key, field in reader.fields.items()
      if not key.startswith("GGUF.")
    }
  except Exception as error:  # a damaged file raises many kinds of errors
    raise ValueError(f"cannot read {path} as GGUF: {error}") from error
  if metadata.get("split.count", 1) != 1:
    raise ValueError(
      f"{path} is one part of a split model: join the parts with "
      "`llama-gguf-split --merge`"
    )
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  return Header(path=path, metadata=metadata, tensors=tensors)


def _rows(tensor: gguf.ReaderTensor, path: pathlib.Path, index) -> np.ndarray:
  """Reads some rows of a tensor as stored.

  Maps the file anew each time: pages stay in memory as long as their mapping.
  """
  data = tensor.data
  mapped = np.memmap(path, data.dtype, "r", tensor.data_offset, data.shape)
  return np.array(mapped[index])


class Blocks(NamedTuple):
  """A quantized type: 32 integers share a scale, 16 if they have six bits.

  Attributes:
    bits: bits of an integer.
    above: offset that is subtracted from stored integers.
    fields: fields of a block, with their sizes in bytes: float16 d and m, which
      multiply scales and minima; the factors that they multiply; and the low
      four and the high bits of integers.
  """

  bits: int
  above: int
  fields: Mapping[str, int]

  @property
  def group(self) -> int:
    """Number of integers that share a scale."""
    return 16 if self.bits == 6 else 32


# 4-bit integers are shifted to fit int4.
BLOCKS = {
  "Q8_0": Blocks(8, 0, dict(d=2, low=32)),
  "Q4_0": Blocks(4, 8, dict(d=2, low=16)),
  "Q4_1": Blocks(4, 8, dict(d=2, m=2, low=16)),
  "Q5_0": Blocks(5, 16, dict(d=2, high=4, low=16)),
  "Q5_1": Blocks(5, 0, dict(d=2, m=2, high=4, low=16)),
  "Q4_K": Blocks(4, 8, dict(d=2, m=2, factors=12, low=128)),
  "Q5_K": Blocks(5, 0, dict(d=2, m=2, factors=12, high=32, low=128)),
  "Q6_K": Blocks(6, 32, dict(low=128, high=64, factors=16, d=2)),
}


def read(
  header: Header, name: str, index: tuple[slice, ...] = ()
) -> np.ndarray:
  """Reads and dequantizes a part of a tensor, without reading other rows.

  `index` is one slice per axis; `()` reads all.
  """
  tensor = header.tensors[name]
  axes = tensor.data.ndim - 1  # a vector is one row
  if tensor.tensor_type.name in BLOCKS:
    whole = _unpack(_dequantized, header, name, index[:axes])
  else:
    raw = _rows(tensor, header.path, index[:axes])
    whole = gguf.quants.dequantize(raw, tensor.tensor_type)
  return whole[(..., *index[axes:])]


def numbers(header: Header, name: str, rows: slice) -> np.ndarray:
  """The integers of some rows, or experts, of a tensor with a type in `BLOCKS`.

  Returns:
    `i8[n, .., D]`.
  """
  return _unpack(_numbers, header, name, rows)


def scales(
  header: Header, name: str, rows: slice
) -> tuple[np.ndarray, np.ndarray | None]:
  """The scales s and minima m of `numbers`: `w = q s + m`.

  Returns:
    Both `f32[n, .., D / group]`; the minima may be None.
  """
  return _unpack(_scales, header, name, rows)


# Integers are unpacked by XLA, several times as fast as by NumPy; scales are
# too few to repay compilation. Programs depend only on the number of blocks:
# few sizes, hence few compilations.


def _unpack(unpack: Callable, header: Header, name: str, index):
  """Unpacks the blocks of some rows; returns rows in NumPy."""
  tensor = header.tensors[name]
  kind, raw = tensor.tensor_type.name, _rows(tensor, header.path, index)
  found = unpack(kind, raw.reshape(-1, sum(BLOCKS[kind].fields.values())))
  return jax.tree.map(
    lambda x: np.asarray(x).reshape(*raw.shape[:-1], -1), found
  )


def _fields(kind: str, raw: np.ndarray | Array) -> tuple[Blocks, dict]:
  """The type of blocks and their fields, `u8[blocks, bytes]` each."""
  blocks, fields, at = BLOCKS[kind], {}, 0
  for name, size in blocks.fields.items():
    fields[name], at = raw[:, at : at + size], at + size
  return blocks, fields


@functools.partial(jax.jit, static_argnums=0)
def _numbers(kind: str, raw: Array) -> Array:
  """Integers, `i8[blocks, n]`.

  The low halves of 16 bytes come before their high halves; in blocks of 256
  integers, those of 32 or 64 bytes do.
  """
  blocks, fields = _fields(kind, raw)
  low, count = fields["low"], len(raw)
  if blocks.bits == 8:
    return low.view(jnp.int8)
  run = 64 if blocks.bits == 6 else min(32, low.shape[-1])
  low = low.reshape(count, -1, 1, run)  # stacking would take XLA longer
  found = (low >> np.array([[0], [4]], np.uint8) & 15).reshape(count, -1)
  if blocks.bits == 6:  # a byte has two bits of four integers, 32 apart
    high = fields["high"].reshape(count, -1, 1, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    found |= (high << 4).reshape(found.shape)
  elif blocks.bits == 5:  # a byte has a bit of 8 integers, adjacent or 32 apart
    high = fields["high"][..., None] >> np.arange(8, dtype=np.uint8) & 1
    high = high.swapaxes(-1, -2) if high.shape[-2] == 32 else high
    found |= (high << 4).reshape(found.shape)
  return (found - np.uint8(blocks.above)).view(jnp.int8)


def _scales(kind: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
  """Scales and minima, `f32[blocks, groups]`."""
  blocks, fields = _fields(kind, raw)
  # Blocks come last for now: NumPy is slow along short rows.
  turned = lambda name, dtype: fields[name].view(dtype).T.copy()
  scale, minima = turned("d", np.float16).astype(np.float32), None
  if "m" in fields:
    minima = turned("m", np.float16).astype(np.float32)
  if "factors" in fields:
    if minima is None:
      scale = scale * turned("factors", np.int8)
    else:  # six bits each; of the last four, two are in the first bytes
      of, under, low = np.split(turned("factors", np.uint8), 3)
      last = (low & 15 | of >> 6 << 4, low >> 4 | under >> 6 << 4)
      scale = scale * np.concatenate([of & 63, last[0]])
      minima = -minima * np.concatenate([under & 63, last[1]])
  if blocks.above and minima is not None:
    minima += blocks.above * scale
  return scale.T, None if minima is None else minima.T


def _dequantized(kind: str, raw: np.ndarray) -> Array:
  """Weights, `f32[blocks, n]`; in one program XLA would unpack more slowly."""
  scales, minima = _scales(kind, raw)
  return _dequantize(
    QuantizedTensor(values=_numbers(kind, raw), scales=scales, minima=minima)
  )


_dequantize = jax.jit(QuantizedTensor.dequantized)
