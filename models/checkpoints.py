"""Loads a model, a head or a tokenizer from a path in any supported format.

That is a directory in Hugging Face's format (`models.formats.huggingface`), the
folder of a training run (`models.formats.trained`), or a GGUF file
(`models.formats.gguf`). A path that is not there may be a name on the Hugging
Face Hub (`models.hub`).
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models import hub, tokenizers
from models.formats import (
  gguf,
  gguf_tokenizer,
  head_checkpoints,
  held,
  huggingface,
  trained,
)
from models.formats.head_checkpoints import Head
from models.formats.head_files import Place
from models.head_shapes import HeadShape, Target
from models.networks import linear, quantized, stacked, t5, t5_stacked
from models.networks.layers import TransformerConfig
from models.networks.quantized import Quantization
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


def _not_lowered(form: Quantization) -> "Network":
  raise ValueError(
    f"weights in few bits ({form.dtype}) are of decoder-only models"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
  """A loaded model, on one device or over a mesh.

  Attributes:
    config: its shapes and switches.
    params: its parameters.
    functions: makes the model's pure functions, with layers skipped and
      features returned as asked; ValueError where that is not possible. With
      `count_experts=True` its passes count the experts that they touch.
    lowered: the same with weights in few bits, or in fewer, all else shared;
      ValueError where that is not possible.
    rounded: as `lowered`; without a mesh made fast to draft with
      (`models.networks.quantized.hasten`).
    note: how weights that are published in few bits are held, in words.
  """

  config: TransformerConfig | T5Config
  params: Any
  functions: Callable[..., LanguageModel]
  lowered: Callable[[Quantization], "Network"] = _not_lowered
  rounded: Callable[[Quantization], "Network"] = _not_lowered
  note: str = ""

  def whole(self) -> LanguageModel:
    """The model with all of its layers, without features."""
    return self.functions(SkippedLayers(), ())

  @property
  def reads_inputs(self) -> bool:
    """True for an encoder-decoder."""
    return isinstance(self.config, T5Config)


def load(
  path: str,
  *,
  dtype=jnp.float32,
  mesh: Mesh | None = None,
  sharding: Sharding | None = None,
  stored: str | None = None,
  weights: Quantization | Literal["published"] | None = None,
) -> Network:
  """Reads a model.

  Args:
    path: where it is.
    dtype: of parameters and activations.
    mesh: the devices, for a model with stacked layers; None for one device.
    sharding: the model's rules on the mesh.
    stored: type of keys and values in the cache, "int8" or "fp8"; None for
      `dtype`.
    weights: how its weights are stored; None for `dtype`, "published" for the
      format that holds them as they are in the files, where there is one.
      Those of another format are dequantised to `dtype`, and rounded to it.

  Returns:
    The `Network`.

  Raises:
    FileNotFoundError, ValueError: as `models.formats.huggingface.load_stacked`;
      ValueError for an encoder-decoder with another cache.
  """
  path = hub.local(path)
  if reads_inputs(path):
    if stored is not None:
      raise ValueError("caches in eight bits are of decoder-only models")
    if isinstance(weights, Quantization):
      return _not_lowered(weights)
    return _load_t5(path, dtype=dtype, mesh=mesh, sharding=sharding)
  form, note = _held(path, weights, dtype=dtype, on_mesh=mesh is not None)
  more = {} if form is None else {"form": form}
  if mesh is None:
    module = _reader(path).load(path, dtype=dtype, **more)
    network = _of_module(module, stored, form=form)
  else:
    assert sharding is not None  # there is a mesh
    sharding = for_experts(
      read_config(path), sharding, num_parts(sharding, mesh)
    )
    config, params = _reader(path).load_stacked(
      path, mesh=mesh, sharding=sharding, dtype=dtype, **more
    )
    network = _of_layers(
      config, params, form, dtype=dtype, sharding=sharding, stored=stored
    )
  if isinstance(weights, Quantization) and form is None:
    network = network.lowered(weights)
  return dataclasses.replace(network, note=note)


def _held(
  path: str,
  weights: Quantization | Literal["published"] | None,
  *,
  dtype,
  on_mesh: bool,
) -> tuple[Quantization | None, str]:
  """The format that holds a model's weights as they are published, if wanted.

  Args:
    path: of the model, decoder-only.
    weights: what is wanted.
    dtype: of weights that are not in few bits.
    on_mesh: whether its layers are stacked.

  Returns:
    The format, None for none; and what becomes of weights that are published in
    few bits, in words.
  """
  reader = _reader(path)
  if reader is trained:
    return None, ""
  with contextlib.ExitStack() as stack:
    source = reader.source(path, stack)
    if not source.published:
      return None, ""
    form, why = None, ""
    if weights is not None:
      form, why = held.published(source, on_mesh=on_mesh)
    if isinstance(weights, Quantization) and held.holds(source, weights):
      form = weights
  published = f"{path} is published as {source.published}: "
  if form is not None and weights in ("published", form):
    return form, f"{published}held as that, {form}"
  note = f"{published}dequantised to {jnp.dtype(dtype).name}"
  if isinstance(weights, Quantization):
    note += f" and rounded again, to {weights}"
  if form is not None:
    note += f"; {form} would hold it as it is"
  elif why:
    note += f", since {why}"
  return None, note


def _of_layers(
  config: TransformerConfig,
  params: Any,
  weights: Quantization | None,
  *,
  dtype,
  sharding: Sharding,
  stored: str | None,
) -> Network:
  """A model over a mesh, whose weights are stored so."""

  def lowered(form: Quantization) -> Network:
    form = quantized.below(form, weights) if weights else form
    return _of_layers(
      config, stacked.lowered(params, config, form), form,
      dtype=dtype, sharding=sharding, stored=stored,
    )  # fmt: skip

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
    lowered=lowered,
    rounded=lowered,
  )


def _of_module(
  module: Transformer, stored: str | None, *, form: Quantization | None
) -> Network:
  """A model on one device, whose weights are stored so."""
  if jax.default_backend() == "cpu":
    for layer in module.layers:
      linear.turn(layer)

  def lowered(to: Quantization, *, fast: bool = False) -> Network:
    to = quantized.below(to, form) if form else to
    copy = nnx.merge(*nnx.split(module))  # of the same arrays
    quantized.lower(copy, to)
    if fast:
      quantized.hasten(copy)
    return _of_module(copy, stored, form=to)

  return Network(
    config=module.config,
    params=as_language_model(module)[1],
    functions=lambda skipped, features, **counting: as_language_model(
      module, skipped=skipped, features=features, stored=stored, **counting
    )[0],
    lowered=lowered,
    rounded=functools.partial(lowered, fast=True),
  )


def reads_inputs(path: str) -> bool:
  """True if a path leads to an encoder-decoder; raises as `load`."""
  path = hub.local(path)
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
  weights: Quantization | None = None,
) -> Head:
  """Reads a draft head of a target.

  Args:
    path: its directory.
    target: as `load` gave it, on the same devices.
    dtype: of parameters and activations.
    mesh: the devices; None for one device.
    sharding: the head's rules on the mesh.
    of_target: whether it is the MTP head in the target's own directory, `path`.
    weights: how its projections' weights are stored, the output projection's
      too unless that is the target's, in few bits; None for `dtype`. Not with
      a mesh.

  Returns:
    The `models.formats.head_checkpoints.Head`.

  Raises:
    FileNotFoundError, ValueError: as `models.formats.head_checkpoints.load`.
  """
  path = hub.local(path)
  frame = target.params if mesh is None else target.params["frame"]
  tied = target.config.tied_embeddings
  tables = frame["embed"], frame["embed" if tied else "lm_head"]
  embedding = quantized.whole_table(tables[0], "embedding", dtype)
  output = (
    embedding if tied else quantized.whole_table(tables[1], "weight", dtype)
  )
  about = dataclasses.replace(
    _about(target.config), embedding=embedding, output=output
  )
  place = None
  if mesh is not None:
    place = Place(mesh=mesh, sharding=sharding)
  head = head_checkpoints.load(
    path, about, dtype=dtype, place=place, of_target=of_target
  )
  shared = {"embed": (embedding, tables[0]), "lm_head": (output, tables[1])}
  lent = [n for n, x in shared.items() if quantized.is_lent(head.module, n, *x)]
  if weights is not None:
    quantized.lower(head.module, weights)
    if jax.default_backend() == "cpu":
      quantized.hasten(head.module)
  for name in lent:
    quantized.borrow(head.module, name, shared[name][1])
  return head


def read_head(path: str, target: str) -> HeadShape:
  """Shapes of a target's head from its files, unread; raises as `load_head`.

  Where both paths are the same it is the target's own MTP head.
  """
  path, target = hub.local(path), hub.local(target)
  about = _about(read_config(target))
  return head_checkpoints.describe(path, about, of_target=path == target)


def _about(config: TransformerConfig) -> Target:
  """The description of a target, without its arrays."""
  return Target(
    num_layers=config.num_layers,
    embed_dim=config.embed_dim,
    vocab_size=config.vocab_size,
    config=config,
  )


def load_module(path: str, *, dtype=jnp.float32) -> Transformer:
  """Reads a decoder-only model to one device, as a module; raises as `load`."""
  path = hub.local(path)
  if reads_inputs(path):
    raise ValueError(
      f"{path} is an encoder-decoder, and a decoder-only model is needed here"
    )
  return _reader(path).load(path, dtype=dtype)


def read_config(path: str) -> TransformerConfig | T5Config:
  """The configuration of a model that is not loaded; raises as `load`."""
  path = hub.local(path)
  return _reader(path).read_config(path)


def load_tokenizer(path: str) -> Tokenizer:
  """The tokenizer of a model; raises as `models.tokenizers.load`."""
  path = hub.local(path)
  if is_file(path):
    return gguf_tokenizer.load(path)
  if trained.is_run(path):
    path = trained.tokenizer_dir(path)
  return tokenizers.load(path)


def is_file(path: str) -> bool:
  """True for the path of a GGUF file, existing or not, and no directory."""
  where = pathlib.Path(path)
  return where.is_file() or (where.suffix == ".gguf" and not where.is_dir())


def eos_token_ids(path: str) -> tuple[int, ...]:
  """Ids that end a text by the model's own files, beside its tokenizer's."""
  path = hub.local(path)
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
  paths = [root / "config.json"]
  for folder in (trained.newest(path), root / "tokenizer"):
    paths += folder.rglob("*")
  return sorted(path for path in paths if path.is_file())


def _reader(path: str):
  """The module of `models.formats` that reads a path."""
  if is_file(path):
    return gguf
  return trained if trained.is_run(path) else huggingface
