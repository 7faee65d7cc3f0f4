"""Which sub-layers are skipped: a config's own, or a file's.

The file is JSON, {"skip_attention": [2, 3], "skip_mlp": [3], ...}; what else is
in it is for people (`launch.layer_search` writes how the set was found).
"""

import json
import pathlib

import ml_collections

from models.networks.transformer import SkippedLayers


def of(config: ml_collections.ConfigDict) -> SkippedLayers:
  """The sub-layers that a config skips: those of its file, if it names one.

  Raises:
    ValueError: if the file holds no such set.
    FileNotFoundError: if the file is not there.
  """
  own = SkippedLayers(
    attention=tuple(config.skip_attention), mlp=tuple(config.skip_mlp)
  )
  return read(config.skip_layers) if config.skip_layers else own


def read(path: str) -> SkippedLayers:
  """The set of a file; raises as `of`."""
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(f"no such file of layers to skip: {path}")
  try:
    found = json.loads(file.read_text("utf-8"))
    sets = [found["skip_attention"], found["skip_mlp"]]
  except (ValueError, TypeError, LookupError):
    sets = [None]
  for one in sets:
    if not isinstance(one, list) or any(type(i) is not int for i in one):
      raise ValueError(
        f'{path} must be JSON like {{"skip_attention": [2], "skip_mlp": []}}'
      )
  return SkippedLayers(*(tuple(sorted(set(one))) for one in sets))


def as_json(skipped: SkippedLayers) -> dict[str, list[int]]:
  """What `read` reads."""
  return {
    "skip_attention": sorted(skipped.attention),
    "skip_mlp": sorted(skipped.mlp),
  }
