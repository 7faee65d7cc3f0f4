"""Objects of JSON files, and keys in them that nobody reads."""

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any


def read_object(path: pathlib.Path) -> Mapping[str, Any]:
  """The object in a file.

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
    content = json.loads(path.read_text("utf-8"))
  except (ValueError, RecursionError) as error:  # of bad UTF-8, too deep
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(content, Mapping):
    raise ValueError(f"{path} must hold a JSON object, got {content!r:.40}")
  return content


def refuse_unknown(
  given: Mapping[str, Any], known: Collection[str], what: str = "settings"
) -> None:
  """Raises ValueError for keys that are not known, but null and private ones.

  Keys that are `known` are read, or change nothing; `what` names them.
  """
  unknown = sorted(
    key
    for key, value in given.items()
    if key not in known and value is not None and not key.startswith("_")
  )
  if unknown:
    raise ValueError(f"{what} that are not known: {', '.join(unknown)}")


def agreed(said: Mapping[str, Any]) -> Any:
  """The one value of a setting that may stand in several places.

  None if none of the places, by their names, has one; ValueError if two differ.
  """
  given = {name: value for name, value in said.items() if value is not None}
  first = next(iter(given.values()), None)
  if any(type(v) is not type(first) or v != first for v in given.values()):
    each = ", ".join(f"{name} {value!r:.60}" for name, value in given.items())
    raise ValueError(f"{' and '.join(given)} must agree, got {each}")
  return first


def indexed_files(index: pathlib.Path) -> list[pathlib.Path]:
  """The files beside an index of tensors that it names.

  Raises:
    FileNotFoundError: if one is not there.
  """
  names = read_object(index)["weight_map"].values()
  files = [index.parent / name for name in sorted({*names})]
  if missing := [file.name for file in files if not file.is_file()]:
    raise FileNotFoundError(f"{index} names {missing}, which are not there")
  return files
