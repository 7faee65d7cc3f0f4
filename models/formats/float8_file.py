"""Floats of eight bits in safetensors files; the package has none for NumPy.

A file begins with the length of its header, which is JSON: the type, the shape
and the bytes of every tensor. It is one that the package has opened, and so has
checked.
"""

import functools
import json
import pathlib
import struct

import jax.numpy as jnp
import numpy as np

TYPES = {"F8_E4M3": jnp.float8_e4m3fn, "F8_E8M0": jnp.float8_e8m0fnu}


def read(path: pathlib.Path, name: str, index: tuple[slice, ...]) -> np.ndarray:
  """A part of a tensor; all of it at `()`.

  Args:
    path: of the file.
    name: of a tensor of one of `TYPES`.
    index: the part, one slice an axis.
  """
  header, begin = _header(path, path.stat().st_mtime_ns)
  entry = header[name]
  whole = np.memmap(
    path,
    mode="r",
    offset=begin + entry["data_offsets"][0],
    shape=tuple(entry["shape"]),
  )
  return np.array(whole[index]).view(TYPES[entry["dtype"]])


@functools.lru_cache(maxsize=8)
def _header(path: pathlib.Path, time: int) -> tuple[dict, int]:
  """Header of a file: its tensors, and where their bytes begin."""
  del time  # of the last change: a part of the cache's key
  with path.open("rb") as file:
    (size,) = struct.unpack("<Q", file.read(8))
    return json.loads(file.read(size)), 8 + size
