"""Loads a model, a head or a tokenizer from a path in any supported format.

A path is a directory in Hugging Face's format (`models.formats.huggingface`) or
a GGUF file (`models.formats.gguf`). A path that does not exist may be a name on
the Hugging Face Hub (`models.hub`).
"""

import dataclasses
import gc
import pathlib
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models import hub, tokenizers
from models.formats import (
  gguf,
  gguf_tokenizer,
  head_checkpoints,
  huggingface,
  loading,
  published,
)
from models.formats.head_checkpoints import Head
from models.formats.head_files import Place
from models.formats.published import Weights
from models.formats.weights import Source
from models.head_shapes import HeadShape, Target
from models.networks import (
  quantized,
  stacked,
  t5,
  transformer,
)
from models.networks.layers import TransformerConfig, lay_out
from models.networks.quantized import Quantization
from models.networks.t5 import T5
from models.networks.t5_config import T5Config
from models.networks.transformer import Features, SkippedLayers, Transformer
from models.sharding import Sharding, for_experts, num_parts
from models.tokenizers import Tokenizer
from specjax.types import LanguageModel

_NONE_SKIPPED = SkippedLayers()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
  """A loaded model, on one device or over a mesh.

  Attributes:
    config: its configuration.
    params: its parameters.
    module: the module on one device; None on a mesh.
    dtype: dtype of activations on a mesh.
    sharding: its sharding rules on a mesh.
    weights: how its weights are quantized; None if they are not.
    stored: dtype of the KV cache; None for `dtype`.
    note: a message on how published quantized weights are stored.
  """

  config: TransformerConfig | T5Config
  params: Any
  module: Transformer | T5 | None = None
  dtype: Any = jnp.float32
  sharding: Sharding | None = None
  weights: Quantization | None = None
  stored: str | None = None
  note: str = ""

  @classmethod
  def of_module(cls, module: Transformer | T5, **more) -> "Network":
    """Wraps a module on one device; `more` sets other attributes."""
    library = t5 if isinstance(module, T5) else transformer
    params = library.as_language_model(module)[1]
    return cls(config=module.config, params=params, module=module, **more)

  @property
  def reads_inputs(self) -> bool:
    """True for an encoder-decoder."""
    return isinstance(self.config, T5Config)

  def model(self) -> LanguageModel:
    """The full model's pure functions, without features."""
    return self.functions()

  def functions(
    self, skipped: SkippedLayers = _NONE_SKIPPED, features: Features = ()
  ) -> LanguageModel:
    """The model's pure functions.

    Args:
      skipped: layers to leave out.
      features: hidden states to return.

    Raises:
      ValueError: for skipped layers or features of an encoder-decoder.
    """
    if self.reads_inputs:
      if skipped != _NONE_SKIPPED or features:
        raise ValueError(
          "an encoder-decoder supports neither skipped layers nor draft heads"
        )
      module = self.module or t5.abstract(self.config, dtype=self.dtype)
      return t5.as_language_model(module, sharding=self.sharding)[0]
    more = dict(skipped=skipped, features=features, stored=self.stored)
    if self.module is None:
      return stacked.as_language_model(
        self.config, dtype=self.dtype, sharding=self.sharding,
        params=self.params, **more,
      )  # fmt: skip
    return transformer.as_language_model(self.module, **more)[0]

  def quantize(self, how: Quantization) -> "Network":
    """A copy with (further) quantized weights that shares everything else.

    Raises:
      ValueError: if the weights have as few bits already.
    """
    how = quantized.for_copy(how, self.weights) if self.weights else how
    if self.module is None:
      params = stacked.quantize(self.params, self.config, how)
      return dataclasses.replace(self, params=params, weights=how)
    copy = nnx.merge(*nnx.split(self.module))  # shares the arrays
    quantized.quantize_module(copy, how, again=True)
    return Network.of_module(copy, weights=how, stored=self.stored)


def load(
  path: str,
  *,
  dtype=jnp.float32,
  mesh: Mesh | None = None,
  sharding: Sharding | None = None,
  stored: str | None = None,
  weights: Quantization | Literal["published"] | None = None,
) -> Network:
  """Loads a model.

  Args:
    path: a directory, a GGUF file or a name on the Hub.
    dtype: dtype of parameters and activations.
    mesh: the devices, for a model with stacked layers; None for one device.
    sharding: the model's sharding rules, required with a mesh.
    stored: dtype of the KV cache, "int8" or "fp8"; None for `dtype`.
    weights: how weights are stored. None dequantizes to `dtype`; "published"
      keeps quantized weights as they are in the files; a `Quantization` keeps
      those that match it and quantizes the rest.

  Raises:
    FileNotFoundError: if a file is missing.
    ValueError: for an unreadable file or an unsupported model.
  """
  path = hub.local(path)
  config = read_config(path)
  form = weights if isinstance(weights, Quantization) else None
  if isinstance(config, T5Config):
    if stored is not None or form is not None:
      raise ValueError(
        "quantized weights and KV caches need a decoder-only model"
      )
  source = _reader(path).source(path)
  kept, scheme, note = _kept(
    source, weights, dtype=dtype, on_mesh=mesh is not None
  )
  if mesh is None:
    module = loading.load(source, dtype=dtype, form=form, kept=kept)
    if isinstance(module, Transformer):
      gc.collect()  # leftovers of loading would keep replaced weights alive
      for layer in module.layers:
        lay_out(layer)
    return Network.of_module(module, weights=scheme, stored=stored, note=note)
  assert sharding is not None
  # Layers are scanned only on devices that run the loop themselves.
  unrolled = mesh.devices.flat[0].platform not in ("cpu", "tpu")
  sharding = dataclasses.replace(sharding, unrolled=unrolled)
  sharding = for_experts(config, sharding, num_parts(sharding, mesh))
  config, params = loading.load_stacked(
    source, mesh=mesh, sharding=sharding, dtype=dtype, form=form, kept=kept
  )
  return Network(
    config=config, params=params, dtype=dtype, sharding=sharding,
    weights=scheme, stored=stored, note=note,
  )  # fmt: skip


