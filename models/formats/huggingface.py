"""Reads checkpoints in Hugging Face's format, and writes Llama's and T5's.

Needs neither torch nor transformers: `config.json` is plain JSON, weights are
safetensors. huggingface_config.py translates the configuration, weights.py
maps tensors to parameters.

An unknown setting that could change the logits is an error, as is an extra,
missing or misshapen tensor.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import tokenizers
from models.formats import (
  experts,
  json_files,
  mxfp4,
  safetensors_file,
  weights,
)
from models.formats.families import FAMILIES
from models.formats.families.family import Table
from models.formats.huggingface_config import (
  check_t5,
  config_from_json,
  llama_json,
  of_text,
  packing_of,
)
from models.formats.weights import Source, Tensor
from models.networks import t5_config
from models.networks.layers import TransformerConfig
from models.networks.t5 import T5
from models.networks.t5_config import T5Config
from models.networks.transformer import Transformer

# Prefixes that files may have; GPT-NeoX has two names for its head.
_PREFIX = re.compile(
  r"^(language_model\.model|model\.language_model|language_model|transformer|"
  r"gpt_neox|model)\."
)
_OLD_HEAD = re.compile(r"^embed_out\.")
# Tensors to ignore: causal masks and rotary frequencies, a bias that old T5
# files have and no T5 uses, and draft heads in the target's files (Medusa's,
# Qwen's MTP), which are loaded separately.
_BUFFER = re.compile(
  r"rotary_emb\.inv_freq|(h|layers)\.\d+\.(attn|attention|self_attn)\."
  r"(bias|masked_bias|rotary_emb\.inv_freq)"
  r"|medusa_head\..*|mtp\..*|decoder\.block\.0\.layer\.1\.EncDecAttention\."
  r"relative_attention_bias\.weight"
)
# Other parts of multimodal models.
_OF_OTHERS = re.compile(
  r"(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_vision|"
  r"embed_audio|visual)\..*"
)


def read_config(directory: str) -> TransformerConfig | T5Config:
  """Reads the configuration of a checkpoint directory; raises like `source`."""
  return _configuration(pathlib.Path(directory))[0]


def translate(settings: Mapping[str, Any]) -> TransformerConfig | T5Config:
  """Translates a `config.json`; raises ValueError if not supported."""
  if settings.get("model_type") == "t5":
    check_t5(settings)
    return t5_config.config_from_json(settings)
  return config_from_json(settings)


def _configuration(
  path: pathlib.Path,
) -> tuple[TransformerConfig | T5Config, Mapping[str, Any]]:
  """The configuration, and the contents of its file."""
  if not path.is_dir():
    raise FileNotFoundError(
      f"there is no directory {str(path)!r}, and it is not a name on the Hub "
      "(ORG/NAME)"
    )
  settings = json_files.read_object(path / "config.json")
  try:
    return translate(settings), settings
  except ValueError as error:
    raise ValueError(f"cannot use {path / 'config.json'}: {error}") from error


def source(directory: str) -> Source:
  """Opens a checkpoint directory for `models.formats.loading`.

  It holds `config.json` and either `model.safetensors` or
  `model.safetensors.index.json` with the files it names.

  Raises:
    FileNotFoundError: if the directory or a file is missing.
    ValueError: if a file cannot be read, or the model is not supported.
  """
  path = pathlib.Path(directory)
  config, settings = _configuration(path)
  if isinstance(config, T5Config):
    return t5_source(path, config)
  family = FAMILIES[of_text(settings)["model_type"]]
  tensors = _open(_weight_files(path))
  in_blocks = any(name.endswith("_blocks") for name in tensors)
  label = "mxfp4, blocks of 32" if in_blocks else ""
  if (packing := packing_of(settings)) is not None:
    tensors, label = packing.join(tensors), packing.label
  tensors = {
    name: tensor
    for name, tensor in tensors.items()
    if not family.ignores(name, config)
    and not (family.multimodal and _OF_OTHERS.match(tensor.name))
  }
  return Source(
    path=str(path),
    config=config,
    table=family,
    tensors=mxfp4.join(
      experts.of_projections(experts.of_experts(tensors), family)
    ),
    published=label,
  )


def t5_source(path: pathlib.Path, config: T5Config) -> Source:
  """Opens the tensors of a T5.

  The output projection is untied if the files have one, whatever `config.json`
  says. If `shared.weight` is missing, the embedding is taken from the encoder
  or the decoder, as in transformers.
  """
  tensors = _open(_weight_files(path))
  shared = "shared.weight"
  for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
    if shared not in tensors and name in tensors:
      tensors = {**tensors, shared: tensors[name]}
  tied = "lm_head.weight" not in tensors
  return Source(
    path=str(path),
    config=dataclasses.replace(config, tied_embeddings=tied),
    table=_t5_table(config),
    tensors=tensors,
  )


def _t5_table(config: T5Config) -> Table:
  return weights.T5_GATED if config.gated_mlp else weights.T5_PLAIN


def eos_token_ids(directory: str) -> tuple[int, ...]:
  """End-of-text ids in a checkpoint's files, if any.

  `generation_config.json` takes precedence over `config.json`.
  """
  for name in ("generation_config.json", "config.json"):
    path = pathlib.Path(directory) / name
    said = json_files.read_object(path) if path.is_file() else {}
    for settings in (said, said.get("text_config") or {}):
      ids = settings.get("eos_token_id")
      if ids is not None:
        return tuple(ids if isinstance(ids, list) else [ids])
  return ()


def _weight_files(path: pathlib.Path) -> list[pathlib.Path]:
  whole, index = (
    path / f"model.safetensors{suffix}" for suffix in ("", ".index.json")
  )
  if whole.is_file():
    return [whole]
  if not index.is_file():
    raise FileNotFoundError(
      f"there are no weights in {path}: expected {whole.name}, or {index.name}"
    )
  return json_files.indexed_files(index)


def _open(files: Iterable[pathlib.Path]) -> dict[str, Tensor]:
  """The tensors of some files."""
  tensors: dict[str, Tensor] = {}
  for path in files:
    for full_name, tensor in safetensors_file.open_tensors(path).items():
      name = _OLD_HEAD.sub("lm_head.", _PREFIX.sub("", full_name))
      if name in tensors:
        raise weights.CheckpointError(
          f"twice in {path.parent}: {tensors[name].name} and {full_name}"
        )
      if not _BUFFER.fullmatch(name):
        tensors[name] = tensor
  return tensors


def save_llama(
  module: Transformer,
  directory: str,
  *,
  tokenizer: tokenizers.Tokenizer | None = None,
  dtype=jnp.bfloat16,
) -> None:
  """Writes a Llama checkpoint that `source` and transformers can read.

  Args:
    module: a model that Llama's format can express: RMS norms, gated SiLU MLPs,
      full rotary embeddings, one bias switch for all attention projections.
    directory: as for `models.formats.safetensors_file.save`.
    tokenizer: saved too. Its end-of-text token becomes the model's
      `bos_token_id` and `eos_token_id`.
    dtype: dtype of the file: float32, bfloat16 or float16.

  Raises:
    ValueError: if Llama's format cannot express the module, the tokenizer has
      more tokens than the module, or for another dtype.
  """
  tensors = {
    name if name.startswith("lm_head.") else f"model.{name}": array
    for name, array in _named(module, FAMILIES["llama"]).items()
  }
  _save(module.config, llama_json, tensors, directory, tokenizer, dtype)


def save_t5(
  module: T5,
  directory: str,
  *,
  tokenizer: tokenizers.Tokenizer | None = None,
  dtype=jnp.float32,
  settings: Mapping[str, Any] | None = None,
  tensors: Mapping[str, np.ndarray] | None = None,
) -> None:
  """Writes a T5 that `source` and transformers can read.

  Args:
    module: the network.
    directory, tokenizer, dtype: as for `save_llama`.
    settings: additional settings for `config.json`, overriding the model's.
    tensors: additional tensors.

  Raises:
    ValueError: like `save_llama`.
  """
  arrays = {**(tensors or {}), **_named(module, _t5_table(module.config))}
  more = dict(settings or {})
  to_json = lambda *arguments: t5_config.to_json(*arguments) | more
  _save(module.config, to_json, arrays, directory, tokenizer, dtype)


def _named(module: Transformer | T5, table: Table) -> dict[str, np.ndarray]:
  """A module's parameters by tensor name."""
  named = {}
  for parameter, variable in nnx.to_flat_state(nnx.state(module)):
    name, layout = weights.locate(parameter, table)
    named[name] = layout.take(np.asarray(variable[...]), module.config)
  return named


def _save(
  config: TransformerConfig | T5Config,
  to_json: Callable[[Any, str, int | None], Mapping[str, Any]],
  tensors: Mapping[str, np.ndarray],
  directory: str,
  tokenizer: tokenizers.Tokenizer | None,
  dtype,
) -> None:
  """Writes a checkpoint; see `save_llama`.

  `to_json` maps the configuration, the dtype's name and the end-of-text token
  to the contents of `config.json`.
  """
  end = None if tokenizer is None else tokenizer.eos_token_id
  settings = to_json(config, jnp.dtype(dtype).name, end)
  if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
    raise ValueError(
      f"the tokenizer must have at most the module's {config.vocab_size} "
      f"tokens, got {tokenizer.vocab_size}"
    )
  safetensors_file.save(directory, settings, tensors, dtype=dtype)
  if tokenizer is not None:
    tokenizers.save(tokenizer, directory)
