"""Published DFlash heads, in two formats.

The authors': `config.json` is Qwen3's for the head's own layers, with
`block_size` and `dflash_config` added; the tensors are those layers', `fc`,
`hidden_norm` and `norm`. Embedding and output projection are the target's.
Feature layers are numbered by their outputs: id i is the input of layer i + 1.

The `speculators` library's (`"speculators_model_type": "dflash"`): the layers'
settings are nested in `transformer_layer_config`, feature layers are numbered
by their inputs, and a head may have a draft vocabulary (`draft_vocab_size`),
with its own `lm_head`, `d2t` and `t2d`. Other projectors, and blocks that also
draft at the newest token, are rejected.

DFlash 2 uses its authors' format, with more settings in `dflash_config`.
JetSpec's heads are DFlash's with causal blocks (`dflash_config.causal_head`,
in vLLM `dflash_config.causal`, or `is_causal`).

A layer may have a sliding window of W. Its blocks are then causal too, unless
`speculators` sets `sliding_window_non_causal`, or the authors' file sets
`is_causal: false`. A token sees text less than W away; in `speculators`'
format, every token of the block sees the W tokens before the block. The heads
were trained this way.
"""

from collections.abc import Mapping
from typing import Any

from models.formats import head_settings, json_files
from models.formats.families import llama
from models.formats.families.reading import get
from models.formats.head_settings import (
  INERT,
  NESTED,
  OF_LAYERS,
  layers_json,
  layers_read,
)
from models.head_shapes import HeadShape, Target
from models.networks.dflash import ParallelConfig
from models.networks.dflash2 import DFlash2Config
from models.networks.transformer import Features

_NATIVE = frozenset(
  {"block_size", "dflash_config", "num_target_layers", "is_causal"}
)
_CAUSAL = ("causal", "causal_head")  # vLLM's name and JetSpec's own
_OF_DFLASH = frozenset(
  {"mask_token_id", "target_layer_ids", "block_size", *_CAUSAL}
)
# Fields of `DFlash2Config`, and what `dflash_config` calls them.
_SIZES_OF_2 = {
  "taps": "conv_kernel_size",
  "group": "conv_group_size",
  "rank": "selector_rank",
  "num_candidates": "selector_top_k",
}
_SCALE, _SOFTCAP = "output_multiplier", "final_logit_softcapping"
_INPUTS = "input_embedding_scale"
_ARCHITECTURE_OF_2 = "DFlash2DraftModel"
_SPECULATORS = frozenset(
  """
  draft_vocab_size target_hidden_size block_size aux_hidden_state_layer_ids
  mask_token_id sliding_window_non_causal sample_from_anchor projector_type
  shift_label

  auf pure_draft_prefix_len emb_dim gru_hidden_dim lambda_base_start
  lambda_base_decay_ratio
  """.split()
)
# Other values mean other networks.
_ONLY = {
  "sample_from_anchor": False,
  "projector_type": "dflash",
  "shift_label": False,
}


def matches(config: Mapping[str, Any]) -> bool:
  """True if a configuration is in either format."""
  return ("dflash_config" in config and _has_block(config)) or config.get(
    "speculators_model_type"
  ) == "dflash"


def _has_block(config: Mapping[str, Any]) -> bool:
  """False for a P-EAGLE head, whose `dflash_config` has only the mask."""
  return "block_size" in config or "block_size" in config["dflash_config"]


def shape(config: Mapping[str, Any], target: Target) -> HeadShape:
  """The shape of the head that a configuration describes.

  Args:
    config: the contents of `config.json`.
    target: the model that it drafts for.

  Raises:
    ValueError: for unknown switches, or a head for another target.
  """
  if "speculators_model_type" in config:
    return _speculators(config, target)
  return _native(config, target)


