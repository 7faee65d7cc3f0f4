"""Reads models from GGUF files, llama.cpp's format, quantised or not.

A file is a checkpoint like a directory in Hugging Face's format, and becomes
the same `Source`: its metadata is translated to the keys of a `config.json`,
its tensors get the names that they had before llama.cpp's converter, and what
that did to their rows is undone. Quantised tensors are dequantised as they are
read.

Whatever would change the logits and is not understood is an error.
"""

import contextlib
import dataclasses
import functools
import re
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.formats import gguf_file, gguf_tokenizer, weights
from models.formats.families import FAMILIES
from models.formats.families.family import Gguf, Joined, Tensors
from models.formats.gguf_file import Header
from models.formats.huggingface_config import config_from_json
from models.formats.packed import Packed
from models.formats.weights import Source, Tensor
from models.networks import stacked
from models.networks.layers import TransformerConfig
from models.networks.lowbits import Format
from models.networks.transformer import Transformer
from models.sharding import Sharding

KINDS = (
  "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K",
  "Q4_K", "Q5_K", "Q6_K", "MXFP4",
)  # fmt: skip

_FAMILIES = {
  family.gguf.architecture: family
  for family in FAMILIES.values()
  if family.gguf is not None
}
_OPTIONAL = {
  "attention.head_count_kv",
  "attention.key_length",
  "rope.freq_base",
}
# These change nothing if they have the value of a plain model, or none at all.
_PLAIN = {
  "rope.scaling.type": "none",
  "rope.scaling.factor": 1.0,
  "rope.scale_linear": 1.0,
  "rope.scaling.attn_factor": 1.0,
  "attention.causal": True,
  "expert_count": 0,
  "expert_used_count": 0,
}
# These change nothing, or are compared with what others say.
_KNOWN = {
  "vocab_size",
  "attention.value_length",
  "rope.dimension_count",
  "rope.scaling.original_context_length",
  "rope.scaling.finetuned",
  "tensor_data_layout",  # where the rows come from, not where they are
}
_FREQUENCIES = "rope_freqs.weight"
_NAME = re.compile(r"(?:blk\.(\d{1,9})\.)?(.+)\.(weight|bias|scale)")


def load(
  path: str, *, dtype=jnp.float32, form: Format | None = None
) -> Transformer:
  """Reads a file's model to one device, a tensor at a time.

  Args:
    path: of the file.
    dtype: of the parameters and activations, whatever the file's is.
    form: as of `models.formats.weights.load`.

  Returns:
    The module.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is damaged, or the model is not supported.
    CheckpointError: as `models.formats.weights.load`.
  """
  return weights.load(source(path), dtype=dtype, form=form)


def load_stacked(
  path: str,
  *,
  mesh: Mesh,
  sharding: Sharding,
  dtype=jnp.bfloat16,
  form: Format | None = None,
) -> tuple[TransformerConfig, stacked.StackedParams]:
  """Reads a file's model straight to where its parameters lie on a mesh.

  Only the rows that a device holds are read and dequantised for it, one layer's
  at a time.

  Args:
    path: of the file.
    mesh, sharding, dtype, form: as of `models.formats.weights.load_stacked`.

  Returns:
    As `models.formats.weights.load_stacked`; raises as `load`, and as that.
  """
  return weights.load_stacked(
    source(path), mesh=mesh, sharding=sharding, dtype=dtype, form=form
  )


def read_config(path: str) -> TransformerConfig:
  """The configuration of a file's model; raises as `load`."""
  return _configuration(gguf_file.read_header(path))[0]


def eos_token_ids(path: str) -> tuple[int, ...]:
  """Ids that end a text or a turn, as the metadata or their names say.

  Raises as `load`.
  """
  header = gguf_file.read_header(path)
  keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
  ids = {key: header.metadata[key] for key in keys if key in header.metadata}
  for key, value in ids.items():
    if type(value) is not int or not 0 <= value < 2**31:
      raise ValueError(
        f"{key} in {header.path} must be a token's id, got {value!r:.40}"
      )
  named = gguf_tokenizer.named_ends(header.metadata)
  return tuple(sorted({*ids.values(), *named}))


def architecture(header: Header) -> str:
  """llama.cpp's name of a file's model, which is one that is read."""
  name = header.metadata.get("general.architecture")
  if not isinstance(name, str) or name not in _FAMILIES:
    raise ValueError(
      f"general.architecture in {header.path} must be one of "
      f"{sorted(_FAMILIES)}, got {name!r:.80}"
    )
  return name


# ------------------------------------------------------------- configuration


def _configuration(header: Header) -> tuple[TransformerConfig, str]:
  """The configuration of a file's model, and its family's name."""
  arch = architecture(header)
  try:
    settings = _settings(header, arch)
    config = config_from_json(settings)
    config = dataclasses.replace(config, **_rotation(header, arch, config))
  except ValueError as error:
    raise ValueError(f"cannot use {header.path}: {error}") from error
  return config, settings["model_type"]


