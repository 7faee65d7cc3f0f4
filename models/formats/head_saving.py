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
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from models import draft_vocabulary
from models.formats import json_files, mtp_format
from models.formats.families import llama
from models.formats.huggingface_config import llama_json
from models.head_shapes import HeadModule, Target
from models.networks.description import DenseSpec, TransformerConfig
from models.networks.dflash import Parallel, ParallelConfig
from models.networks.eagle import EAGLE3_SWITCHES, Eagle, Eagle3, EagleConfig
from models.networks.heads import HeadConfig
from models.networks.medusa import Blockwise, Medusa
from models.networks.mtp import Mtp, MtpConfig
from models.networks.transformer import Features

_SPECULATED = 3  # tokens that EAGLE-3's and MTP's files propose to a server
_DTYPES = ("float32", "bfloat16", "float16")
_LAYER = {
  **llama.LAYER,
  "embed_norm": "input_layernorm",
  "hidden_norm": "hidden_norm",
}
_OTHER_PARTS = {"final_norm": "norm", "embed": "embed_tokens"}
# vLLM and SGLang have a name each, and take the first that they know.
_EAGLE1 = ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"]


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
  if isinstance(module, Medusa):
    settings, tensors = _medusa(module, jnp.dtype(dtype).name)
  elif isinstance(module, Blockwise):
    settings, tensors = _blockwise(module)
  elif isinstance(module, Mtp):
    settings, tensors = _mtp(module, jnp.dtype(dtype).name, verifier)
  elif isinstance(module, Parallel):
    settings, tensors = _parallel(
      module, features, jnp.dtype(dtype).name, verifier
    )
    if target is not None and "dflash_config" in settings:
      settings["num_target_layers"] = target.num_layers
  else:
    settings, tensors = _eagle(
      module, features, jnp.dtype(dtype).name, verifier
    )
  write(directory, settings, tensors | _own(module, target), dtype=dtype)


def check(config: HeadConfig) -> None:
  """Raises ValueError for a head that no format has; none is made for it."""
  if isinstance(config, EagleConfig | MtpConfig):
    _layers_json(config, "float32")
  elif isinstance(config, ParallelConfig):
    _blocks_json(config, "float32")


def _own(module: HeadModule, target: Target | None) -> dict[str, np.ndarray]:
  """Arrays of a head that could be its target's and differ from them."""
  if target is None:
    return {}
  lent = {"embed.embedding": ("embed_tokens.weight", target.embedding)}
  if "lm_head" in module.config.shared:
    lent["lm_head.weight"] = ("lm_head.weight", target.output)
  have = parameters(module)
  return {
    in_file: have[name]
    for name, (in_file, theirs) in lent.items()
    if name in have and not np.array_equal(have[name], np.asarray(theirs))
  }


