"""Writes heads in published formats, for this and other projects to read.

EAGLE-1 and 3 as their authors do (EAGLE-3 with the list of its layers; with
switches, windows or several layers as `speculators` does), Medusa's as vLLM
does, DFlash's as its authors do, or, of a vocabulary of its own or with windows
as `speculators` means them, in its form, which those of multi-token prediction
have too. Of blockwise heads nothing was published: their `config.json` says
"blockwise", and the tensors have the names of
`models.networks.medusa.Blockwise`. Embedding and output projection are not
written where they are the target's and all readers take them from it.
models/pretrained/README.md says which program reads which form.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import draft_vocabulary
from models.formats import (
  dflash_format,
  eagle_format,
  json_files,
  mtp_format,
  safetensors_file,
)
from models.formats.families.reading import FULL, SLIDES
from models.formats.huggingface_config import llama_json
from models.head_shapes import HeadModule, Target
from models.networks.description import TransformerConfig
from models.networks.dflash import ParallelConfig
from models.networks.eagle import EAGLE3_SWITCHES, EagleConfig
from models.networks.heads import HeadConfig
from models.networks.medusa import BlockwiseConfig, MedusaConfig
from models.networks.mtp import MtpConfig
from models.networks.transformer import Features

_SPECULATED = 3  # tokens that EAGLE-3's and MTP's files propose to a server
_NESTED = "transformer_layer_config"


def save(
  module: HeadModule,
  directory: str,
  *,
  features: Features = (),
  dtype=jnp.bfloat16,
  target: Target | None = None,
  verifier: str | None = None,
) -> None:
  """Writes a head, which `models.formats.head_checkpoints.load` reads.

  Args:
    module: the head.
    directory: created if need be; files of the same names are replaced.
    features: of an EAGLE-3 or DFlash head, the layers whose inputs it reads.
    dtype: of the file: float32, bfloat16 or float16.
    target: what the head drafts for, with its arrays: those of the head that
      are not equal to them are written too. None: all that may be are its.
    verifier: where `speculators` finds the target: its folder, or its name on
      the Hub. What is saved in their form needs it.

  Raises:
    ValueError: if the format cannot express the head, if it needs a verifier
      and has none, or if the dtype is another one.
  """
  config: Any = module.config
  settings = _settings(config, features, jnp.dtype(dtype).name)
  speculators = "speculators_model_type" in settings
  if speculators:
    settings["speculators_config"] = _speculators_config(config, verifier)
  if target is not None and "dflash_config" in settings:
    settings["num_target_layers"] = target.num_layers
  shared = set(config.shared)
  if speculators and config.kind == "eagle3":
    shared -= {"embed"}  # which `speculators` reads from the head's file
  elif target is not None:
    for name, theirs in (
      ("embed", target.embedding), ("lm_head", target.output)
    ):  # fmt: skip
      if name in shared and not _is_equal(module, name, theirs):
        shared.remove(name)
  names = _names(config, speculators)
  tensors = {
    names.get(name, name): array
    for name, array in parameters(module).items()
    if name.partition(".")[0] not in shared
  }
  tensors |= _missing_biases(config, tensors)
  if config.kind == "medusa":
    tensors = {_medusas(name): array for name, array in tensors.items()}
  if config.draft_vocab_size is not None:
    ids = np.asarray(module.target_ids[...])  # type: ignore[union-attr]
    if config.kind == "medusa":
      tensors["token_map"] = ids.astype(np.int64)
    else:
      tensors |= draft_vocabulary.tensors_of(ids, config.layers.vocab_size)
  safetensors_file.save(directory, settings, tensors, dtype=dtype)


def check(config: HeadConfig) -> None:
  """Raises ValueError for a head that no format has; none is made for it."""
  _settings(config, (), "float32")


def parameters(module: nnx.Module) -> dict[str, np.ndarray]:
  """A module's parameters by dotted names."""
  return {
    ".".join(map(str, path)): np.asarray(variable[...])
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
  }