def _settings(header: Header, arch: str) -> dict[str, Any]:
  """The metadata of a file as the contents of a `config.json`."""
  metadata = {
    key.removeprefix(f"{arch}."): value
    for key, value in header.metadata.items()
    if key.startswith(f"{arch}.")
  }
  family = _FAMILIES[arch]
  how = _how(arch)
  keys = how.keys
  for key, value in metadata.items():
    listed = not isinstance(value, int | float | str)
    if listed and key not in how.by_layer:
      raise ValueError(f"{arch}.{key} must be one value for all layers")
    if type(value) is int and value >= 2**31:
      raise ValueError(f"{arch}.{key} must be below 2^31, got {value}")
  if missing := sorted(
    keys.keys() - metadata.keys() - _OPTIONAL - how.optional
  ):
    raise ValueError(f"{arch}.{missing[0]} is missing")
  for key, plain in _PLAIN.items():
    read = key in how.also or key in keys
    if not read and metadata.get(key, plain) != plain:
      raise ValueError(
        f"{arch}.{key} must be {plain!r} or left out, got {metadata[key]!r:.40}"
      )
  if unknown := sorted(
    metadata.keys() - keys.keys() - how.also - _PLAIN.keys() - _KNOWN
  ):
    raise ValueError(
      f"settings that are not understood: {arch}.{f', {arch}.'.join(unknown)}"
    )
  embedding = header.tensors.get("token_embd.weight")
  if embedding is None:
    raise ValueError("there is no tensor token_embd.weight")
  vocab_size = metadata.get("vocab_size", embedding.shape[0])
  if vocab_size != embedding.shape[0]:
    raise ValueError(
      f"{arch}.vocab_size is {vocab_size!r:.40}, and token_embd.weight has "
      f"{embedding.shape[0]} rows"
    )
  tensors = Tensors(
    {name: entry.shape for name, entry in header.tensors.items()},
    functools.partial(gguf_file.read, header),
  )
  return {
    "model_type": family.name,
    "vocab_size": vocab_size,
    "tie_word_embeddings": "output.weight" not in header.tensors,
    **{name: metadata[key] for key, name in keys.items() if key in metadata},
    **how.settings(metadata, tensors),
  }


def _how(arch: str) -> Gguf:
  """The GGUF description of an architecture."""
  form = _FAMILIES[arch].gguf
  assert form is not None
  return form


