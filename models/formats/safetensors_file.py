"""Safetensors files: reading tensors, floats of eight bits too, and writing.

The package has none of these for NumPy. A file begins with the length of its
header, which is JSON: the type, the shape and the bytes of every tensor. It is
one that the package has opened, and so has checked.
"""

import contextlib
import functools
import json
import pathlib
import struct
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from models.formats.weights import Tensor

_FLOAT8 = {"F8_E4M3": jnp.float8_e4m3fn, "F8_E8M0": jnp.float8_e8m0fnu}


def open_tensors(
  path: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, Tensor]:
  """The tensors by their names, not yet read; `stack` closes the file.

  Raises:
    ValueError: if it cannot be read.
  """
  try:
    file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
  except (safetensors.SafetensorError, OSError) as error:
    raise ValueError(f"cannot read {path} as safetensors: {error}") from error
  tensors = {}
  for name in file.keys():
    part = file.get_slice(name)
    kind = part.get_dtype()
    float8 = functools.partial(_float8, path, name)
    tensors[name] = Tensor(
      name=name,
      shape=tuple(part.get_shape()),
      kind=kind,
      read=float8 if kind in _FLOAT8 else functools.partial(_read, file, name),
    )
  return tensors


def save(
  directory: str,
  settings: Mapping[str, Any],
  tensors: Mapping[str, np.ndarray],
  *,
  dtype,
  more: Callable[[str], None] = lambda folder: None,
) -> None:
  """Writes `config.json` and `model.safetensors`.

  Files are written elsewhere first and then renamed, `config.json` last: a
  directory without one is incomplete.

  Args:
    directory: created if need be; files of the same names are replaced.
    settings: what `config.json` is to hold.
    tensors: by their names in the file.
    dtype: of the floating ones: float32, bfloat16 or float16.
    more: writes further files into the folder that it is given.

  Raises:
    ValueError: if the dtype is another one.
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
    more(temporary)
    (new / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (path / "config.json").unlink(missing_ok=True)
    for file in sorted(new.iterdir(), key=lambda f: f.name == "config.json"):
      file.chmod(0o644)
      file.replace(path / file.name)


def _read(file: Any, name: str, index: tuple[slice, ...]) -> np.ndarray:
  return file.get_slice(name)[index] if index else file.get_tensor(name)


def _float8(
  path: pathlib.Path, name: str, index: tuple[slice, ...]
) -> np.ndarray:
  header, begin = _header(path, path.stat().st_mtime_ns)
  entry = header[name]
  whole = np.memmap(
    path,
    mode="r",
    offset=begin + entry["data_offsets"][0],
    shape=tuple(entry["shape"]),
  )
  return np.array(whole[index]).view(_FLOAT8[entry["dtype"]])


@functools.lru_cache(maxsize=8)
def _header(path: pathlib.Path, time: int) -> tuple[dict, int]:
  """Header of a file: its tensors, and where their bytes begin."""
  del time  # of the last change: a part of the cache's key
  with path.open("rb") as file:
    (size,) = struct.unpack("<Q", file.read(8))
    return json.loads(file.read(size)), 8 + size
