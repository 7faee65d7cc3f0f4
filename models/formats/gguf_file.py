"""GGUF files: their metadata, and their tensors, which are read in parts.

GGUF is llama.cpp's format: a header of keys and values, then of the tensors'
names, shapes, types and offsets, then their data, most of it quantized in
blocks along the rows. The package `gguf` reads and dequantizes it.
"""

import dataclasses
import functools
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType

_LENGTH = struct.Struct("<Q")


class _Reader(gguf.GGUFReader):
  """The package's reader, with the elements of an array read together.

  Its own makes an array of NumPy of every number and string, which takes eight
  seconds for 150,000 tokens with their merges.
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
  """Header of a file: everything before its data.

  Attributes:
    path: of the file.
    metadata: Python's own values by key, arrays as lists.
    tensors: by name; their data is mapped, not read.
  """

  path: pathlib.Path
  metadata: Mapping[str, Any]
  tensors: Mapping[str, gguf.ReaderTensor]


def shape_of(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
  """The shape of a tensor, slowest axis first; blocks lie along the last."""
  return tuple(tensor.shape.tolist()[::-1])


def read_header(path: str) -> Header:
  """Reads a header, once for a file that does not change.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not a GGUF file, is damaged, or one of several that
      make up a model.
  """
  where = pathlib.Path(path).absolute()
  return _read_header(where, where.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_header(path: pathlib.Path, time: int) -> Header:
  del time  # of the last change: a part of the cache's key
  try:
    reader = _Reader(path)
    if reader.byte_order != "I":
      raise ValueError("it is big-endian")
    metadata = {
      key: field.contents()
      for key, field in reader.fields.items()
      if not key.startswith("GGUF.")
    }
  except Exception as error:  # a damaged file gives errors of many kinds
    raise ValueError(f"cannot read {path} as GGUF: {error}") from error
  if metadata.get("split.count", 1) != 1:
    raise ValueError(
      f"{path} is one of several files of a model that was split: join them "
      "with `llama-gguf-split --merge`"
    )
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  return Header(path=path, metadata=metadata, tensors=tensors)


def read(
  header: Header, name: str, index: tuple[slice, ...] = ()
) -> np.ndarray:
  """A part of a tensor, dequantized: only the rows of the part are read.

  `index` is one slice an axis; `()` is all of it.
  """
  tensor = header.tensors[name]
  raw = tensor.data
  if raw.ndim == 1:  # a vector is one row
    return gguf.quants.dequantize(raw, tensor.tensor_type)[index]
  rows, columns = index[: raw.ndim - 1], index[raw.ndim - 1 :]
  raw = np.ascontiguousarray(raw[rows])
  return gguf.quants.dequantize(raw, tensor.tensor_type)[(..., *columns)]


# Bits of the numbers of types that have one scale a block, and no more.
SCALED = {"Q8_0": 8, "Q4_0": 4}


def parts(
  header: Header, name: str, rows: slice
) -> tuple[np.ndarray, np.ndarray]:
  """The numbers and scales of some rows of a matrix of a `SCALED` type.

  A block of 32 is a float16 and then 32 bytes; or 16 bytes, whose lower halves
  are the first 16 numbers, each 8 above what it is.

  Returns:
    `i8[n, D]` and `f32[n, D / 32]`.
  """
  tensor = header.tensors[name]
  _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
  raw = np.ascontiguousarray(tensor.data[rows])
  blocks = raw.reshape(len(raw), -1, block_bytes)
  scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
  numbers = blocks[..., 2:]
  if SCALED[tensor.tensor_type.name] == 4:
    numbers = np.concatenate([numbers & 15, numbers >> 4], axis=-1) - 8
  numbers = np.ascontiguousarray(numbers, np.uint8).view(np.int8)
  return numbers.reshape(len(raw), -1), scales.astype(np.float32)
