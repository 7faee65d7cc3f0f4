"""Draft heads as they are published: which they are, and their parameters.

A directory with a `config.json` and tensors tells by itself what it is: an
EAGLE head of any generation (`eagle_format`), Medusa's or blockwise ones
(`medusa_format`), DFlash's blocks (`dflash_format`), a Gemma 4's assistant
(`assistant_format`), or one of multi-token prediction (`mtp_format`), which a
target's own files may hold too.

The formats differ in how layers are numbered whose features are read, in where
draft tokens' ids are offsets, and in switches; here they become one form. What
is not known is an error, and so is every tensor that is left over, missing or
of another shape. The formats were tested on synthetic files; no published
checkpoint was.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from models import head_shapes
from models.formats import (
  assistant_format,
  dflash_format,
  eagle_format,
  head_files,
  json_files,
  medusa_format,
  mtp_format,
)
from models.formats.head_files import Opened, Place
from models.formats.huggingface_config import packing_of
from models.formats.weights import CheckpointError, Tensor
from models.head_shapes import HeadModule, HeadShape, Target
from models.networks.gemma_assistant import Assistant
from models.networks.transformer import Features
from models.sharding import Sharding, num_parts

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
  for ending in ("pt", "safetensors"):
    if (path / f"medusa_lm_head.{ending}").is_file():
      return True
  file = path / "config.json"
  if not file.is_file():
    return False
  try:
    config = json_files.read_object(file)
  except ValueError:
    return False
  if _says_head(config):
    return True
  try:
    with contextlib.ExitStack() as stack:
      names = set(head_files.normal_names(head_files.open_tensors(path, stack)))
  except (ValueError, FileNotFoundError):
    return False
  return "fc.weight" in names or "heads.0.lm_head.weight" in names


def shape(
  config: Mapping[str, Any],
  target: Target,
  tensors: Mapping[str, Tensor] | None = None,
  *,
  kind: str | None = None,
) -> HeadShape:
  """Shape of the head of a configuration.

  Args:
    config: what its `config.json` holds.
    target: the model that it drafts for.
    tensors: by the names of the normal form; None if there are none to look at.
    kind: what it is said to be, where the configuration alone does not tell.

  Raises:
    ValueError: for formats and switches that are not known, or a head that was
      made for another target.
  """
  if dflash_format.is_one(config):
    return dflash_format.shape(config, target)
  if assistant_format.is_one(config):
    return assistant_format.shape(config, target)
  if mtp_format.is_one(config):
    return mtp_format.shape(config, target)
  if config.get("model_type") == "blockwise":
    return medusa_format.blockwise_shape(config, target)
  if (
    "medusa_num_heads" in config
    or "medusa" in (kind, config.get("model_type"))
    or any(name.startswith("heads.") for name in tensors or ())
  ):
    return medusa_format.shape(config, target, tensors)
  third = kind == "eagle3" or "draft_vocab_size" in config
  return eagle_format.shape(
    config, target, tensors, generation=3 if third else 1
  )


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
  with contextlib.ExitStack() as stack:
    with _said_of(path):
      return _opened(path, target, stack, of_target, compared=False).shape


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
  with contextlib.ExitStack() as stack, _said_of(path):
    opened = _opened(path, target, stack, of_target)
    if place is not None:
      config = opened.shape.config
      place.check(config.even_sizes())
      parts = num_parts(place.sharding, place.mesh)
      config, sharding = config.cut(place.sharding, parts)
      place = dataclasses.replace(place, sharding=sharding)
      cut = dataclasses.replace(opened.shape, config=config)
      opened = dataclasses.replace(opened, shape=cut)
    module = head_files.fill(opened, target, dtype=dtype, place=place)
    if isinstance(module, Assistant):
      assistant_format.order(module, opened.tensors)
  return Head(
    module=module,
    features=opened.shape.features,
    sharding=place and place.sharding,
  )


def _opened(
  path: pathlib.Path,
  target: Target,
  stack: contextlib.ExitStack,
  of_target: bool,
  *,
  compared: bool = True,
) -> Opened:
  """The head in a directory, opened."""
  raw = head_files.open_tensors(path, stack)
  file = path / "config.json"
  config = json_files.read_object(file) if file.is_file() else {}
  if of_target or mtp_format.is_one(config):
    if of_target and (packing := packing_of(config)) is not None:
      raw = packing.joined(raw)
    return mtp_format.opened(config, raw, target, compared=compared)
  tensors = head_files.normal_names(raw)
  if assistant_format.is_one(config):
    return assistant_format.opened(config, tensors, target)
  described = shape(config, target, tensors)
  if described.config.kind in ("eagle", "eagle3"):
    return eagle_format.opened(config, tensors, described)
  if described.config.kind == "dflash":
    return dflash_format.opened(tensors, described)
  return medusa_format.opened(tensors, described)


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


def _says_head(config: Mapping[str, Any]) -> bool:
  """True if a configuration says that it is a head's."""
  names = config.get("architectures")
  names = names if isinstance(names, list) else []
  return (
    "speculators_model_type" in config
    or "medusa_num_heads" in config
    or "eagle_config" in config
    or dflash_format.is_one(config)
    or assistant_format.is_one(config)
    or any(
      word in str(name).lower()
      for name in names
      for word in ("eagle", "medusa", "dflash")
    )
    or config.get("model_type") in ("medusa", "eagle", "blockwise")
  )