# --------------------------------------------------------------------- tensors


def _is_equal(module: nnx.Module, name: str, theirs) -> bool:
  (ours,) = parameters(getattr(module, name)).values()
  return np.array_equal(ours, np.asarray(theirs))


def _names(config: HeadConfig, speculators: bool) -> dict[str, str]:
  """Parameters and their tensors, where their names are not the same."""
  if isinstance(config, ParallelConfig):
    return dflash_format.table(config)
  if isinstance(config, MtpConfig):
    return mtp_format.SAVED
  if not isinstance(config, EagleConfig):
    return {}
  table = eagle_format.table(config)
  if config.generation == 3 and not speculators:
    table = {k: v.replace("layers.0.", "midlayer.") for k, v in table.items()}
  return table


def _medusas(name: str) -> str:
  """The name that vLLM has for a parameter of Medusa's."""
  name = re.sub(r"^heads\.(\d+)\.blocks\.", r"blocks.\1.layers.", name)
  return re.sub(r"^heads\.(\d+)\.lm_head\.", r"lm_heads.\1.", name)


def _missing_biases(
  config: HeadConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Biases that a head does not have and its format does (`_layers_json`)."""
  return {
    other: np.zeros(config.layers.embed_dim, array.dtype)
    for name, array in tensors.items()
    if name.endswith("q_proj.bias")
    and (other := name.replace("q_proj", "o_proj")) not in tensors
  }


# -------------------------------------------------------------------- settings


def _settings(
  config: HeadConfig, features: Features, dtype: str
) -> dict[str, Any]:
  """A head's `config.json`, without what says where its target is."""
  if isinstance(config, MedusaConfig):
    return {
      "architectures": ["MedusaModel"],
      "model_type": "medusa",
      "num_heads": config.num_heads,
      "num_hidden_layers": config.num_layers,
      "hidden_size": config.embed_dim,
      "vocab_size": config.vocab_size,
      "truncated_vocab_size": config.draft_vocab_size or config.vocab_size,
      "medusa_fc_bias": config.bias,
      "dtype": dtype,
      "torch_dtype": dtype,
    }
  if isinstance(config, BlockwiseConfig):
    return {
      "model_type": "blockwise",
      "num_heads": config.num_heads,
      "hidden_dim": config.hidden_dim,
      "hidden_size": config.embed_dim,
      "vocab_size": config.vocab_size,
    }
  if isinstance(config, MtpConfig):
    if config.num_depths > 1:
      raise ValueError("MTP heads of one layer are saved")
    return {
      "architectures": ["MTPDraftModel"],
      "speculators_model_type": "mtp",
      _NESTED: _layers_json(config.layers, dtype),
      "num_nextn_predict_layers": 1,
    }
  if isinstance(config, ParallelConfig):
    return _dflash(config, features, dtype)
  assert isinstance(config, EagleConfig)
  if config.generation == 1:
    return _layers_json(config.layers, dtype, with_qk_norm=False) | {
      # vLLM and SGLang have a name each, and take the first that they know.
      "architectures": ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"],
      "bias": config.fc_bias,
      # What its authors' code looks at.
      "qkv_bias": config.layers.attention.qkv_bias,
    }
  return _eagle3(config, features, dtype)


def _eagle3(
  config: EagleConfig, features: Features, dtype: str
) -> dict[str, Any]:
  layer, ids = config.layers, "eagle_aux_hidden_state_layer_ids"
  switches = {name: getattr(config, name) for name in EAGLE3_SWITCHES}
  settings: dict[str, Any] = {ids: [int(i) for i in features]}
  words = {"draft_vocab_size": config.draft_vocab_size or layer.vocab_size}
  if config.num_features != config.num_fused * layer.embed_dim:
    settings["target_hidden_size"] = config.num_features // config.num_fused
  if (
    layer.num_layers > 1
    or layer.attention.qk_norm
    or layer.has_windows
    or any(switches.values())
  ):
    return (
      settings
      | words
      | switches
      | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        _NESTED: _layers_json(layer, dtype),
      }
    )
  # vLLM looks at the top first and numbers layers by what they read, SGLang
  # and SpecForge look within and number them by what they give.
  return (
    _layers_json(layer, dtype)
    | settings
    | {
      "architectures": ["LlamaForCausalLMEagle3"],
      "eagle_config": {
        ids: [int(i) - 1 for i in features],
        "use_aux_hidden_state": True,
      },
    }
    | words
  )


