"""GGUF files: their metadata, and their tensors, which are read in parts.

GGUF is llama.cpp's format: a header of keys and values, then of the tensors'
names, shapes, types and places, then their data, most of it quantised in blocks
along the rows. The package `gguf` says what types there are and dequantises.
Its reader is not used: it believes every count that a file names, so that a
damaged one can keep it busy for ever, and needs seconds for a vocabulary.
"""

import dataclasses
import functools
import math
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

_VERSIONS = (2, 3)
_MOST_AXES = 4
_STRING, _ARRAY = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
# Little-endian formats of the values of a fixed size, by their type's number.
_FIXED = {
  gguf.GGUFValueType.UINT8: "u1",
  gguf.GGUFValueType.INT8: "i1",
  gguf.GGUFValueType.UINT16: "<u2",
  gguf.GGUFValueType.INT16: "<i2",
  gguf.GGUFValueType.UINT32: "<u4",
  gguf.GGUFValueType.INT32: "<i4",
  gguf.GGUFValueType.FLOAT32: "<f4",
  gguf.GGUFValueType.BOOL: "?",
  gguf.GGUFValueType.UINT64: "<u8",
  gguf.GGUFValueType.INT64: "<i8",
  gguf.GGUFValueType.FLOAT64: "<f8",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """Type, shape and place of a tensor in a file.

  Attributes:
    kind: its type.
    shape: slowest axis first; blocks lie along the last.
    start: the first of its bytes.
    row_bytes: of a row, which is what the last axis spans.
  """

  kind: gguf.GGMLQuantizationType
  shape: tuple[int, ...]
  start: int
  row_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
  """Header of a file: everything before its data.

  Attributes:
    path: of the file.
    metadata: values by key: Python's own, lists of strings, arrays of numbers.
    tensors: by name.
  """

  path: pathlib.Path
  metadata: Mapping[str, Any]
  tensors: Mapping[str, Entry]


def read_header(path: str) -> Header:
  """Reads and checks a header, once for a file that does not change.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: in one line, if it is no GGUF file, of a version or byte order
      that is not read, one of several that make up a model, or damaged.
  """
  where = pathlib.Path(path)
  if not where.is_file():
    raise FileNotFoundError(f"there is no file {str(where)!r}")
  status = where.stat()
  return _read_header(where.absolute(), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_header(path: pathlib.Path, size: int, time: int) -> Header:
  del time  # of the last change: a part of the cache's key
  try:
    if size < 24:
      raise ValueError(f"it has {size} bytes, fewer than any GGUF file")
    data = memoryview(np.memmap(path, mode="r"))
    num_tensors, num_values = _preamble(data)
    at, metadata = 24, {}
    for _ in range(num_values):
      key, at = _string(data, at)
      if key in metadata:
        raise ValueError(f"the key {key!r:.80} is there twice")
      (kind,), at = _numbers(data, at, "<u4", 1)
      try:
        metadata[key], at = _value(data, at, int(kind))
      except ValueError as error:
        raise ValueError(f"the value of {key!r:.80}: {error}") from None
    parts = metadata.get("split.count", 1)
    if type(parts) is not int or parts > 1:
      raise ValueError(
        f"it is one of {parts!r:.20} files of a model that was split: join "
        "them with `llama-gguf-split --merge`"
      )
    return Header(
      path=path,
      metadata=metadata,
      tensors=_tensors(data, at, num_tensors, metadata),
    )
  except ValueError as error:
    raise ValueError(f"cannot read {path} as GGUF: {error}") from None


def _preamble(data: memoryview) -> tuple[int, int]:
  """Numbers of tensors and of metadata values."""
  if data[:4] != b"GGUF":
    raise ValueError("it does not begin with the letters GGUF")
  version, num_tensors, num_values = struct.unpack_from("<IQQ", data, 4)
  if version not in _VERSIONS:
    (swapped,) = struct.unpack_from(">I", data, 4)
    if swapped in _VERSIONS:
      raise ValueError("it is big-endian, which is not read")
    raise ValueError(f"its version is {version}, expected one of {_VERSIONS}")
  return num_tensors, num_values


def _numbers(
  data: memoryview, at: int, form: str, count: int
) -> tuple[np.ndarray, int]:
  """Some numbers of a NumPy type, and where they end."""
  end = at + count * np.dtype(form).itemsize
  if end > len(data):
    raise ValueError("the file is cut short or damaged, it ends in its header")
  return np.frombuffer(data, form, count, at), end


def _string(data: memoryview, at: int) -> tuple[str, int]:
  (size,), at = _numbers(data, at, "<u8", 1)
  letters, end = _numbers(data, at, "u1", int(size))
  try:
    return letters.tobytes().decode("utf-8"), end
  except UnicodeDecodeError:
    raise ValueError("it is damaged, a string is no UTF-8") from None


def _value(data: memoryview, at: int, kind: int) -> tuple[Any, int]:
  """A value of the metadata, and where it ends."""
  if kind == _STRING:
    return _string(data, at)
  if kind in _FIXED:
    numbers, at = _numbers(data, at, _FIXED[gguf.GGUFValueType(kind)], 1)
    return numbers[0].item(), at
  if kind != _ARRAY:
    raise ValueError(f"it is damaged, there is no type of number {kind}")
  (kind,), at = _numbers(data, at, "<u4", 1)
  (count,), at = _numbers(data, at, "<u8", 1)
  kind, count = int(kind), int(count)
  if kind in _FIXED:
    numbers, at = _numbers(data, at, _FIXED[gguf.GGUFValueType(kind)], count)
    return numbers.copy(), at
  if kind != _STRING:
    raise ValueError(f"it is damaged, there are no arrays of type {kind}")
  _numbers(data, at, "<u8", count)  # there are so many, if all are empty
  strings = []
  for _ in range(count):
    string, at = _string(data, at)
    strings.append(string)
  return strings, at


def _tensors(
  data: memoryview, at: int, count: int, metadata: Mapping[str, Any]
) -> dict[str, Entry]:
  """The tensors' entries, all of which lie within the file."""
  alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
  if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
    raise ValueError(
      f"general.alignment must be a power of two, got {alignment!r:.40}"
    )
  places = {}
  for _ in range(count):
    name, at = _string(data, at)
    if name in places:
      raise ValueError(f"the tensor {name!r:.80} is there twice")
    (axes,), at = _numbers(data, at, "<u4", 1)
    if not 1 <= axes <= _MOST_AXES:
      raise ValueError(f"the tensor {name!r:.80} has {axes} axes")
    shape, at = _numbers(data, at, "<u8", int(axes))
    (kind,), at = _numbers(data, at, "<u4", 1)
    (offset,), at = _numbers(data, at, "<u8", 1)
    places[name] = tuple(shape.tolist()[::-1]), int(kind), int(offset)
  begin = -(-at // alignment) * alignment
  return {
    name: _entry(name, shape, kind, begin + offset, len(data))
    for name, (shape, kind, offset) in places.items()
  }


def _entry(
  name: str, shape: tuple[int, ...], kind: int, start: int, size: int
) -> Entry:
  try:
    kind = gguf.GGMLQuantizationType(kind)
  except ValueError:
    raise ValueError(
      f"the tensor {name!r:.80} is of type {kind}, which is unknown"
    ) from None
  block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
  if shape[-1] % block:
    raise ValueError(
      f"the rows of the tensor {name!r:.80} are no blocks of {block}: {shape}"
    )
  row_bytes = shape[-1] // block * block_bytes
  end = start + math.prod(shape[:-1]) * row_bytes
  if end > size:
    raise ValueError(
      f"the file is cut short or damaged, the tensor {name!r:.80} ends at byte "
      f"{end} of {size}"
    )
  return Entry(kind=kind, shape=shape, start=start, row_bytes=row_bytes)


def read(
  header: Header, name: str, index: tuple[slice, ...] = ()
) -> np.ndarray:
  """A part of a tensor, dequantised: only the rows of the part are read.

  Args:
    header: of the file.
    name: of the tensor.
    index: the part, one slice an axis; `()` is all of it.

  Returns:
    The part: float32, or what else the file holds unquantised.
  """
  entry = header.tensors[name]
  *rows, _ = entry.shape
  raw = _raw(header, entry)
  if not rows:  # a vector is one row
    return gguf.quants.dequantize(raw, entry.kind)[index]
  outer, inner = index[: len(rows)], index[len(rows) :]
  raw = np.ascontiguousarray(raw[outer])
  return gguf.quants.dequantize(raw, entry.kind)[(..., *inner)]


def _raw(header: Header, entry: Entry) -> np.ndarray:
  """A tensor's bytes, by rows, not yet read."""
  shape = (*entry.shape[:-1], entry.row_bytes)
  return np.memmap(header.path, mode="r", offset=entry.start, shape=shape)


# Bits of the numbers of types that have one scale a block, and no more.
SCALED = {"Q8_0": 8, "Q4_0": 4}


def parts(
  header: Header, name: str, rows: slice
) -> tuple[np.ndarray, np.ndarray]:
  """The numbers and scales of some rows of a matrix of a `SCALED` type.

  A block of 32 is a float16 and then 32 bytes; or 16 bytes, whose lower halves
  are the first 16 numbers, each 8 above what it is.

  Args:
    header: of the file.
    name: of the matrix, `[n, D]`.
    rows: which.

  Returns:
    `i8[n, D]` and `f32[n, D / 32]`.
  """
  entry = header.tensors[name]
  raw = _raw(header, entry)[rows]
  blocks = np.ascontiguousarray(raw).reshape(*raw.shape[:1], -1, _size(entry))
  scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
  numbers = blocks[..., 2:]
  if SCALED[entry.kind.name] == 4:
    numbers = np.concatenate([numbers & 15, numbers >> 4], axis=-1) - 8
  numbers = np.ascontiguousarray(numbers, np.uint8).view(np.int8)
  return numbers.reshape(len(raw), -1), scales.astype(np.float32)


def _size(entry: Entry) -> int:
  """Bytes of a block."""
  return gguf.GGML_QUANT_SIZES[entry.kind][1]