def _rotation(
  header: Header, arch: str, config: TransformerConfig
) -> dict[str, Any]:
  """Rotary settings, which GGUF files express in their own way."""
  size_of = lambda key: header.metadata.get(f"{arch}.{key}", config.head_dim)
  read = "attention.value_length" in _how(arch).also
  if not read and size_of("attention.value_length") != config.head_dim:
    raise ValueError(
      f"{arch}.attention.value_length must be that of keys, {config.head_dim}, "
      f"got {size_of('attention.value_length')!r:.40}"
    )
  rotary = size_of("rope.dimension_count")
  most, how = config.head_dim, _how(arch)
  if how.rotary == "part":
    if type(rotary) is not int or not 2 <= rotary <= most or rotary % 2:
      raise ValueError(
        f"{arch}.rope.dimension_count must be even and in 2..{most}, got "
        f"{rotary!r:.40}"
      )
    return {"rotary_dim": rotary}
  if how.rotary == "all" and rotary != most:
    raise ValueError(
      f"{arch}.rope.dimension_count must be that of keys, {most}, got "
      f"{rotary!r:.40}"
    )
  if how.factors != "all" or _FREQUENCIES not in header.tensors:
    return {}
  if config.layers is not None:
    raise ValueError(f"{_FREQUENCIES} is not read for a mixture of experts")
  entry = header.tensors[_FREQUENCIES]
  if entry.shape != (most // 2,) or entry.kind.name != "F32":
    raise ValueError(
      f"{_FREQUENCIES} must be {most // 2} numbers of type F32, got "
      f"{entry.shape} of {entry.kind.name}"
    )
  factors = gguf_file.read(header, _FREQUENCIES)
  if not np.all(np.isfinite(factors) & (factors > 0)):
    raise ValueError(f"{_FREQUENCIES} must be positive numbers")
  return {"rope_factors": tuple(factors.tolist())}


# ------------------------------------------------------------------- tensors


def source(path: str, stack: contextlib.ExitStack | None = None) -> Source:
  """Opens a file's model; `stack` has nothing to close. Raises as `load`."""
  del stack
  header = gguf_file.read_header(path)
  config, family = _configuration(header)
  names = _names(architecture(header), family)
  whole = {*weights.modules(weights.in_gguf(family))}
  left_out = FAMILIES[family].left_out
  factors = _how(architecture(header)).factors
  tensors: dict[str, Tensor] = {}
  problems = []
  for own_name in header.tensors:
    if own_name == _FREQUENCIES and factors:
      continue
    name = own_name
    if match := _NAME.fullmatch(own_name):
      number, module, suffix = match.groups()
      place = module if number is None else f"blk.#.{module}"
      if number is not None and left_out(f"layers.{number}.{module}", config):
        continue
      if place in names:
        by = "_" if f"{names[place]}_{suffix}" in whole else "."
        name = f"{names[place].replace('#', number or '')}{by}{suffix}"
        if left_out(name, config):
          continue
    if name in tensors:
      problems.append(f"twice: {tensors[name].name} and {own_name}")
    tensors[name] = _tensor(header, own_name, name, config)
  for name, how in _how(architecture(header)).joined.items():
    for number in map(str, range(config.num_layers)):
      each = [f"{n.replace('#', number)}.weight" for n in (name, *how.parts)]
      _join(tensors, how, *each)
  return Source(
    path=str(header.path),
    says="metadata",
    config=config,
    family=weights.in_gguf(family),
    tensors=tensors,
    kinds=KINDS,
    problems=tuple(problems),
    published=_published(header),
  )


def _join(
  tensors: dict[str, Tensor], how: Joined, name: str, one: str, other: str
) -> None:
  """Puts one tensor in the place of two, if they are there."""
  parts = [tensors[x] for x in (one, other) if x in tensors]
  if len(parts) < 2 or any(len(tensor.shape) != 3 for tensor in parts):
    return  # of which others complain
  del tensors[one], tensors[other]
  kinds = [tensor.kind for tensor in parts]
  read = lambda index: how.take(*(tensor.read(()) for tensor in parts))[index]
  tensors[name] = Tensor(
    name=" and ".join(tensor.name for tensor in parts),
    shape=how.shape(*(tensor.shape for tensor in parts)),
    kind=next((kind for kind in kinds if kind not in KINDS), kinds[0]),
    read=read,
  )


def _published(header: Header) -> str:
  """The published form of weights in few bits, in words."""
  kinds = {entry.kind.name for entry in header.tensors.values()}
  few = sorted(kinds - {"F32", "F16", "BF16"})
  return f"{', '.join(few)} of GGUF" if few else ""


@functools.cache
def _names(arch: str, family: str) -> dict[str, str]:
  """llama.cpp's names of modules, as Hugging Face calls them; # is a layer."""
  prefix = _how(arch).prefix
  number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
  table = gguf.get_tensor_name_map(number, 1)
  names = {}
  apart = [x for how in _how(arch).joined.values() for x in how.parts]
  for name in [*weights.modules(weights.in_gguf(family)), *apart]:
    for suffix in (".weight", ".scale", "_bias"):
      name = name.removesuffix(suffix)
    full = ("" if name == "lm_head" else prefix) + name.replace("#", "0")
    full = full.replace(".*", "")  # all experts are one tensor
    if short := table.get_name(full):
      names[short.replace("blk.0.", "blk.#.")] = name
  return names


def _tensor(
  header: Header, own_name: str, name: str, config: TransformerConfig
) -> Tensor:
  """A tensor as it was before llama.cpp's converter."""
  entry, how = header.tensors[own_name], _how(architecture(header))
  shape, module = entry.shape, name.split(".")[-2:-1]
  order = None
  for part in module:
    order = how.rows(part, config)
  if order is not None and len(order) != shape[0]:
    order = None  # a wrong shape, of which others complain
  flat = len(shape) == 1 and any(one in how.row for one in module)
  turned = len(shape) == 2 and any(one in how.transposed for one in module)
  more = how.plus_one and module and module[0].endswith("norm")

  def read(index: tuple[slice, ...]) -> np.ndarray:
    if turned:
      return gguf_file.read(header, own_name, index[::-1]).T
    if flat:
      return gguf_file.read(header, own_name)[None][index]
    values = gguf_file.read(header, own_name, index, order=order)
    return values - 1 if more else values

  packed = None
  bits = gguf_file.SCALED.get(entry.kind.name)
  if bits and len(shape) == 2 and not turned and not more:
    parts = functools.partial(gguf_file.parts, header, own_name, order=order)
    packed = Packed(
      kind=f"int{bits}",
      group_of=np.arange(shape[1]) // 32,
      numbers=lambda rows: parts(rows)[0],
      scales=lambda rows: parts(rows)[1],
    )
  return Tensor(
    name=own_name,
    shape=(1, *shape) if flat else shape[::-1] if turned else shape,
    kind=entry.kind.name,
    read=read,
    packed=packed and packed.parts(),
  )
