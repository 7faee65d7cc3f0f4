"""Files of sub-layers that are skipped.

They are JSON, {"skip_attention": [2, 3], "skip_mlp": [3], ...}; what else is
in them is for people (`launch.layer_search` writes how the set was found).
"""

import json
import pathlib

from models.networks.transformer import SkippedLayers


def read(path: str) -> SkippedLayers:
  """The set of a file.

  Raises:
    ValueError: if the file holds no such set, or an empty one.
    FileNotFoundError: if the file is not there.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(f"no such file of layers to skip: {path}")
  try:
    record = json.loads(file.read_text("utf-8"))
    sets = [record["skip_attention"], record["skip_mlp"]]
  except (ValueError, TypeError, LookupError):
    sets = [None]
  for one in sets:
    if not isinstance(one, list) or any(type(i) is not int for i in one):
      raise ValueError(
        f'{path} must be JSON like {{"skip_attention": [2], "skip_mlp": []}}'
      )
  if not any(sets):
    raise ValueError(
      f"{path} skips nothing: the whole target would draft for itself "
      "(launch.layer_search finds what to skip)"
    )
  return SkippedLayers(*(tuple(sorted(set(one))) for one in sets))


def as_json(skipped: SkippedLayers) -> dict[str, list[int]]:
  """The JSON that `read` reads."""
  return {
    "skip_attention": sorted(skipped.attention),
    "skip_mlp": sorted(skipped.mlp),
  }