def _dflash(
  config: ParallelConfig, features: Features, dtype: str
) -> dict[str, Any]:
  layers, slides = config.layers, config.layers.has_windows
  if not layers.attention.qk_norm:
    raise ValueError("this format's layers are Qwen3's")
  settings = _layers_json(layers, dtype)
  if config.draft_vocab_size is not None or (
    slides and config.windows_before_block
  ):
    return {
      "architectures": ["DFlashDraftModel"],
      "speculators_model_type": "dflash",
      _NESTED: settings,
      "draft_vocab_size": config.draft_vocab_size or layers.vocab_size,
      "block_size": config.block_size,
      "mask_token_id": config.mask_token,
      "aux_hidden_state_layer_ids": [int(i) for i in features],
      "sample_from_anchor": False,
      "sliding_window_non_causal": not config.causal_windows,
    }
  if slides and not config.causal_windows:
    raise ValueError("no format has windows that end at a token it may pass")
  return settings | {
    "architectures": ["DFlashDraftModel"],
    "block_size": config.block_size,
    "dflash_config": {
      "mask_token_id": config.mask_token,
      # Numbered by what they give.
      "target_layer_ids": [int(i) - 1 for i in features],
    },
  }


def _speculators_config(
  config: HeadConfig, verifier: str | None
) -> dict[str, Any]:
  """What every `speculators` configuration says; servers need it all."""
  if not verifier:
    raise ValueError(
      "this head is saved in speculators' form, which says where its target "
      "is: verifier is missing"
    )
  file = pathlib.Path(verifier) / "config.json"
  theirs = json_files.read_object(file) if file.is_file() else {}
  drafted = config.num_predicted or _SPECULATED
  return {
    "algorithm": config.kind,
    "default_proposal_method": "greedy",
    "proposal_methods": [
      {"proposal_type": "greedy", "speculative_tokens": drafted}
    ],
    "verifier": {
      "name_or_path": verifier,
      "architectures": theirs.get("architectures") or [],
    },
  }


def _layers_json(
  layers: TransformerConfig, dtype: str, *, with_qk_norm: bool = True
) -> dict[str, Any]:
  """The settings of a head's layers: Llama's, or with `qk_norm` Qwen3's.

  It may not say for how many positions. Where queries have biases, perhaps
  Qwen2's, all four projections have: those of a Llama.
  """
  qwens = with_qk_norm and layers.attention.qk_norm == "head"
  known, windows = layers.max_positions, layers.windows
  bare = layers.with_attention(
    lambda a: dataclasses.replace(
      a,
      window=None,
      qk_norm=None if qwens else a.qk_norm,
      out_bias=a.out_bias or a.qkv_bias,
    )
  )
  bare = dataclasses.replace(bare, max_positions=known or 1)
  settings = llama_json(bare, dtype, None)
  if known is None:
    del settings["max_position_embeddings"]
  if qwens:
    if settings.pop("mlp_bias"):
      raise ValueError("Qwen3's format cannot express mlp_bias")
    del settings["architectures"]
    settings["model_type"] = "qwen3"
  if layers.has_windows:
    size, *others = {w for w in windows if w}
    if others:
      raise ValueError(f"one window for all layers, got {windows}")
    settings |= {
      "sliding_window": size,
      "use_sliding_window": True,
      "layer_types": [SLIDES if w else FULL for w in windows],
    }
  return settings
