"""`Family`: reads the files of a family of decoder-only models.

A family is a `model_type` of Hugging Face's `config.json`, in one file of this
folder: it translates the configuration into layers, maps tensors to parameters,
and, if llama.cpp supports the family, does the same for GGUF files.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from models.networks.description import TransformerConfig


class Settings(Mapping[str, Any]):
  """A `config.json`, or GGUF metadata, that records which keys are read.

  Args:
    given: the file's contents.
    defaults: transformers' values for missing keys.
  """

  def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]):
    self._values = {**defaults, **given}
    self.used: set[str] = set()

  def __getitem__(self, key: str) -> Any:
    self.used.add(key)
    return self._values[key]

  def __iter__(self) -> Iterator[str]:
    return iter(self._values)

  def __len__(self) -> int:
    return len(self._values)


@dataclasses.dataclass(frozen=True)
class Layout:
  """The layout of a parameter in a tensor.

  Attributes:
    take: maps a tensor and the model's configuration to the parameter.
    shape: maps the parameter's shape and the configuration to the tensor's.
    of_parts: whether `take` applies to quantized values and scales, too.
  """

  take: Callable[[np.ndarray, TransformerConfig], np.ndarray]
  shape: Callable[[tuple[int, ...], TransformerConfig], tuple[int, ...]] = (
    lambda shape, config: shape
  )
  of_parts: bool = False


# Both are their own inverse and do not change vectors.
AS_IS = Layout(lambda x, c: x, of_parts=True)
TRANSPOSED = Layout(lambda x, c: x.T, lambda s, c: s[::-1])
# Swaps inputs and outputs of each expert.
SWAPPED = Layout(
  lambda x, c: x.swapaxes(1, 2),
  lambda s, c: (s[0], s[2], s[1]),
  of_parts=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """Maps a model's parameters to tensors.

  Attributes:
    name: the family's name, for messages.
    tensors: maps modules of `models.networks.transformer` to their names in
      checkpoints, without prefix, where # is a layer's number; or parameters to
      full tensor names. * is an expert's number: all experts are one parameter.
    layouts: layouts of modules or parameters that are stored differently.
  """

  name: str
  tensors: Mapping[str, str]
  layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Tensors:
  """The tensors of a GGUF file, for `Gguf.settings`.

  Attributes:
    shapes: shapes by llama.cpp's names.
    read: reads a tensor by name.
  """

  shapes: Mapping[str, tuple[int, ...]]
  read: Callable[[str], np.ndarray]

  def __call__(self, *names: str, layer: int = 0) -> bool:
    """True if a layer has one of these tensors, or modules with a bias."""
    wanted = {f"blk.{layer}.{name}" for name in names}
    return bool((wanted | {f"{name}.bias" for name in wanted}) & {*self.shapes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gguf:
  """The conventions of a family's GGUF files.

  Attributes:
    architecture: llama.cpp's name.
    keys: maps keys of the metadata, without the architecture's name, to keys of
      `config.json`.
    settings: derives other settings of `config.json` from the metadata and the
      tensors. Keys that it reads count as known.
    tensors, layouts: entries that override those of `Family`.
  """

  architecture: str
  keys: Mapping[str, str]
  settings: Callable[[Mapping[str, Any], Tensors], dict] = (
    lambda metadata, tensors: {}
  )
  tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
  layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family(Table):
  """A family of models: its configuration, tensors and GGUF files.

  Attributes:
    name: `model_type`.
    tensors, layouts: as for `Table`.
    read: translates a `config.json`. Raises ValueError for settings that are
      missing, malformed or not supported.
    defaults: transformers' values for missing keys.
    fixed: keys that must have this value or be missing.
    harmless: other keys that change nothing in this family.
    quantized: `quant_method`s of `quantization_config` that it handles itself.
    ignores: whether to ignore a tensor, given its name without prefix.
    multimodal: `model_type`s of models with a `text_config` of this family, and
      settings that override it; the rest of those models is ignored.
    gguf: its GGUF files; None if not supported.
  """

  read: Callable[[Settings], TransformerConfig]
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  harmless: frozenset[str] = frozenset()
  quantized: frozenset[str] = frozenset()
  ignores: Callable[[str, TransformerConfig], bool] = lambda name, config: False
  multimodal: Mapping[str, Mapping[str, Any]] = dataclasses.field(
    default_factory=dict
  )
  gguf: Gguf | None = None
