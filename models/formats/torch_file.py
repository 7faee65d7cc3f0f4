"""Reads `torch.save` files with torch, without running code in them.

torch is not a dependency of this project; `pip install torch` if needed.
"""

import pathlib

from models.formats.weights import Tensor

_KINDS = {"float16": "F16", "float32": "F32", "int64": "I64", "bool": "BOOL"}


def open_tensors(path: pathlib.Path) -> dict[str, Tensor]:
  """The tensors of a file, by name; bfloat16 is read as float32.

  Raises:
    ValueError: if torch is not installed, or cannot read it as tensors.
  """
  try:
    import torch
  except ImportError as error:
    raise ValueError(
      f"{path} is a torch file; reading it needs torch: pip install torch"
    ) from error
  try:
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
  except Exception as error:  # a torn or hostile pickle raises anything
    reason = str(error).partition(". ")[0]
    raise ValueError(f"torch cannot read {path}: {reason}") from error
  tensors = {}
  for name, x in saved.items():
    # NumPy has no bfloat16.
    array = (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()
    kind = _KINDS.get(array.dtype.name, array.dtype.name)
    tensors[name] = Tensor(
      name=name, shape=array.shape, kind=kind, read=array.__getitem__
    )
  return tensors
