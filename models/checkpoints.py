"""Models as configs name them: a path, in whichever form it is.

That is a directory in Hugging Face's format (`models.formats.huggingface`), the
folder of a training run (`models.formats.trained`), or a GGUF file
(`models.formats.gguf`).
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models import tokenizers
from models.formats import (
  gguf,
  gguf_tokenizer,
  head_checkpoints,
  huggingface,
  trained,
)
from models.formats.head_checkpoints import Head
from models.formats.head_files import Place
from models.head_shapes import HeadShape, Target
from models.networks import lowbits, stacked, t5, t5_stacked
from models.networks.layers import TransformerConfig
from models.networks.lowbits import Format
from models.networks.t5_config import T5Config
from models.networks.transformer import (
  Features,
  SkippedLayers,
  Transformer,
  as_language_model,
)
from models.sharding import Sharding, for_experts, num_parts
from models.tokenizers import Tokenizer
from specjax.types import LanguageModel


def _not_lowered(form: Format) -> "Network":
  raise ValueError(
    f"weights in few bits ({form.kind}) are of decoder-only models in their "
    "own types"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
  """A model that is loaded, on one device or over a mesh.

  Attributes:
    config: its shapes and switches.
    params: its parameters.
    functions: the model as pure functions of them, some layers left out, with
      the features that are asked for; ValueError where that is not possible.
      With `count_experts=True` its passes count the experts that they touch.
    lowered: the same with weights in few bits, all else shared; ValueError
      where that is not possible.
  """

  config: TransformerConfig | T5Config
  params: Any
  functions: Callable[..., LanguageModel]
  lowered: Callable[[Format], "Network"] = _not_lowered

  def whole(self) -> LanguageModel:
    """The model with all of its layers, without features."""
    return self.functions(SkippedLayers(), ())

  @property
  def reads_inputs(self) -> bool:
    """Whether it is an encoder-decoder."""
    return isinstance(self.config, T5Config)


def load(
  path: str,
  *,
  dtype,
  mesh: Mesh | None,
  sharding: Sharding | None,
  stored: str | None = None,
) -> Network:
  """Reads a model.

  Args:
    path: where it is.
    dtype: of parameters and activations.
    mesh: the devices, for a model with stacked layers; None for one device.
    sharding: the model's rules on the mesh.
    stored: what its cache stores keys and values as, "int8" or "fp8"; None for
      `dtype`.

  Returns:
    The `Network`.

  Raises:
    FileNotFoundError, ValueError: as `models.formats.huggingface.load_stacked`;
      ValueError for an encoder-decoder with another cache.
  """
  if reads_inputs(path):
    if stored is not None:
      raise ValueError("caches in eight bits are of decoder-only models")
    return _load_t5(path, dtype=dtype, mesh=mesh, sharding=sharding)
  if mesh is None:
    return _of_module(load_module(path, dtype=dtype), stored)
  assert sharding is not None  # there is a mesh
  sharding = for_experts(read_config(path), sharding, num_parts(sharding, mesh))
  config, params = _reader(path).load_stacked(
    path, mesh=mesh, sharding=sharding, dtype=dtype
  )

  def stacked_network(params, weights: Format | None) -> Network:
    return Network(
      config=config,
      params=params,
      functions=lambda skipped, features, **counting: stacked.as_language_model(
        config,
        dtype=dtype,
        skipped=skipped,
        sharding=sharding,
        features=features,
        weights=weights,
        stored=stored,
        **counting,
      ),
      lowered=_not_lowered
      if weights
      else lambda form: stacked_network(
        stacked.lowered(params, config, form), form
      ),
    )

  return stacked_network(params, None)


def _of_module(
  module: Transformer, stored: str | None, *, lowers: bool = True
) -> Network:
  """A model on one device."""

  def lowered(form: Format) -> Network:
    copy = nnx.merge(*nnx.split(module))  # of the same arrays
    lowbits.lower(copy, form)
    return _of_module(copy, stored, lowers=False)

  return Network(
    config=module.config,
    params=as_language_model(module)[1],
    functions=lambda skipped, features, **counting: as_language_model(
      module, skipped=skipped, features=features, stored=stored, **counting
    )[0],
    lowered=lowered if lowers else _not_lowered,
  )


def reads_inputs(path: str) -> bool:
  """Whether a path leads to an encoder-decoder; raises as `load`."""
  reader = _reader(path)
  return reader is huggingface and isinstance(
    reader.read_config(path), T5Config
  )


def _load_t5(
  path: str, *, dtype, mesh: Mesh | None, sharding: Sharding | None
) -> Network:
  """As `load`, of an encoder-decoder."""
  if mesh is None:
    module = huggingface.load(path, dtype=dtype)
    config = module.config
    model, params = t5.as_language_model(module)
  else:
    config, params = huggingface.load_t5(
      path, mesh=mesh, sharding=sharding, dtype=dtype
    )
    model = t5_stacked.as_language_model(config, dtype=dtype, sharding=sharding)

  def functions(
    skipped: SkippedLayers, features: Features, *, count_experts: bool = False
  ) -> LanguageModel:
    del count_experts  # it has none
    if skipped != SkippedLayers() or features:
      raise ValueError(
        f"{path} is an encoder-decoder, which drafts with no layers left out "
        "and has no heads"
      )
    return model

  return Network(config=config, params=params, functions=functions)


def load_head(
  path: str,
  target: Network,
  *,
  dtype,
  mesh: Mesh | None = None,
  sharding: Sharding | None = None,
  of_target: bool = False,
) -> Head:
  """Reads a draft head of a target.

  Args:
    path: its directory.
    target: as `load` gave it, on the same devices.
    dtype: of parameters and activations.
    mesh: the devices; None for one device.
    sharding: the head's rules on the mesh.
    of_target: whether it is the MTP head in the target's own directory, `path`.

  Returns:
    The `models.formats.head_checkpoints.Head`.

  Raises:
    FileNotFoundError, ValueError: as `models.formats.head_checkpoints.load`.
  """
  frame = target.params if mesh is None else target.params["frame"]
  embedding = lowbits.whole_table(frame["embed"], "embedding", dtype)
  tied = target.config.tied_embeddings
  about = dataclasses.replace(
    _about(target.config),
    embedding=embedding,
    output=embedding
    if tied
    else lowbits.whole_table(frame["lm_head"], "weight", dtype),
  )
  place = None
  if mesh is not None:
    place = Place(mesh=mesh, sharding=sharding)
  return head_checkpoints.load(
    path, about, dtype=dtype, place=place, of_target=of_target
  )


def read_head(path: str, target: str) -> HeadShape:
  """What a head of the target in another path is; raises as `load_head`.

  In the same path it is the target's own MTP head.
  """
  about = _about(read_config(target))
  return head_checkpoints.describe(path, about, of_target=path == target)


def _about(config: TransformerConfig) -> Target:
  """A target without its arrays."""
  return Target(
    num_layers=config.num_layers,
    embed_dim=config.embed_dim,
    vocab_size=config.vocab_size,
  )


def load_module(path: str, *, dtype=jnp.float32) -> Transformer:
  """Reads a decoder-only model to one device, as a module; raises as `load`."""
  if reads_inputs(path):
    raise ValueError(
      f"{path} is an encoder-decoder, and a decoder-only model is needed here"
    )
  return _reader(path).load(path, dtype=dtype)


def read_config(path: str) -> TransformerConfig | T5Config:
  """The configuration of a model that is not loaded; raises as `load`."""
  return _reader(path).read_config(path)


def load_tokenizer(path: str) -> Tokenizer:
  """The tokenizer of a model; raises as `models.tokenizers.load`."""
  if is_file(path):
    return gguf_tokenizer.load(path)
  if trained.is_run(path):
    path = trained.tokenizer_dir(path)
  return tokenizers.load(path)


def is_file(path: str) -> bool:
  """Whether a path is one of a GGUF file, there or not, and not a directory."""
  where = pathlib.Path(path)
  return where.is_file() or (where.suffix == ".gguf" and not where.is_dir())


def eos_token_ids(path: str) -> tuple[int, ...]:
  """Ids that end a text by the model's own files, beside its tokenizer's."""
  if trained.is_run(path):
    return ()
  return _reader(path).eos_token_ids(path)


def files(path: str) -> list[pathlib.Path]:
  """The files that decide what a model is; raises as `trained.newest`."""
  root = pathlib.Path(path)
  if is_file(path):
    return [root]
  if not trained.is_run(path):
    # Vocabularies' merges.txt, and heads that torch saved.
    kinds = (".json", ".safetensors", ".txt", ".pt", ".bin")
    return sorted(path for path in root.iterdir() if path.suffix in kinds)
  found = [root / "config.json"]
  for folder in (trained.newest(path), root / "tokenizer"):
    found += folder.rglob("*")
  return sorted(path for path in found if path.is_file())


def _reader(path: str):
  """The module that reads what a path leads to."""
  if is_file(path):
    return gguf
  return trained if trained.is_run(path) else huggingface
