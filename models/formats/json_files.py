"""Reads objects in JSON files, and rejects unknown keys."""

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any


def read_object(path: pathlib.Path) -> Mapping[str, Any]:
  """Reads the object in a file.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is not JSON, or not an object.
  """
  if not path.is_file():
    raise FileNotFoundError(
      f"there is no {path.name} in {path.parent}: expected a checkpoint in "
      "Hugging Face's format"
    )
  try:
    content = json.loads(path.read_text("utf-8"))
  except (ValueError, RecursionError) as error:  # also bad UTF-8, deep nesting
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(content, Mapping):
    raise ValueError(f"{path} must hold a JSON object, got {content!r:.40}")
  return content


def refuse_unknown(
  given: Mapping[str, Any], known: Collection[str], what: str = "settings"
) -> None:
  """Raises ValueError for unknown keys, except null and private ones.

  `known` keys are read, or change nothing; `what` names them in the message.
  """
  unknown = sorted(
    key
    for key, value in given.items()
    if key not in known and value is not None and not key.startswith("_")
  )
  if unknown:
    raise ValueError(f"unknown {what}: {', '.join(unknown)}")


def agreed(values: Mapping[str, Any]) -> Any:
  """The value of a setting that may be in several places, by their names.

  None if no place has one; raises ValueError if two differ.
  """
  given = {name: value for name, value in values.items() if value is not None}
  first = next(iter(given.values()), None)
  if any(type(v) is not type(first) or v != first for v in given.values()):
    each = ", ".join(f"{name} {value!r:.60}" for name, value in given.items())
    raise ValueError(f"{' and '.join(given)} must agree, got {each}")
  return first


def indexed_files(index: pathlib.Path) -> list[pathlib.Path]:
  """The files that an index of tensors names.

  Raises:
    FileNotFoundError: if one is missing.
  """
  names = read_object(index)["weight_map"].values()
  files = [index.parent / name for name in sorted({*names})]
  if missing := [file.name for file in files if not file.is_file()]:
    raise FileNotFoundError(f"{index} names {missing}, which are missing")
  return files
