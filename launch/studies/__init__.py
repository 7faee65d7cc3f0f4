"""Studies of rules and theory: each a command, `launch.studies.X`."""

import pathlib
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from launch import cli


def read_arrays(path: str, names: Sequence[str]) -> dict[str, np.ndarray]:
  """Arrays of numbers in an .npz file, by their names.

  Raises:
    UserError: if there is no such file, or it lacks one of them.
  """
  if not pathlib.Path(path).is_file():
    raise cli.UserError(f"no such file: {path}")
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = dict(file)
  except (
    ValueError, TypeError, EOFError, AttributeError, zipfile.BadZipFile,
    zlib.error,
  ):  # fmt: skip
    raise cli.UserError(f"{path} is not an .npz file of numbers") from None
  if missing := [name for name in names if name not in arrays]:
    raise cli.UserError(
      f"{path} must have arrays {', '.join(names)}: {', '.join(missing)} "
      f"missing, got {sorted(arrays)}"
    )
  for name in names:
    if arrays[name].dtype.kind not in "fiu":
      raise cli.UserError(f"{name} in {path} must be numbers")
  return {name: arrays[name] for name in names}
