"""Loads published draft heads: detects the format and reads the parameters.

The `config.json` and the tensors of a directory determine the kind: an EAGLE
head of any generation (`eagle_format`), Medusa (`medusa_format`), DFlash
(`dflash_format`), DSpark (`dspark_format`), a Gemma 4 assistant
(`assistant_format`), or multi-token prediction (`mtp_format`), which may also
be part of the target's own files.

The formats number feature layers differently, some store draft ids as offsets,
and each has its own switches; loading normalizes them. An unknown setting is an
error, as is an extra, missing or misshapen tensor. The formats were tested on
synthetic files, not on published checkpoints.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from models import head_shapes
from models.formats import (
  assistant_format,
  dflash_format,
  dspark_format,
  eagle_format,
  head_files,
  json_files,
  medusa_format,
  mtp_format,
)
from models.formats.head_files import HeadFiles, Place
from models.formats.huggingface_config import packing_of
from models.formats.weights import CheckpointError
from models.head_shapes import HeadModule, HeadShape, Target
from models.networks.transformer import Features
from models.sharding import Sharding, num_parts

# Formats that `config.json` can identify, tried in this order.
_FORMATS: tuple[Any, ...] = (
  dspark_format, dflash_format, assistant_format, mtp_format, medusa_format,
  eagle_format,
)  # fmt: skip
__all__ = ["Head", "Target", "describe", "is_head", "load", "shape"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
  """A loaded head.

  Attributes:
    module: its network, with its configuration.
    features: the target's features that it reads
      (`models.networks.transformer`).
    sharding: its sharding rules on a mesh; None on one device.
  """

  module: HeadModule
  features: Features
  sharding: Sharding | None = None

  @property
  def kind(self) -> str:
    """One of `head_shapes.KINDS`, or "assistant"."""
    return self.module.config.kind

  def functions(self) -> tuple[Any, Any]:
    """Its pure functions and parameters; see `head_shapes.functions`."""
    return head_shapes.functions(self.module, sharding=self.sharding)

  def before_norms(self, num_layers: int) -> "Head":
    """A copy of an MTP head that reads hidden states before the final norm.

    Args:
      num_layers: the target's number of layers.
    """
    module: Any = nnx.merge(*nnx.split(self.module))
    module.config = dataclasses.replace(module.config, normed=False)
    return dataclasses.replace(self, module=module, features=(num_layers,))


def is_head(directory: str) -> bool:
  """True if a directory holds a head rather than a full model."""
  path = pathlib.Path(directory)
  try:
    if _of_config(_config(path)) is not None:
      return True
    names = head_files.normal_names(head_files.open_tensors(path))
  except (ValueError, FileNotFoundError):
    return False
  return _has_medusa(names) or "fc.weight" in names


def _config(path: pathlib.Path) -> Mapping[str, Any]:
  file = path / "config.json"
  return json_files.read_object(file) if file.is_file() else {}


def _of_config(config: Mapping[str, Any]) -> Any:
  """The format that a configuration identifies, or None."""
  return next((one for one in _FORMATS if one.matches(config)), None)


def _has_medusa(names: Collection[str]) -> bool:
  return "lm_heads.0.weight" in names


def shape(
  config: Mapping[str, Any], target: Target, *, kind: str | None = None
) -> HeadShape:
  """The shape of the head that a configuration describes.

  Args:
    config: the contents of its `config.json`.
    target: the model that it drafts for.
    kind: its kind, in case the configuration does not identify it.

  Raises:
    ValueError: for unknown formats and switches, or a head for another target.
  """
  said = medusa_format if kind == "medusa" else eagle_format
  one = _of_config(config) or said
  if one is not eagle_format:
    return one.shape(config, target)
  third = kind in ("eagle3", "p_eagle") or "draft_vocab_size" in config
  return eagle_format.shape(config, target, generation=3 if third else 1)


def describe(
  directory: str, target: Target, *, of_target: bool = False
) -> HeadShape:
  """The shape of the head in a directory, without reading its weights.

  Args:
    directory, target, of_target: as for `load`.

  Raises:
    FileNotFoundError, ValueError: like `load`.
  """
  path = pathlib.Path(directory)
  with _naming_path(path):
    return _opened(path, target, of_target).shape


def load(
  directory: str,
  target: Target,
  *,
  dtype=jnp.float32,
  place: Place | None = None,
  of_target: bool = False,
) -> Head:
  """Loads a head.

  Args:
    directory: its directory.
    target: the model that it drafts for.
    dtype: dtype of parameters and activations, whatever the files have.
    place: mesh and sharding; None for one device.
    of_target: whether it is the MTP head in the target's own directory.

  Returns:
    The `Head`. It shares the target's embedding and output projection if it
    has none of its own.

  Raises:
    FileNotFoundError: if a file is missing.
    ValueError: for unknown formats and switches, a head for another target or
      one that cannot be sharded like this, or a target without a head.
    CheckpointError: (a ValueError) listing all extra, missing and misshapen
      tensors.
  """
  path = pathlib.Path(directory)
  with _naming_path(path):
    opened = _opened(path, target, of_target)
    if place is not None:
      opened, place = _cut(opened, place)
    module = head_files.fill(opened, target, dtype=dtype, place=place)
  return Head(
    module=module,
    features=opened.shape.features,
    sharding=place and place.sharding,
  )


def _cut(opened: HeadFiles, place: Place) -> tuple[HeadFiles, Place]:
  """The head with sizes and rules for the devices of a place."""
  config, parts = opened.shape.config, num_parts(place.sharding, place.mesh)
  if uneven := sorted({size for size in config.even_sizes() if size % parts}):
    raise ValueError(
      f"a head with sizes {uneven} cannot be split over {parts} devices: set "
      "config.draft_devices"
    )
  config, sharding = config.cut(place.sharding, parts)
  shape = dataclasses.replace(opened.shape, config=config)
  return (
    dataclasses.replace(opened, shape=shape),
    dataclasses.replace(place, sharding=sharding),
  )


def _opened(path: pathlib.Path, target: Target, of_target: bool) -> HeadFiles:
  """Opens the head in a directory."""
  raw, config = head_files.open_tensors(path), _config(path)
  if of_target and (packing := packing_of(config)) is not None:
    raw = packing.join(raw)
  tensors = head_files.normal_names(raw)
  one = mtp_format if of_target else _of_config(config)
  if one is None:
    one = medusa_format if _has_medusa(tensors) else eagle_format
  if one in (mtp_format, assistant_format):
    return one.open_head(config, tensors, target)
  more = () if one in (dspark_format, dflash_format) else (tensors,)
  described = one.shape(config, target, *more)
  names = one.names(described.config)
  if one is eagle_format and eagle_format.is_tied(config, tensors):
    names["lm_head.weight"] = "embed_tokens.weight"
  return head_files.by_table(described, tensors, names, target)


@contextlib.contextmanager
def _naming_path(path: pathlib.Path):
  """Adds the head's path to errors."""
  try:
    yield
  except CheckpointError as error:
    if str(path) in str(error):
      raise
    raise CheckpointError(f"{error} (in {path})") from None
  except ValueError as error:
    raise ValueError(f"cannot use the head in {path}: {error}") from error
