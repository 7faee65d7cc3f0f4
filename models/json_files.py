"""JSON files of checkpoints, which hold an object or are an error."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any


def read_object(path: pathlib.Path) -> Mapping[str, Any]:
  """What a file holds.

  Raises:
    FileNotFoundError: if it is not there.
    ValueError: if it is no JSON, or no object.
  """
  if not path.is_file():
    raise FileNotFoundError(
      f"there is no {path.name} in {path.parent}: expected a checkpoint in "
      "Hugging Face's format"
    )
  try:
    found = json.loads(path.read_text("utf-8"))
  except (ValueError, RecursionError) as error:  # of bad UTF-8, too deep
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(found, Mapping):
    raise ValueError(f"{path} must hold a JSON object, got {found!r:.40}")
  return found
