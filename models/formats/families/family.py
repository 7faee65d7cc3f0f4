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
  """A `config.json` with its defaults, which notes what is asked of it.

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
  """Layout of a parameter in a checkpoint's tensor.

  Attributes:
    shape: of the tensor, given the parameter's.
    take: the parameter, given the tensor and the model's configuration.
    rows: of the tensor, given that, where its first axis does not follow from
      the parameter's shape.
    of_parts: whether numbers in few bits and their scales lie so too.
  """

  shape: Callable[[tuple[int, ...]], tuple[int, ...]]
  take: Callable[[np.ndarray, TransformerConfig], np.ndarray]
  rows: Callable[[TransformerConfig], int] | None = None
  of_parts: bool = False


# Both are their own inverse, and leave vectors as they are.
AS_IS = Layout(lambda s: s, lambda x, c: x, of_parts=True)
TRANSPOSED = Layout(lambda s: s[::-1], lambda x, c: x.T)
# Of all experts, the transpose of each.
TURNED = Layout(
  lambda s: (s[0], s[2], s[1]), lambda x, c: x.swapaxes(1, 2), of_parts=True
)


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


@dataclasses.dataclass(frozen=True)
class Joined:
  """A module whose weight is two tensors in llama.cpp's files.

  Attributes:
    parts: names that Hugging Face would give the modules of both.
    shape: of the whole, given those of both.
    take: the whole, given both.
  """

  parts: tuple[str, str]
  shape: Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]
  take: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _none(name: str, config: TransformerConfig) -> bool:
  """No tensor is left out: the default of `Family.left_out`."""
  del name, config
  return False


def _as_they_are(name: str, config: TransformerConfig) -> None:
  """Rows that llama.cpp's converter leaves where they are."""
  del name, config


def _nothing(metadata: Mapping[str, Any], has: Callable[..., bool]) -> dict:
  """No settings beyond `Gguf.keys`: the default of `Gguf.settings`."""
  del metadata, has
  return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gguf:
  """The family's files in llama.cpp's format.

  Attributes:
    architecture: llama.cpp's name of it.
    keys: keys of the metadata, after that name, and of `config.json`.
    optional: those that may be missing, beside the usual ones.
    also: keys of the metadata that `settings` reads.
    by_layer: those of them that are a list, with a value for every layer.
    prefix: of tensors' names in Hugging Face's files.
    tensors, layouts: those of `Family` that are others, where tensors that are
      one in Hugging Face's files are several.
    joined: modules whose weights are two tensors of three axes.
    settings: more of `config.json`, from the metadata after the architecture's
      name and from the tensors.
    rows: where the rows of a module's tensors lie that llama.cpp's converter
      has moved, given the module's last name and the configuration; None if
      they are as they were.
    transposed: last names of modules whose matrices lie the other way around.
    row: last names of modules whose matrices of one row are vectors there.
    plus_one: one was added to the weights of all norms.
    rotary: channels that rotate: "all", "part" (the file says how many) or
      None.
    factors: the file may hold `rope_freqs.weight`, which frequencies are
      divided by: those of all layers, "all", or as `settings` says.
  """

  architecture: str
  keys: Mapping[str, str]
  optional: frozenset[str] = frozenset()
  also: frozenset[str] = frozenset()
  by_layer: frozenset[str] = frozenset()
  prefix: str = "model."
  tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
  layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
  joined: Mapping[str, Joined] = dataclasses.field(default_factory=dict)
  settings: Callable[[Mapping[str, Any], Tensors], dict] = _nothing
  rows: Callable[[str, TransformerConfig], np.ndarray | None] = _as_they_are
  transposed: tuple[str, ...] = ()
  row: tuple[str, ...] = ()
  plus_one: bool = False
  rotary: str | None = "all"
  factors: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A family of models: its configuration, tensors and GGUF files.

  Attributes:
    name: `model_type`.
    read: the configuration of a `config.json`. Raises ValueError for settings
      that are missing, malformed or not supported.
    tensors: modules of `models.networks.transformer` and the checkpoint's names
      for them, without a prefix; # is a layer's number. Or parameters and the
      tensors' whole names, where * is an expert's number: all of them are one.
    layouts: of modules or parameters whose tensors hold more than one, or lie
      the other way around.
    defaults: what transformers assumes for keys left out.
    aliases: keys that may stand for others, and what these are.
    fixed: keys that must have this value if they are there at all.
    harmless: keys that change nothing in this family, beside those of all.
    quantised: `quant_method`s of `quantization_config` whose tensors are read.
    left_out: whether a tensor, by its name without a prefix, is of no use to
      the model of a configuration.
    within: `model_type` of multimodal models that hold one of the family in
      their `text_config`, and settings that count whatever that says; nothing
      else of them is read.
    gguf: its GGUF files, if they are read.
  """

  name: str
  read: Callable[[Settings], TransformerConfig]
  tensors: Mapping[str, str]
  layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  harmless: frozenset[str] = frozenset()
  quantised: frozenset[str] = frozenset()
  left_out: Callable[[str, TransformerConfig], bool] = _none
  within: Mapping[str, Mapping[str, Any]] = dataclasses.field(
    default_factory=dict
  )
  gguf: Gguf | None = None
