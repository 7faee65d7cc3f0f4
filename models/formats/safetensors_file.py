"""Reads tensors of safetensors files in parts, and writes such files.

A file begins with the length of its JSON header, which has the type, shape and
byte range of every tensor. The package checks the header; since its NumPy
reader has no 8-bit floats, the bytes are memory-mapped here.
"""

import functools
import json
import pathlib
import struct
import tempfile
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from models.formats.weights import Index, Tensor

_TYPES = {
  "F64": np.float64, "F32": np.float32, "F16": np.float16,
  "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
  "F8_E8M0": jnp.float8_e8m0fnu, "I64": np.int64, "I32": np.int32,
  "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


def open_tensors(path: pathlib.Path) -> dict[str, Tensor]:
  """Opens the tensors of a file, by name, without reading them.

  Raises:
    ValueError: if it cannot be read.
  """
  try:
    with safetensors.safe_open(path, framework="numpy"):
      pass
  except (safetensors.SafetensorError, OSError) as error:
    raise ValueError(f"cannot read {path} as safetensors: {error}") from error
  with path.open("rb") as file:
    (size,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(size))
  header.pop("__metadata__", None)
  return {
    name: Tensor(
      name=name,
      shape=tuple(entry["shape"]),
      kind=entry["dtype"],
      read=functools.partial(_read, path, 8 + size, entry),
    )
    for name, entry in header.items()
  }


def _read(
  path: pathlib.Path, begin: int, entry: Mapping[str, Any], index: Index
) -> np.ndarray:
  whole = np.memmap(
    path,
    mode="r",
    offset=begin + entry["data_offsets"][0],
    shape=tuple(entry["shape"]),
    dtype=_TYPES[entry["dtype"]],
  )
  return np.array(whole[index])


def save(
  directory: str,
  settings: Mapping[str, Any],
  tensors: Mapping[str, np.ndarray],
  *,
  dtype,
) -> None:
  """Writes `config.json` and `model.safetensors`.

  Files are written to a temporary folder and then renamed, `config.json` last:
  a directory without one is incomplete.

  Args:
    directory: created if need be; files of the same names are replaced.
    settings: the contents of `config.json`.
    tensors: by name.
    dtype: dtype of floating-point tensors: float32, bfloat16 or float16.

  Raises:
    ValueError: for another dtype.
  """
  dtype = jnp.dtype(dtype)
  if dtype.name not in ("float32", "bfloat16", "float16"):
    raise ValueError(
      f"dtype must be float32, bfloat16 or float16, got {dtype.name}"
    )
  arrays = {
    name: np.ascontiguousarray(
      x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    )
    for name, x in tensors.items()
  }
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as temporary:
    new = pathlib.Path(temporary)
    safetensors.numpy.save_file(
      arrays, new / "model.safetensors", metadata={"format": "pt"}
    )
    (new / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (path / "config.json").unlink(missing_ok=True)
    for file in sorted(new.iterdir(), key=lambda f: f.name == "config.json"):
      file.chmod(0o644)
      file.replace(path / file.name)
