"""Reads the tensors of a `torch.save` file safely, without torch.

Such a file is a zip archive: a pickle that says which tensors there are, and
their bytes beside it. A pickle may name any function to be called; here it may
name those that rebuild a tensor, which are replaced by our own, and all else is
an error. So reading a file runs no code of it.
"""

import collections
import contextlib
import functools
import io
import math
import pathlib
import pickle
import zipfile
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.formats.weights import Tensor

_KINDS = {
  "HalfStorage": ("F16", np.dtype(np.float16)),
  "BFloat16Storage": ("BF16", np.dtype(jnp.bfloat16)),
  "FloatStorage": ("F32", np.dtype(np.float32)),
  "DoubleStorage": ("F64", np.dtype(np.float64)),
  "LongStorage": ("I64", np.dtype(np.int64)),
  "IntStorage": ("I32", np.dtype(np.int32)),
  "BoolStorage": ("BOOL", np.dtype(np.bool_)),
}
_MOST_PICKLE = 1 << 26  # bytes; names and shapes, no numbers


def open_tensors(
  path: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, Tensor]:
  """The tensors of a file, to be read when they are wanted.

  Args:
    path: of the file: a dictionary of tensors, as `torch.save(state_dict)`.
    stack: closes it.

  Returns:
    Each by its name.

  Raises:
    ValueError: if it is no such file, or holds anything but tensors.
  """
  try:
    archive = stack.enter_context(zipfile.ZipFile(path))
    (index,) = [n for n in archive.namelist() if n.endswith("/data.pkl")]
    if archive.getinfo(index).file_size > _MOST_PICKLE:
      raise ValueError("its index is too large")
    folder = index.removesuffix("data.pkl")
    order = f"{folder}byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
      raise ValueError("its bytes are not in little-endian order")
    content = _Reader(io.BytesIO(archive.read(index)), archive, folder).load()
    if not isinstance(content, dict) or not all(
      isinstance(k, str) and isinstance(v, _Rebuilt) for k, v in content.items()
    ):
      raise ValueError("it is no dictionary of tensors")
    return {name: rebuilt.tensor(name) for name, rebuilt in content.items()}
  except Exception as error:  # a torn or hostile pickle raises anything
    reason = " ".join(str(error).split()) or type(error).__name__
    raise ValueError(
      f"cannot read {path} as tensors that torch saved: {reason}"
    ) from error


class _Rebuilt:
  """A tensor that a pickle describes."""

  def __init__(self, storage, offset, shape, strides, *rest):
    del rest  # gradients and hooks
    self.storage, self.shape = storage, tuple(shape)
    whole = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
    # Strides of axes of length one say nothing.
    differs = [
      s != w
      for s, w, n in zip(strides, whole, self.shape, strict=True)
      if n != 1
    ]
    if any(differs) or offset < 0:
      raise ValueError(f"a tensor of strides {tuple(strides)} is not whole")
    self.offset = offset

  def tensor(self, name: str) -> Tensor:
    kind, dtype, read = self.storage
    size, start = math.prod(self.shape), self.offset * dtype.itemsize

    def values(index):
      try:
        raw = read()[start : start + size * dtype.itemsize]
      except (zipfile.BadZipFile, OSError) as error:  # a wrong checksum
        raise ValueError(f"the bytes of {name} are damaged: {error}") from error
      if len(raw) != size * dtype.itemsize:
        raise ValueError(f"the bytes of {name} are not all there")
      return np.frombuffer(raw, dtype).reshape(self.shape)[index]

    return Tensor(name=name, shape=self.shape, kind=kind, read=values)


_NAMES: dict[tuple[str, str], Any] = {
  # A function of our own: of a class a pickle could change attributes.
  ("torch._utils", "_rebuild_tensor_v2"): lambda *parts: _Rebuilt(*parts),
  ("collections", "OrderedDict"): collections.OrderedDict,
  **{("torch", kind): kind for kind in _KINDS},
}


class _Reader(pickle.Unpickler):
  """Reads what rebuilds tensors and refuses everything else."""

  def __init__(self, file, archive: zipfile.ZipFile, folder: str):
    super().__init__(file)
    self._archive, self._folder = archive, folder

  def find_class(self, module: str, name: str) -> Any:
    """Our replacement of an allowed name; ValueError for any other."""
    try:
      return _NAMES[module, name]
    except KeyError:
      raise ValueError(f"it asks for {module}.{name}") from None

  def persistent_load(self, reference: tuple) -> tuple:
    """A storage: its type, and how to read its bytes."""
    what, kind, key, *_ = reference
    if what != "storage" or kind not in _KINDS:
      raise ValueError(f"it refers to {what} of {kind}")
    name, dtype = _KINDS[kind]
    member = f"{self._folder}data/{key}"
    # As torch stores them: what is compressed could be of any size.
    if self._archive.getinfo(member).compress_type != zipfile.ZIP_STORED:
      raise ValueError(f"{member} is compressed")
    return name, dtype, functools.partial(self._archive.read, member)
