"""Draft heads as they are published: which they are, and their parameters.

A directory with a `config.json` and tensors tells by itself what it is: an
EAGLE head of any generation (`eagle_format`), Medusa's (`medusa_format`),
blocks of DFlash (`dflash_format`) or DSpark (`dspark_format`), a Gemma 4's
assistant (`assistant_format`), or one of multi-token prediction (`mtp_format`),
which a target's own files may hold too.

The formats differ in how layers are numbered whose features are read, in where
draft tokens' ids are offsets, and in switches; here they become one form. What
is not known is an error, and so is every tensor that is left over, missing or
of another shape. The formats were tested on synthetic files; no published
checkpoint was.
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
from models.formats.head_files import Opened, Place
from models.formats.huggingface_config import packing_of
from models.formats.weights import CheckpointError
from models.head_shapes import HeadModule, HeadShape, Target
from models.networks.transformer import Features
from models.sharding import Sharding, num_parts

# Those whose `config.json` tells them, in the order in which they are asked.
_FORMATS: tuple[Any, ...] = (
  dspark_format, dflash_format, assistant_format, mtp_format, medusa_format,
  eagle_format,
)  # fmt: skip
__all__ = ["Head", "Target", "describe", "is_head", "load", "shape"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
  """A head that is loaded.

  Attributes:
    module: its network, with its configuration.
    features: of the target, that it reads (`models.networks.transformer`).
    sharding: its rules on a mesh; None on one device.
  """

  module: HeadModule
  features: Features
  sharding: Sharding | None = None

  @property
  def kind(self) -> str:
    """One of `head_shapes.KINDS`, or "assistant"."""
    return self.module.config.kind

  def functions(self) -> tuple[Any, Any]:
    """Pure functions and their parameters; see `head_shapes.functions`."""
    return head_shapes.functions(self.module, sharding=self.sharding)

  def before_norms(self, num_layers: int) -> "Head":
    """An MTP head that reads hidden states before their norms, not after.

    Args:
      num_layers: of the target.
    """
    module: Any = nnx.merge(*nnx.split(self.module))
    module.config = dataclasses.replace(module.config, normed=False)
    return dataclasses.replace(self, module=module, features=(num_layers,))


def is_head(directory: str) -> bool:
  """True if a directory holds a head, and not a model of its own."""
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
  """The format that a configuration alone tells, or None."""
  return next((one for one in _FORMATS if one.is_one(config)), None)


def _has_medusa(names: Collection[str]) -> bool:
  return "lm_heads.0.weight" in names


def shape(
  config: Mapping[str, Any], target: Target, *, kind: str | None = None
) -> HeadShape:
  """Shape of the head of a configuration.

  Args:
    config: what its `config.json` holds.
    target: the model that it drafts for.
    kind: what it is said to be, where the configuration alone does not tell.

  Raises:
    ValueError: for formats and switches that are not known, or a head that was
      made for another target.
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
  """Shape of the head in a directory; none of its numbers is read.

  Args:
    directory, target, of_target: as of `load`.

  Raises:
    FileNotFoundError, ValueError: as `load`.
  """
  path = pathlib.Path(directory)
  with _said_of(path):
    return _opened(path, target, of_target).shape


def load(
  directory: str,
  target: Target,
  *,
  dtype=jnp.float32,
  place: Place | None = None,
  of_target: bool = False,
) -> Head:
  """Reads a head.

  Args:
    directory: where it is.
    target: the model that it drafts for.
    dtype: of parameters and activations, whatever the tensors' is.
    place: the devices that it is cut over, and how; None for one device.
    of_target: whether it is the MTP head in the target's own directory.

  Returns:
    The `Head`. Embedding and output projection are the target's own arrays
    where the head has none.

  Raises:
    FileNotFoundError: if a file is not there.
    ValueError: for formats and switches that are not known, or a head that was
      made for another target or cannot be cut so, or a target without one.
    CheckpointError: (a ValueError) if tensors are left over, missing or of
      another shape than they should be; it lists them all.
  """
  path = pathlib.Path(directory)
  with _said_of(path):
    opened = _opened(path, target, of_target)
    if place is not None:
      opened, place = _cut(opened, place)
    module = head_files.fill(opened, target, dtype=dtype, place=place)
  return Head(
    module=module,
    features=opened.shape.features,
    sharding=place and place.sharding,
  )


def _cut(opened: Opened, place: Place) -> tuple[Opened, Place]:
  """A head as the devices of a place hold it, and its rules on them."""
  config, parts = opened.shape.config, num_parts(place.sharding, place.mesh)
  if uneven := sorted({size for size in config.even_sizes() if size % parts}):
    raise ValueError(
      f"a head with sizes {uneven} cannot be cut over {parts} devices: give "
      "config.draft_devices"
    )
  config, sharding = config.cut(place.sharding, parts)
  shape = dataclasses.replace(opened.shape, config=config)
  return (
    dataclasses.replace(opened, shape=shape),
    dataclasses.replace(place, sharding=sharding),
  )


def _opened(path: pathlib.Path, target: Target, of_target: bool) -> Opened:
  """The head in a directory, opened."""
  raw, config = head_files.open_tensors(path), _config(path)
  if of_target and (packing := packing_of(config)) is not None:
    raw = packing.joined(raw)
  tensors = head_files.normal_names(raw)
  one = mtp_format if of_target else _of_config(config)
  if one is None:
    one = medusa_format if _has_medusa(tensors) else eagle_format
  if one in (mtp_format, assistant_format):
    return one.opened(config, tensors, target)
  more = () if one in (dspark_format, dflash_format) else (tensors,)
  described = one.shape(config, target, *more)
  names = one.names(described.config)
  if one is eagle_format and eagle_format.is_tied(config, tensors):
    names["lm_head.weight"] = "embed_tokens.weight"
  return head_files.by_table(described, tensors, names, target)


@contextlib.contextmanager
def _said_of(path: pathlib.Path):
  """Errors say which head they are about."""
  try:
    yield
  except CheckpointError as error:
    if str(path) in str(error):
      raise
    raise CheckpointError(f"{error} (in {path})") from None
  except ValueError as error:
    raise ValueError(f"cannot use the head in {path}: {error}") from error
