"""Reads the tensors of a `torch.save` file by torch, which runs no code of it.

`pip install torch` brings it; this project does not depend on it.
"""

import contextlib
import pathlib

import jax.numpy as jnp

from models.formats.weights import Tensor

_KINDS = {
  "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
  "int64": "I64", "int32": "I32", "bool": "BOOL",
}  # fmt: skip


def open_tensors(
  path: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, Tensor]:
  """The tensors of a file, to be read when they are wanted.

  Args:
    path: of the file: a dictionary of tensors, as `torch.save(state_dict)`.
    stack: unused, as the tensors themselves keep the file open.

  Returns:
    Each by its name.

  Raises:
    ValueError: if torch is not installed, or the file holds anything else.
  """
  del stack
  try:
    import torch
  except ImportError as error:
    raise ValueError(
      f"{path} was saved by torch, which reads it: pip install torch"
    ) from error
  try:
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {name: _tensor(torch, name, x) for name, x in content.items()}
  except Exception as error:  # a torn or hostile pickle raises anything
    reason = str(error).split(". ")[0].split("\n")[0] or type(error).__name__
    raise ValueError(
      f"cannot read {path} as tensors that torch saved: {reason}"
    ) from error


def _tensor(torch, name: str, tensor) -> Tensor:
  dtype = str(tensor.dtype).removeprefix("torch.")
  if dtype not in _KINDS:
    raise ValueError(f"{name} is {dtype}, and not one of {[*_KINDS]}")
  kind = _KINDS[dtype]
  if kind == "BF16":  # a type that torch does not give to NumPy
    values = tensor.detach().view(torch.int16).numpy().view(jnp.bfloat16)
  else:
    values = tensor.detach().numpy()
  return Tensor(
    name=name, shape=values.shape, kind=kind, read=values.__getitem__
  )