def usual_layers(count: int, num_layers: int) -> tuple[int, ...]:
  """The default feature layers: evenly spaced from 2 to N - 2.

  Args:
    count: number of the head's own layers, and of feature layers.
    num_layers: N, number of layers of the target.
  """
  if count == 1:
    return (num_layers // 2 + 1,)
  step = (num_layers - 4) / (count - 1)
  return tuple(round(1 + i * step) + 1 for i in range(count))


def names(config: Any) -> dict[str, str]:
  """Tensor names of the parameters that are named differently."""
  named = {
    "embed.embedding": "embed_tokens.weight",
    "hidden_norm.scale": "hidden_norm.weight",
    "final_norm.scale": "norm.weight",
  }
  for i in range(config.layers.num_layers):
    named |= llama.layer_tensors(f"layers.{i}.", f"layers.{i}.")
  return named


def settings(
  config: ParallelConfig, features: Features, dtype: str
) -> dict[str, Any]:
  """The `config.json` of a head.

  In the authors' format, or in `speculators`' if the head has a draft
  vocabulary or that library's windows.

  Raises:
    ValueError: if neither can express the head.
  """
  layers, slides = config.layers, config.layers.has_windows
  if not layers.attention.qk_norm:
    raise ValueError("this format needs Qwen3's layers")
  if config.draft_vocab_size is not None or (
    slides and config.windows_before_block
  ):
    if isinstance(config, DFlash2Config):
      raise ValueError(
        "DFlash 2's format has no draft vocabulary and no speculators windows"
      )
    if config.causal or (slides and not config.windows_before_block):
      raise ValueError(
        "a head with a draft vocabulary or speculators' windows is saved in "
        "that library's format, which has no causal blocks or other windows"
      )
    return speculators_json(config, features, dtype)
  inside = {
    "mask_token_id": config.mask_token,
    "target_layer_ids": [int(i) - 1 for i in features],
  }
  if config.causal:
    inside |= dict.fromkeys(_CAUSAL, True)
  if second := isinstance(config, DFlash2Config):
    inside |= {name: getattr(config, x) for x, name in _SIZES_OF_2.items()}
    inside |= {_SCALE: config.logit_scale, _SOFTCAP: config.softcap}
    inside["block_size"] = config.block_size  # readers look here
  both_ways = slides and not (config.causal or config.causal_windows)
  return layers_json(layers, dtype) | {
    "architectures": [_ARCHITECTURE_OF_2 if second else "DFlashDraftModel"],
    "block_size": config.block_size,
    "dflash_config": inside,
    **({"is_causal": False} if both_ways else {}),
  }


def speculators_json(
  config: ParallelConfig, features: Features, dtype: str
) -> dict[str, Any]:
  """The `config.json` of a head in `speculators`' format."""
  layers = config.layers
  return {
    "architectures": ["DFlashDraftModel"],
    "block_size": config.block_size,
    "speculators_model_type": "dflash",
    NESTED: layers_json(layers, dtype),
    "draft_vocab_size": config.draft_vocab_size or layers.vocab_size,
    "mask_token_id": config.mask_token,
    "aux_hidden_state_layer_ids": [int(i) for i in features],
    "sample_from_anchor": False,
    "sliding_window_non_causal": not config.causal_windows,
  }


# ------------------------------------------------------------- the two formats


def _native(config: Mapping[str, Any], target: Target) -> HeadShape:
  of_dflash = config["dflash_config"]
  more: dict[str, Any] = {}
  if _SIZES_OF_2["rank"] in of_dflash or _ARCHITECTURE_OF_2 in (
    config.get("architectures") or ()
  ):
    more = _of_second(of_dflash)
  else:
    json_files.refuse_unknown(of_dflash, _OF_DFLASH)
  json_files.refuse_unknown(config, OF_LAYERS | _NATIVE | INERT)
  check_target(config, target)
  name = "target_layer_ids"
  ids = of_dflash.get(name)
  if ids is None:
    count = get(config, "num_hidden_layers", int)
    ids = [i - 1 for i in usual_layers(count, target.num_layers)]
  flags = {"is_causal": config.get("is_causal")}
  flags |= {f"dflash_config.{x}": of_dflash.get(x) for x in _CAUSAL}
  causal = get({"causal": json_files.agreed(flags)}, "causal", bool, None)
  return make_shape(
    config,
    target,
    features=layers_read(name, ids, target, outputs=True, last=False),
    block_size=block_size(config, of_dflash),
    mask_token=get(of_dflash, "mask_token_id", int, least=0),
    causal=causal is True,
    causal_windows=causal is not False,
    **more,
  )


def _of_second(of_head: Mapping[str, Any]) -> dict[str, Any]:
  """DFlash 2's additional settings, as arguments of `make_shape`."""
  known = {*_SIZES_OF_2.values(), _SCALE, _SOFTCAP, _INPUTS}
  json_files.refuse_unknown(of_head, _OF_DFLASH | known)
  if of_head.get(_INPUTS) not in (None, 1):
    raise ValueError(
      f"{_INPUTS} must be 1: readers disagree on whether it scales the newest "
      f"token too, got {of_head[_INPUTS]!r}"
    )
  caps = {_SOFTCAP: of_head.get(_SOFTCAP) or None}  # 0 means none, as in vLLM
  return {
    "kind": DFlash2Config,
    "logit_scale": get(of_head, _SCALE, float, 1.0),
    "softcap": get(caps, _SOFTCAP, float, None),
  } | {x: get(of_head, name, int) for x, name in _SIZES_OF_2.items()}


def check_target(config: Mapping[str, Any], target: Target) -> None:
  """Raises ValueError if the head's target has another number of layers."""
  if config.get("num_target_layers", target.num_layers) != target.num_layers:
    raise ValueError(
      f"it was made for {config['num_target_layers']} layers, but the target "
      f"has {target.num_layers}"
    )


def block_size(config: Mapping[str, Any], nested: Mapping[str, Any]) -> int:
  """The block size, which either or both may give."""
  name = "block_size"
  size = json_files.agreed(
    {name: config.get(name), f"dflash_config.{name}": nested.get(name)}
  )
  return get({name: size}, name, int)


def _speculators(config: Mapping[str, Any], target: Target) -> HeadShape:
  settings = head_settings.speculators_layers(config, _SPECULATORS)
  for name, only in _ONLY.items():
    if config.get(name) not in (None, only):
      raise ValueError(f"{name} must be {only!r}, got {config[name]!r}")
  return make_shape(settings, target, **of_speculators(config, target))


def of_speculators(config: Mapping[str, Any], target: Target) -> dict[str, Any]:
  """`speculators`' settings for a block, as arguments of `make_shape`."""
  words = get(config, "draft_vocab_size", int)
  name = "aux_hidden_state_layer_ids"
  return {
    "features": layers_read(
      name, config.get(name), target, outputs=False, last=True
    ),
    "block_size": get(config, "block_size", int),
    "mask_token": get(config, "mask_token_id", int, least=0),
    "causal_windows": not get(config, "sliding_window_non_causal", bool, False),
    "windows_before_block": True,
    "draft_vocab_size": None if words == target.vocab_size else words,
  }


def make_shape(
  config: Mapping[str, Any],
  target: Target,
  *,
  features: Features,
  kind: type[ParallelConfig] = ParallelConfig,
  **sizes: Any,
) -> HeadShape:
  """Builds the shape of a head with Qwen3's layers.

  Args:
    config: the layers' settings.
    target: the model that it drafts for.
    features: the target's features that it reads.
    kind: class of the head's configuration.
    **sizes: its other fields.
  """
  settings = {k: v for k, v in config.items() if k in OF_LAYERS}
  if settings.get("model_type") in (None, "llama"):
    settings["model_type"] = "qwen3"  # whatever its target is
    if settings.get("head_dim") is None:  # like a Llama's, not Qwen3's 128
      size = get(settings, "hidden_size", int)
      settings["head_dim"] = size // get(settings, "num_attention_heads", int)
  layers = head_settings.head_layers(settings)
  head_settings.refuse_other_target(layers, target)  # it reads the embedding
  if not any(layers.windows or ()):  # their meaning does not matter
    sizes = {k: v for k, v in sizes.items() if "windows" not in k}
  head = kind(layers=layers, num_fused=len(features), **sizes)
  return HeadShape(config=head, features=features)
