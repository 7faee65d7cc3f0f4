"""Models as configs name them: a directory, in whichever form it is.

That is one in Hugging Face's format (`models.huggingface`), or the folder of a
training run (`models.trained`).
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from models import huggingface, stacked, tokenizers, trained
from models.sharding import Sharding
from models.tokenizers import Tokenizer
from models.transformer import (
  SkippedLayers,
  Transformer,
  TransformerConfig,
  as_language_model,
)
from specjax.types import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
  """A model that is loaded, on one device or over a mesh.

  Attributes:
    params: its parameters.
    functions: the model as pure functions of them, some layers left out.
  """

  params: Any
  functions: Callable[[SkippedLayers], LanguageModel]


def load(
  directory: str, *, dtype, mesh: Mesh | None, sharding: Sharding | None
) -> Network:
  """Reads a model.

  Args:
    directory: where it is.
    dtype: of parameters and activations.
    mesh: the devices, for a model with stacked layers; None for one device.
    sharding: the model's rules on the mesh.

  Returns:
    The `Network`.

  Raises:
    FileNotFoundError, ValueError: as `models.huggingface.load_stacked`.
  """
  if mesh is None:
    module = load_module(directory, dtype=dtype)
    _, params = as_language_model(module)
    return Network(
      params=params,
      functions=lambda skipped: as_language_model(module, skipped=skipped)[0],
    )
  config, params = _reader(directory).load_stacked(
    directory, mesh=mesh, sharding=sharding, dtype=dtype
  )
  return Network(
    params=params,
    functions=lambda skipped: stacked.as_language_model(
      config, dtype=dtype, skipped=skipped, sharding=sharding
    ),
  )


def load_module(directory: str, *, dtype=jnp.float32) -> Transformer:
  """Reads a model to one device, as a module; raises as `load`."""
  return _reader(directory).load(directory, dtype=dtype)


def read_config(directory: str) -> TransformerConfig:
  """The configuration of a model that is not loaded; raises as `load`."""
  return _reader(directory).read_config(directory)


def load_tokenizer(directory: str) -> Tokenizer:
  """The tokenizer of a model; raises as `models.tokenizers.load`."""
  if trained.is_run(directory):
    directory = trained.tokenizer_dir(directory)
  return tokenizers.load(directory)


def eos_token_ids(directory: str) -> tuple[int, ...]:
  """Ids that end a text by the model's own files, beside its tokenizer's."""
  if trained.is_run(directory):
    return ()
  return huggingface.eos_token_ids(directory)


def files(directory: str) -> list[pathlib.Path]:
  """The files that decide what a model is; raises as `trained.newest`."""
  root = pathlib.Path(directory)
  if not trained.is_run(directory):
    kinds = (".json", ".safetensors", ".txt")  # vocabularies' merges.txt
    return sorted(path for path in root.iterdir() if path.suffix in kinds)
  found = [root / "config.json"]
  for folder in (trained.newest(directory), root / "tokenizer"):
    found += folder.rglob("*")
  return sorted(path for path in found if path.is_file())


def _reader(directory: str):
  """The module that reads what is in a directory."""
  return trained if trained.is_run(directory) else huggingface
