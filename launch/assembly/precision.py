"""Grammar of what weights and caches are stored in: `int8`, `int4(group=64)`.

`config.weights` is a call of `WEIGHTS`, and so is the argument `weights` of a
drafter that reads a model or a head. `FORMATS` are those that weights are
rounded to.
"""

from collections.abc import Callable
from typing import Literal

from models import checkpoints
from models.networks import quantized
from models.networks.quantized import Quantization
from specjax.calls import Grammar

Published = Literal["published"]


def _rounded(kind: str, words: str) -> Callable[..., Quantization]:
  """The call of a kind, whose groups are its own by default."""

  def call(
    *,
    group: int | None = quantized.DTYPES[kind].group,
    output: bool = True,
    embedding: bool = False,
    dense: bool = True,
  ) -> Quantization:
    return Quantization(
      dtype=kind, group=group, output=output, embedding=embedding, dense=dense
    )

  call.__doc__ = words
  return call


def published() -> Published:
  """As the files have them, where a format holds that; else as whole."""
  return "published"


def whole() -> None:
  """The config's dtype, whatever the files have."""


_NUMBERS = {
  "int8": "Integers of eight bits, with a scale for every output or group.",
  "int4": "Integers of four bits, with a scale for every group of inputs.",
  "fp8": "Floats of eight bits (e4m3), with a scale for every output or group.",
  "fp4": "Floats of four bits (e2m1), with a scale for every group of inputs.",
}
FORMATS = Grammar(
  kind="weights",
  entries={kind: _rounded(kind, words) for kind, words in _NUMBERS.items()},
)
WEIGHTS = Grammar(
  kind="weights",
  entries={**FORMATS.entries, "published": published, "whole": whole},
)


def weights(text: str) -> Quantization | None:
  """The format that weights are rounded to; None for "", their dtype."""
  return FORMATS.make(text) if text else None


def of_target(text: str, path: str = "") -> Quantization | Published | None:
  """Storage of a target's weights, as `models.checkpoints.load` takes it.

  Args:
    text: a call of `WEIGHTS`. "" is `published` in directories, whose format
      holds all that is quantized, and `whole` in GGUF files, whose blocks
      mostly have no such format.
    path: of the target.
  """
  if text:
    return WEIGHTS.make(text)
  return None if checkpoints.is_file(path) else "published"
