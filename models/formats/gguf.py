"""Reads models from GGUF files, llama.cpp's format, quantized or not.

A file becomes the same `Source` as a directory in Hugging Face's format: its
metadata is translated to the keys of a `config.json`, its tensors get their
Hugging Face names back, and the converter's permutations of rows are undone.
Quantized tensors are dequantized on read.

An unknown setting that could change the logits is an error.
"""

import dataclasses
import functools
import re
from typing import Any

import gguf
import numpy as np

from models.formats import gguf_file, gguf_tokenizer, quantized_files
from models.formats.families import FAMILIES
from models.formats.families.family import Gguf, Settings, Table, Tensors
from models.formats.gguf_file import Header
from models.formats.huggingface_config import config_from_json
from models.formats.weights import Source, Tensor
from models.networks.layers import TransformerConfig

KINDS = (
  "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K",
  "Q4_K", "Q5_K", "Q6_K", "MXFP4",
)  # fmt: skip

_FAMILIES = {
  family.gguf.architecture: (family.name, family.gguf)
  for family in FAMILIES.values()
  if family.gguf is not None
}
# Keys that change nothing if they have this value or are missing.
_PLAIN = {
  "rope.scaling.type": "none",
  "rope.scaling.factor": 1.0,
  "rope.scale_linear": 1.0,
  "rope.scaling.attn_factor": 1.0,
  "attention.causal": True,
  "expert_count": 0,
  "expert_used_count": 0,
}
_HARMLESS = {
  "rope.scaling.original_context_length",
  "rope.scaling.finetuned",
  "tensor_data_layout",  # says where rows came from, not where they are
}
# Sizes that follow from others if they are missing.
_OF_OTHERS = {"attention.head_count_kv", "attention.key_length"}
_DIVISORS = "rope_freqs.weight"  # of rotary frequencies
_NAME = re.compile(r"(?:blk\.(\d{1,9})\.)?(.+)\.(weight|bias|scale)")


def read_config(path: str) -> TransformerConfig:
  """Reads the model configuration of a file.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it cannot be read, or the model is not supported.
  """
  return _configuration(gguf_file.read_header(path))[0]


def eos_token_ids(path: str) -> tuple[int, ...]:
  """End-of-text and end-of-turn ids, by the metadata or by their names."""
  metadata = gguf_file.read_header(path).metadata
  keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
  ids = {metadata[key] for key in keys if key in metadata}
  return tuple(sorted({*ids, *gguf_tokenizer.named_ends(metadata)}))


def _family(header: Header) -> tuple[str, Gguf]:
  """The family's name and its GGUF conventions."""
  name = header.metadata.get("general.architecture")
  if name not in _FAMILIES:
    raise ValueError(
      f"general.architecture in {header.path} must be one of "
      f"{sorted(_FAMILIES)}, got {name!r:.80}"
    )
  return _FAMILIES[name]


def _configuration(header: Header) -> tuple[TransformerConfig, str]:
  """The model's configuration and its family's name."""
  family, how = _family(header)
  prefix = f"{how.architecture}."
  metadata = Settings(
    {
      key.removeprefix(prefix): value
      for key, value in header.metadata.items()
      if key.startswith(prefix)
    },
    {},
  )
  try:
    settings = {"model_type": family, **_settings(header, how, metadata)}
    config = config_from_json(settings)
    _check_rest(metadata, how, config)
    ropes = [a.rope for a in config.attentions.values() if a.rope is not None]
    if _DIVISORS in header.tensors and all(x.factors is None for x in ropes):
      # Llama 3's rescaled frequencies.
      divisors = tuple(gguf_file.read(header, _DIVISORS).tolist())
      divided = lambda a: dataclasses.replace(
        a, rope=dataclasses.replace(a.rope, factors=divisors)
      )
      config = config.with_attention(divided)
  except (ValueError, KeyError) as error:
    raise ValueError(f"cannot use {header.path}: {error}") from error
  return config, settings["model_type"]


