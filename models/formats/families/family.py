"""`Family`, a family of decoder-only models as the readers of files see it.

A family is a `model_type` of Hugging Face's `config.json`, and one file of this
folder: what the configuration says of the layers, which tensor is which
parameter, and, where llama.cpp has the family, what a GGUF file calls them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from models.networks.description import TransformerConfig


class Settings(Mapping[str, Any]):
  """A `config.json`, or metadata of GGUF, which notes what is asked of it.

  Args:
    given: the file's contents.
    defaults: what transformers assumes for keys left out.
  """

  def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]):
    self._values = {**defaults, **given}
    self.asked: set[str] = set()

  def __getitem__(self, key: str) -> Any:
    self.asked.add(key)
    return self._values[key]

  def __iter__(self) -> Iterator[str]:
    return iter(self._values)

  def __len__(self) -> int:
    return len(self._values)


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a tensor holds a parameter.

  Attributes:
    take: the parameter, given the tensor and the model's configuration.
    shape: of the tensor, given the parameter's and the configuration.
    of_parts: whether `take` fits quantized numbers and their scales too.
  """

  take: Callable[[np.ndarray, TransformerConfig], np.ndarray]
  shape: Callable[[tuple[int, ...], TransformerConfig], tuple[int, ...]] = (
    lambda shape, config: shape
  )
  of_parts: bool = False


# Both are their own inverse, and leave vectors as they are.
AS_IS = Layout(lambda x, c: x, of_parts=True)
TRANSPOSED = Layout(lambda x, c: x.T, lambda s, c: s[::-1])
# Of all experts, the transpose of each.
TURNED = Layout(
  lambda x, c: x.swapaxes(1, 2),
  lambda s, c: (s[0], s[2], s[1]),
  of_parts=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """The tensors that hold a model's parameters.

  Attributes:
    name: of the family, for messages.
    tensors: modules of `models.networks.transformer` and the checkpoint's names
      for them, without a prefix; # is a layer's number. Or parameters and the
      tensors' whole names, where * is an expert's number: all of them are one.
    layouts: of modules or parameters that tensors do not hold as they are.
  """

  name: str
  tensors: Mapping[str, str]
  layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Tensors:
  """Tensors of a GGUF file, as `Gguf.settings` asks for them.

  Attributes:
    shapes: by llama.cpp's names.
    read: one of them, by its name.
  """

  shapes: Mapping[str, tuple[int, ...]]
  read: Callable[[str], np.ndarray]

  def __call__(self, *names: str, layer: int = 0) -> bool:
    """True if a layer has one of these tensors, or the bias of a module."""
    wanted = {f"blk.{layer}.{name}" for name in names}
    return bool((wanted | {f"{name}.bias" for name in wanted}) & {*self.shapes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gguf:
  """The family's files in llama.cpp's format.

  Attributes:
    architecture: llama.cpp's name of it.
    keys: keys of the metadata, after that name, and of `config.json`.
    settings: more of `config.json`, from the metadata after the architecture's
      name and from the tensors. What it asks for is known.
    tensors, layouts: those of `Family` that are others in these files.
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
    tensors, layouts: as of `Table`.
    read: the configuration of a `config.json`. Raises ValueError for settings
      that are missing, malformed or not supported.
    defaults: what transformers assumes for keys left out.
    fixed: keys that must have this value if they are there at all.
    harmless: keys that change nothing in this family, beside those of all.
    quantized: `quant_method`s of `quantization_config` whose tensors are read.
    left_out: whether a tensor, by its name without a prefix, is of no use to
      the model of a configuration.
    within: `model_type` of multimodal models that hold one of the family in
      their `text_config`, and settings that count whatever that says; nothing
      else of them is read.
    gguf: its GGUF files, if they are read.
  """

  read: Callable[[Settings], TransformerConfig]
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  harmless: frozenset[str] = frozenset()
  quantized: frozenset[str] = frozenset()
  left_out: Callable[[str, TransformerConfig], bool] = lambda name, config: (
    False
  )
  within: Mapping[str, Mapping[str, Any]] = dataclasses.field(
    default_factory=dict
  )
  gguf: Gguf | None = None