def write(
  directory: str,
  settings: Mapping[str, Any],
  tensors: Mapping[str, np.ndarray],
  *,
  dtype,
) -> None:
  """Writes `config.json` and `model.safetensors`.

  Files are written elsewhere first and then renamed, `config.json` last: a
  directory without one is incomplete.

  Args:
    directory: created if need be; files of the same names are replaced.
    settings: what `config.json` is to hold.
    tensors: by their names in the file.
    dtype: of the floating ones: float32, bfloat16 or float16.

  Raises:
    ValueError: if the dtype is another one.
  """
  dtype = jnp.dtype(dtype)
  if dtype.name not in _DTYPES:
    raise ValueError(f"dtype must be one of {_DTYPES}, got {dtype.name}")
  arrays = {
    name: np.ascontiguousarray(
      x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x
    )
    for name, x in tensors.items()
  }
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as temporary:
    new = pathlib.Path(temporary)
    safetensors.numpy.save_file(
      arrays, new / "model.safetensors", metadata={"format": "pt"}
    )
    (new / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (path / "config.json").unlink(missing_ok=True)
    for name in ("model.safetensors", "config.json"):
      (new / name).chmod(0o644)
      (new / name).replace(path / name)


def _eagle(
  module: Eagle | Eagle3, features: Features, dtype: str, verifier: str | None
):
  config, layer = module.config, module.config.layer
  third = isinstance(module, Eagle3)
  switches = {s: getattr(config, s) for s in EAGLE3_SWITCHES}
  other = third and (
    layer.num_layers > 1
    or layer.attention.qk_norm
    or layer.has_windows
    or any(switches.values())
  )
  first = "midlayer" if third and not other else "layers.0"
  tensors = {}
  for name, array in parameters(module).items():
    part, _, leaf = name.rpartition(".")
    # See `_own`; `speculators` reads the embedding from the head's file.
    if (part == "embed" and not other) or (part == "lm_head" and not third):
      continue
    prefix = first
    if part.startswith("later."):
      _, number, part = part.split(".", 2)
      prefix = f"layers.{int(number) + 1}"
    known = _LAYER.get(part)
    part = _OTHER_PARTS.get(part, part).replace("fc_norms.", "fc_norm.")
    part = f"{prefix}.{known}" if known else part
    tensors[f"{part}.{'bias' if leaf == 'bias' else 'weight'}"] = array
  tensors |= _missing_biases(layer, tensors)
  if not third:
    return _layers_json(config, dtype) | {
      "architectures": _EAGLE1,
      "bias": config.fc_bias,
      "qkv_bias": layer.attention.qkv_bias,  # what its authors' code looks at
    }, tensors
  ids = "eagle_aux_hidden_state_layer_ids"
  if other:
    settings = _speculators(
      "eagle3", "Eagle3Speculator", _SPECULATED, verifier
    ) | {
      "transformer_layer_config": _layers_json(config, dtype),
      ids: [int(i) for i in features],
      **switches,
    }
  else:
    # vLLM looks at the top first and numbers layers by what they read, SGLang
    # and SpecForge look within and number them by what they give.
    settings = _layers_json(config, dtype) | {
      "architectures": ["LlamaForCausalLMEagle3"],
      ids: [int(i) for i in features],
      "eagle_config": {
        ids: [int(i) - 1 for i in features],
        "use_aux_hidden_state": True,
      },
    }
  if config.num_features != config.num_fused * layer.embed_dim:
    settings["target_hidden_size"] = config.num_features // config.num_fused
  words = config.draft_vocab_size
  settings["draft_vocab_size"] = words or layer.vocab_size
  if words:
    tensors |= draft_vocabulary.tensors_of(
      module.target_ids[...], layer.vocab_size
    )
  return settings, tensors


def _missing_biases(
  layer: TransformerConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Biases that a layer does not have and its format does (`_layers_json`)."""
  if layer.attention.out_bias or not layer.attention.qkv_bias:
    return {}
  return {
    name.replace("q_proj", "o_proj"): np.zeros(layer.embed_dim, array.dtype)
    for name, array in tensors.items()
    if name.endswith("q_proj.bias")
  }


def _mtp(module: Mtp, dtype: str, verifier: str | None):
  tensors, names = {}, mtp_format.SPECULATORS.modules
  for name, array in parameters(module).items():
    part, _, leaf = name.rpartition(".")
    if part in ("embed", "lm_head"):
      continue  # see `_own`
    part = names.get(part) or _LAYER[part.removeprefix("layer.")]
    leaf = "bias" if leaf == "bias" else "weight"
    tensors[f"mtp_layers.0.{part}.{leaf}"] = array
  return _speculators("mtp", "MTPDraftModel", _SPECULATED, verifier) | {
    "transformer_layer_config": _layers_json(module.config, dtype),
    "num_nextn_predict_layers": 1,
  }, tensors | _missing_biases(module.config.layer, tensors)


def _speculators(
  kind: str, architecture: str, drafted: int, verifier: str | None
) -> dict[str, Any]:
  """Settings of every `speculators` configuration; servers need them all."""
  if not verifier:
    raise ValueError(
      "this head is saved in speculators' form, which says where its target "
      "is: verifier is missing"
    )
  file = pathlib.Path(verifier) / "config.json"
  theirs = json_files.read_object(file) if file.is_file() else {}
  return {
    "architectures": [architecture],
    "speculators_model_type": kind,
    "speculators_config": {
      "algorithm": kind,
      "default_proposal_method": "greedy",
      "proposal_methods": [
        {"proposal_type": "greedy", "speculative_tokens": drafted}
      ],
      "verifier": {
        "name_or_path": verifier,
        "architectures": theirs.get("architectures") or [],
      },
    },
  }


def _parallel(
  module: Parallel, features: Features, dtype: str, verifier: str | None
):
  config, layers = module.config, module.config.layers
  inner, theirs = _blocks_json(config, dtype)
  words = config.draft_vocab_size
  tensors = {}
  for name, array in parameters(module).items():
    part, _, leaf = name.rpartition(".")
    if part == "embed" or (part == "lm_head" and not words):
      continue  # see `_own`; `speculators` too reads the target's embedding
    leaf = "bias" if leaf == "bias" else "weight"
    part = _OTHER_PARTS.get(part, part)
    if part.startswith("layers."):
      _, number, rest = part.split(".", 2)
      part = f"layers.{number}.{_LAYER[rest]}"
    tensors[f"{part}.{leaf}"] = array
  if not theirs:
    return inner | {
      "architectures": ["DFlashDraftModel"],
      "block_size": config.block_size,
      "dflash_config": {
        "mask_token_id": config.mask_token,
        # Numbered by what they give.
        "target_layer_ids": [int(i) - 1 for i in features],
      },
    }, tensors
  if words:
    tensors |= draft_vocabulary.tensors_of(
      module.target_ids[...], layers.vocab_size
    )
  return _speculators(
    "dflash", "DFlashDraftModel", config.num_predicted, verifier
  ) | {
    "transformer_layer_config": inner,
    "draft_vocab_size": words or layers.vocab_size,
    "block_size": config.block_size,
    "mask_token_id": config.mask_token,
    "aux_hidden_state_layer_ids": [int(i) for i in features],
    "sample_from_anchor": False,
    "sliding_window_non_causal": not config.causal_windows,
  }, tensors


def _layers_json(config: EagleConfig | MtpConfig, dtype: str) -> dict[str, Any]:
  """The settings of the layers of EAGLE's heads, or of MTP's."""
  layer = config.layer
  if layer.attention.qkv_bias:  # perhaps Qwen2's; a Llama's has all four
    layer = layer.with_attention(
      lambda a: dataclasses.replace(a, out_bias=True)
    )
  of_eagle1 = config.kind == "eagle"
  if layer.attention.qk_norm and not of_eagle1:
    return _qwen3_json(layer, dtype)
  return _layer_json(layer, dtype)


def _blocks_json(
  config: ParallelConfig, dtype: str
) -> tuple[dict[str, Any], bool]:
  """The settings of blocks' layers, and whether the form is `speculators`'."""
  layers, slides = config.layers, config.layers.has_windows
  mlp = layers.layers[0].feed_forward
  if not layers.attention.qk_norm or (isinstance(mlp, DenseSpec) and mlp.bias):
    raise ValueError("this format's layers are Qwen3's")
  theirs = config.draft_vocab_size is not None or (
    slides and config.windows_before_block
  )
  if slides and not (config.causal_windows or theirs):
    raise ValueError("no format has windows that end at a token it may pass")
  return _qwen3_json(layers, dtype), theirs


def _qwen3_json(layers: TransformerConfig, dtype: str) -> dict[str, Any]:
  """The settings of layers that are Qwen3's."""
  bare = layers.with_attention(lambda a: dataclasses.replace(a, qk_norm=None))
  inner = _layer_json(bare, dtype)
  del inner["mlp_bias"], inner["architectures"]
  return inner | {"model_type": "qwen3"}


def _layer_json(layer: TransformerConfig, dtype: str) -> dict[str, Any]:
  """The settings of a head's layers, and which of them slide.

  It may not say for how many positions.
  """
  known, windows = layer.max_positions, layer.windows
  bare = layer.with_attention(lambda a: dataclasses.replace(a, window=None))
  settings = llama_json(
    dataclasses.replace(bare, max_positions=known or 1), dtype, None
  )
  if known is None:
    del settings["max_position_embeddings"]
  if layer.has_windows:
    size, *others = {w for w in windows if w}
    if others:
      raise ValueError(f"one window for all layers, got {windows}")
    settings |= {
      "sliding_window": size,
      "use_sliding_window": True,
      "layer_types": [
        "sliding_attention" if w else "full_attention" for w in windows
      ],
    }
  return settings


def _medusa(module: Medusa, dtype: str):
  c = module.config
  tensors = {}
  for h, head in enumerate(module.heads):
    for b, block in enumerate(head.blocks):
      for name, array in parameters(block).items():
        leaf = "bias" if name == "bias" else "weight"
        tensors[f"blocks.{h}.layers.{b}.{leaf}"] = array
    (array,) = parameters(head.lm_head).values()
    tensors[f"lm_heads.{h}.weight"] = array
  if c.draft_vocab_size is not None:
    tensors["token_map"] = np.asarray(module.target_ids[...]).astype(np.int64)
  return {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "num_heads": c.num_heads,
    "num_hidden_layers": c.num_layers,
    "hidden_size": c.embed_dim,
    "vocab_size": c.vocab_size,
    "truncated_vocab_size": c.draft_vocab_size or c.vocab_size,
    "medusa_fc_bias": c.bias,
    "dtype": dtype,
    "torch_dtype": dtype,
  }, tensors


def _blockwise(module: Blockwise):
  c = module.config
  tensors = {
    name: array
    for name, array in parameters(module).items()
    if not name.startswith("lm_head.")
  }
  return {
    "model_type": "blockwise",
    "num_heads": c.num_heads,
    "hidden_dim": c.hidden_dim,
    "hidden_size": c.embed_dim,
    "vocab_size": c.vocab_size,
  }, tensors


def parameters(module: nnx.Module) -> dict[str, np.ndarray]:
  """A module's parameters by dotted names."""
  return {
    ".".join(map(str, path)): np.asarray(variable[...])
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
  }