def _settings(header: Header, how: Gguf, metadata: Settings) -> dict[str, Any]:
  """Translates the metadata to the contents of a `config.json`."""
  shapes = {n: gguf_file.shape_of(x) for n, x in header.tensors.items()}
  tensors = Tensors(shapes, functools.partial(gguf_file.read, header))
  return {
    "vocab_size": shapes["token_embd.weight"][0],
    "tie_word_embeddings": "output.weight" not in shapes,
    **{
      name: metadata.get(key)
      for key, name in how.keys.items()
      if key in metadata or key in _OF_OTHERS
    },
    **how.settings(metadata, tensors),
  }


def _check_rest(
  metadata: Settings, how: Gguf, config: TransformerConfig
) -> None:
  """Raises ValueError for unread metadata without a default value."""
  size = config.attention.head_dim
  plain = _PLAIN | {
    "vocab_size": config.vocab_size,
    "attention.value_length": size,
    "rope.dimension_count": size,
  }
  for key in sorted({*metadata} - how.keys.keys() - metadata.used - _HARMLESS):
    name, value = f"{how.architecture}.{key}", metadata[key]
    if key not in plain:
      raise ValueError(f"{name} is not supported")
    if np.any(np.asarray(value) != plain[key]):
      raise ValueError(
        f"{name} must be {plain[key]!r} or left out, got {value!r:.40}"
      )


def source(path: str) -> Source:
  """Opens a file's model; raises like `read_config`."""
  header = gguf_file.read_header(path)
  config, family = _configuration(header)
  (_, how), theirs = _family(header), FAMILIES[family]
  table = Table(
    name=family,
    tensors={**theirs.tensors, **how.tensors},
    layouts={**theirs.layouts, **how.layouts},
  )
  names = _names(how.architecture, tuple(sorted({*table.tensors.values()})))
  tensors: dict[str, Tensor] = {}
  for own_name in header.tensors:
    if own_name == _DIVISORS:
      continue
    name = own_name
    if match := _NAME.fullmatch(own_name):
      number, module, suffix = match.groups()
      place = module if number is None else f"blk.#.{module}"
      if place in names:
        whole = f"{names[place]}_{suffix}" in table.tensors.values()
        name = f"{names[place]}{'_' if whole else '.'}{suffix}"
        name = name.replace("#", number or "")
        if theirs.ignores(name, config):
          continue
    tensors[name] = _tensor(header, own_name)
  kinds = {tensor.tensor_type.name for tensor in header.tensors.values()}
  quantized = sorted(kinds - {"F32", "F16", "BF16"})
  return Source(
    path=str(header.path),
    config=config,
    table=table,
    tensors=tensors,
    published=f"{', '.join(quantized)} of GGUF" if quantized else "",
  )


@functools.cache
def _names(arch: str, modules: tuple[str, ...]) -> dict[str, str]:
  """Maps llama.cpp's names to modules or tensors; # is a layer number."""
  number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
  table = gguf.get_tensor_name_map(number, 1)
  names = {}
  for name in modules:
    for suffix in (".weight", ".scale", "_bias"):
      name = name.removesuffix(suffix)
    theirs = name.replace("#", "0").replace(".*", "")  # experts are one tensor
    for prefix in ("model.", ""):
      if short := table.get_name(f"{prefix}{theirs}"):
        names[short.replace("blk.0.", "blk.#.")] = name
  return names


def _tensor(header: Header, name: str) -> Tensor:
  """A tensor, with integers and scales if its type is in `BLOCKS`."""
  kind, quantized = header.tensors[name].tensor_type.name, None
  shape = gguf_file.shape_of(header.tensors[name])
  blocks = gguf_file.BLOCKS.get(kind)
  if blocks and len(shape) > 1:
    scales = functools.partial(gguf_file.scales, header, name)
    quantized = quantized_files.tensor(
      shape,
      dtype="int4" if blocks.bits == 4 else "int8",
      group_of=np.arange(shape[-1]) // blocks.group,
      values=functools.partial(gguf_file.numbers, header, name),
      scales=lambda rows: scales(rows)[0],
      minima=(lambda rows: scales(rows)[1]) if "m" in blocks.fields else None,
    ).quantized
  return Tensor(
    name=name,
    shape=shape,
    kind="F32" if kind in KINDS else kind,
    read=functools.partial(gguf_file.read, header, name),
    quantized=quantized,
  )