def _kept(
  source: Source,
  weights: Quantization | Literal["published"] | None,
  *,
  dtype,
  on_mesh: bool,
) -> tuple[Weights, Quantization | None, str]:
  """Weights to keep as published, the resulting quantization, and a note."""
  kept: Weights = {}
  form = None if weights == "published" else weights
  if not source.published:
    return kept, form, ""
  note = f"{source.path} is published as {source.published}: "
  if form is not None:
    kept = published.keep(source, form)
    if None not in kept.values():
      return kept, form, f"{note}kept as is, {form}"
  elif weights == "published":
    kept = published.keep(source, on_mesh=on_mesh)
    form, words = published.summary(source, kept)
    if form is not None:
      return kept, form, f"{note}kept as is, {words}"
  note += f"dequantized to {jnp.dtype(dtype).name}"
  if form is not None:
    note += f" and rounded again, to {form}"
  return kept, form, note


def reads_inputs(path: str) -> bool:
  """True if the model at a path is an encoder-decoder; raises like `load`."""
  return isinstance(read_config(path), T5Config)


def load_head(
  path: str,
  target: Network,
  *,
  dtype,
  mesh: Mesh | None = None,
  sharding: Sharding | None = None,
  of_target: bool = False,
  weights: Quantization | None = None,
) -> Head:
  """Loads a draft head for a target.

  Args:
    path: its directory.
    target: from `load`, on the same devices.
    dtype: dtype of parameters and activations.
    mesh: the devices; None for one device.
    sharding: the head's sharding rules on the mesh.
    of_target: whether `path` is the target's directory and the head its MTP
      head.
    weights: how to quantize its projections, including the output projection
      unless it is the target's and quantized already; None for `dtype`.
      Not supported on a mesh.

  Raises:
    FileNotFoundError, ValueError: like `models.formats.head_checkpoints.load`.
  """
  path = hub.local(path)
  frame = target.params if mesh is None else target.params["frame"]
  tied = target.config.tied_embeddings
  tables = frame["embed"], frame["embed" if tied else "lm_head"]
  embedding = tables[0]["embedding"].get_value()
  output = embedding if tied else tables[1]["weight"].get_value()
  described = describe_target(target.config, embedding=embedding, output=output)
  place = None if mesh is None else Place(mesh=mesh, sharding=sharding)
  head = head_checkpoints.load(
    path, described, dtype=dtype, place=place, of_target=of_target
  )
  if weights is not None:
    quantized.quantize_module(head.module, weights)
  return head


def read_head(path: str, target: str) -> HeadShape:
  """Reads the shapes of a head without its weights; raises like `load_head`.

  If both paths are equal, the head is the target's own MTP head.
  """
  path, target = hub.local(path), hub.local(target)
  described = describe_target(read_config(target))
  return head_checkpoints.describe(path, described, of_target=path == target)


def describe_target(config: TransformerConfig, **tables) -> Target:
  """Describes a target to its heads; `tables` are its embedding and output."""
  return Target(
    num_layers=config.num_layers, embed_dim=config.embed_dim,
    vocab_size=config.vocab_size, config=config, **tables,
  )  # fmt: skip


def load_module(path: str, dtype=jnp.float32) -> Transformer:
  """Loads a decoder-only module; raises like `load`."""
  path = hub.local(path)
  if reads_inputs(path):
    raise ValueError(
      f"{path} is an encoder-decoder; a decoder-only model is needed here"
    )
  return loading.load(_reader(path).source(path), dtype=dtype)


def read_config(path: str) -> TransformerConfig | T5Config:
  """Reads a model's configuration without its weights; raises like `load`."""
  path = hub.local(path)
  return _reader(path).read_config(path)


def load_tokenizer(path: str) -> Tokenizer:
  """Loads a model's tokenizer; raises like `models.tokenizers.load`."""
  path = hub.local(path)
  if is_file(path):
    return gguf_tokenizer.load(path)
  return tokenizers.load(path)


def is_file(path: str) -> bool:
  """True if a path is a file or ends in `.gguf` (and is not a directory)."""
  where = pathlib.Path(path)
  return where.is_file() or (where.suffix == ".gguf" and not where.is_dir())


def eos_token_ids(path: str) -> tuple[int, ...]:
  """End-of-text ids in the model's files, besides the tokenizer's."""
  path = hub.local(path)
  return _reader(path).eos_token_ids(path)


def _reader(path: str):
  """The reader module for a path."""
  return gguf if is_file(path) else huggingface
