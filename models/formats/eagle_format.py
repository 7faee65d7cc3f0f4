"""Published EAGLE heads.

EAGLE-1 and 2 (`fc` over embedding and feature, a layer without a first norm),
and EAGLE-3 as saved by its authors, SpecForge and NVIDIA (`midlayer`) or by the
`speculators` library (`layers.0`, `speculators_model_type`). P-EAGLE heads are
EAGLE-3's with `mask_hidden` and a mask token id under one of four names.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from models.formats import head_settings, json_files
from models.formats.families import llama
from models.formats.families.reading import get
from models.formats.head_settings import INERT, NESTED, OF_LAYERS, layers_json
from models.formats.weights import Tensor
from models.head_shapes import HeadShape, Target
from models.networks.eagle import EAGLE3_SWITCHES, EagleConfig
from models.networks.layers import TransformerConfig
from models.networks.transformer import FINAL, Features

_NUMBER = re.compile(r"layers\.(\d{1,3})\.")
_FUSED = "eagle_aux_hidden_state_layer_ids"
# Settings of EAGLE-3 in any format, and in its authors' format only.
_OF_EAGLE3 = frozenset(
  {"draft_vocab_size", "target_hidden_size", _FUSED, *EAGLE3_SWITCHES}
)
_NATIVE = frozenset({"eagle_config", "use_aux_norm", "num_aux_hidden_states"})
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
# Other settings of NVIDIA's `eagle_config`, with the only supported values.
_OF_EAGLE_CONFIG = {
  "use_aux_hidden_state": True,
  "use_last_layernorm": True,
  "use_input_layernorm_in_first_layer": True,
  "use_mtp_layernorm": False,
  "next_layer_regular": True,
  "parallel_draft_step": 1,
}


def matches(config: Mapping[str, Any]) -> bool:
  """True if a configuration alone identifies an EAGLE head."""
  return "eagle_config" in config or "speculators_model_type" in config


def shape(
  config: Mapping[str, Any],
  target: Target,
  tensors: Mapping[str, Tensor] | None = None,
  *,
  generation: int = 1,
) -> HeadShape:
  """The shape of the EAGLE head that a configuration describes.

  Args:
    config: the contents of `config.json`.
    target: the model that it drafts for.
    tensors: tensors by normalized name; None if there are none to inspect.
    generation: 1 or 3, used if neither the tensors nor the file tells.

  Raises:
    ValueError: for unknown switches, or a head for another target.
  """
  kind = config.get("speculators_model_type")
  if kind not in (None, "eagle3", "peagle"):
    raise ValueError(f"speculators_model_type {kind!r} is not known")
  if kind is None:
    known = {*OF_LAYERS, *_OF_EAGLE3, *_NATIVE, *_MASKS, *INERT}
    known |= {"bias", "dflash_config"}
    json_files.refuse_unknown(config, known)
  third = kind is not None or (
    generation == 3
    if tensors is None
    else "layers.0.hidden_norm.weight" in tensors
  )
  layer = _layers(config, tensors, third)
  head_settings.refuse_other_target(layer, target, width=not third)
  if third:
    return _third(config, layer, target, tensors or {})
  # EAGLE-1 and 2: one layer over the target's final hidden state.
  first = EagleConfig(layers=layer, fc_bias=get(config, "bias", bool, True))
  return HeadShape(config=first, features=(FINAL,))


def usual_layers(num_layers: int) -> tuple[int, ...]:
  """The default layers whose inputs are fused: 2, N / 2 and N - 3."""
  return tuple(sorted((2, num_layers // 2, num_layers - 3)))


def is_tied(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
  """True if an EAGLE-3 head ties its own embedding and output projection."""
  name, nested = "tie_word_embeddings", config.get(NESTED) or {}
  own = "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors
  third = "layers.0.hidden_norm.weight" in tensors
  return third and own and bool(config.get(name) or nested.get(name))


def names(config: Any) -> dict[str, str]:
  """Tensor names of the parameters that are named differently."""
  named = {
    "embed.embedding": "embed_tokens.weight",
    **llama.layer_tensors("", "layers.0."),
    "input_norm.scale": "input_norm.weight",
    "embed_norm.scale": "layers.0.input_layernorm.weight",
    "hidden_norm.scale": "layers.0.hidden_norm.weight",
    "final_norm.scale": "norm.weight",
  }
  for i in range(config.num_fused):
    named[f"fc_norms.{i}.scale"] = f"fc_norm.{i}.weight"
  for i in range(1, config.layers.num_layers):
    named |= llama.layer_tensors(f"later.{i - 1}.", f"layers.{i}.")
  return named


# --------------------------------------------------------------------- reading


def _layers(
  config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None, third: bool
) -> TransformerConfig:
  """The configuration of the head's layers.

  A missing `rope_theta` means 10,000, whatever the target's. Only speculators'
  heads have the layers of their `model_type`; others have Llama's, unless the
  tensors show otherwise.
  """
  speculators = "speculators_model_type" in config
  if speculators:
    config = head_settings.speculators_layers(
      config, {*_OF_EAGLE3, *_MASKS, "embed_requires_grad"}
    )
  settings = {k: v for k, v in config.items() if k in OF_LAYERS}
  bias = get(
    {"qkv_bias": settings.pop("qkv_bias", None)}, "qkv_bias", bool, None
  )
  has = lambda name: f"layers.0.self_attn.{name}" in (tensors or {})
  named = settings.get("model_type")
  if not (
    (named == "qwen2" and (speculators or has("q_proj.bias")))
    or (named == "qwen3" and (speculators or has("q_norm.weight")))
  ):
    settings["model_type"] = "llama"
  count = settings.setdefault("num_hidden_layers", 1)
  if third and not speculators and tensors is not None:
    # The setting may be the target's.
    numbers = {m[1] for name in tensors if (m := _NUMBER.match(name))}
    count = settings["num_hidden_layers"] = len(numbers)
  masks = (*_MASKS, "dflash_config")
  masked = any(config.get(name) is not None for name in masks)
  told = speculators or masked or tensors is not None
  if count != 1 and not (third and told):
    raise ValueError(f"num_hidden_layers must be 1, got {count!r}")
  layer = head_settings.head_layers(settings)
  if bias is None:
    return layer
  return layer.with_attention(lambda a: dataclasses.replace(a, qkv_bias=bias))


def _third(
  config, layers, target: Target, tensors: Mapping[str, Tensor]
) -> HeadShape:
  """EAGLE-3 and its descendants."""
  nested = config.get("eagle_config") or {}
  known = {_FUSED, "layer_ids", "norm_before_fc", *_OF_EAGLE_CONFIG}
  json_files.refuse_unknown(nested, known, "settings of eagle_config")
  for key, only in _OF_EAGLE_CONFIG.items():
    if nested.get(key, only) != only:
      raise ValueError(f"eagle_config.{key} must be {only}, got {nested[key]}")
  switches = {name: get(config, name, bool, False) for name in EAGLE3_SWITCHES}
  switches["fc_norm"] |= get(config, "use_aux_norm", bool, False)
  switches["norm_before_fc"] |= get(nested, "norm_before_fc", bool, False)
  if "speculators_model_type" not in config:
    # Until September 2026 SpecForge's `norm_output` (default true) meant that
    # logits come from the normed state, while the raw state is fed back. Since
    # then, and in all servers, it means that the normed state is fed back. Here
    # logits always come from the normed state; it is fed back if the features
    # are normed too, which is true of EAGLE-3.1 and no earlier head.
    normed = switches["fc_norm"] or switches["norm_before_fc"]
    switches["norm_output"] = switches["norm_output"] and normed
  mask = _mask_token(config, tensors)
  read = _fused_layers(config, nested, target)
  width = config.get("target_hidden_size") or target.embed_dim
  if width != target.embed_dim:
    raise ValueError(
      f"it reads features of {width} channels, but the target has "
      f"{target.embed_dim}"
    )
  words = get(config, "draft_vocab_size", int, None)
  if words is None and "d2t" in tensors:
    words = tensors["d2t"].shape[0]
  head = EagleConfig(
    layers=layers,
    generation=3,
    num_fused=len(read),
    target_dim=None if width == layers.embed_dim else width,
    draft_vocab_size=None if words == layers.vocab_size else words,
    fc_bias="fc.bias" in tensors,
    mask_token=mask,
    **switches,
  )
  return HeadShape(config=head, features=read)


def _mask_token(config, tensors: Mapping[str, Tensor]) -> int | None:
  """The id of P-EAGLE's mask token; None for other heads."""
  nested = config.get("dflash_config") or {}
  json_files.refuse_unknown(nested, {_MASKS[0]}, "settings of dflash_config")
  given = {name: config.get(name) for name in _MASKS}
  given[f"dflash_config.{_MASKS[0]}"] = nested.get(_MASKS[0])
  mask = json_files.agreed(given)
  if mask is None:
    if "mask_hidden" in tensors or (
      config.get("speculators_model_type") == "peagle"
    ):
      raise ValueError(f"a P-EAGLE head needs one of {', '.join(_MASKS)}")
    return None
  if "norm_before_residual" not in config:
    raise ValueError(
      "norm_before_residual is missing: readers disagree on its default"
    )
  return get({"mask_token_id": mask}, "mask_token_id", int, least=0)


def _fused_layers(
  config, nested: Mapping[str, Any], target: Target
) -> tuple[int, ...]:
  """The layers whose *inputs* are fused, as we number them (0: the embedding).

  `eagle_config.eagle_aux_hidden_state_layer_ids` (SpecForge, SGLang, NVIDIA)
  numbers outputs of layers; top-level `eagle_aux_hidden_state_layer_ids`
  (speculators) and `eagle_config.layer_ids` (vLLM) number inputs; the default
  is the paper's.
  """
  last = "speculators_model_type" in config
  said = {
    f"{name} (as inputs)": head_settings.layers_read(
      name, ids, target, outputs=outputs, last=last
    )
    for name, ids, outputs in (
      (f"eagle_config.{_FUSED}", nested.get(_FUSED), True),
      ("eagle_config.layer_ids", nested.get("layer_ids"), False),
      (_FUSED, config.get(_FUSED), False),
    )
    if ids is not None
  }
  layers = json_files.agreed(said) or usual_layers(target.num_layers)
  if layers[0] < 0:
    raise ValueError(f"a target of {target.num_layers} layers needs {_FUSED}")
  return layers


# --------------------------------------------------------------------- writing


def settings(
  config: EagleConfig, features: Features, dtype: str
) -> dict[str, Any]:
  """The `config.json` of a head.

  In the authors' format, or in `speculators`' for P-EAGLE and for an EAGLE-3
  head with switches, windows, query norms or several layers.

  Raises:
    ValueError: if neither can express the head.
  """
  layers = config.layers
  if config.generation == 1:
    return layers_json(layers, dtype, qk_norm=False) | {
      # vLLM's and SGLang's names; each takes the first that it knows.
      "architectures": ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"],
      "bias": config.fc_bias,
      # The authors' code reads this key.
      "qkv_bias": layers.attention.qkv_bias,
    }
  switches = {name: getattr(config, name) for name in EAGLE3_SWITCHES}
  both = {
    _FUSED: [int(i) for i in features],
    **({"target_hidden_size": config.target_dim} if config.target_dim else {}),
    "draft_vocab_size": config.draft_vocab_size or layers.vocab_size,
  }
  if (
    layers.num_layers > 1
    or layers.attention.qk_norm
    or layers.has_windows
    or any(switches.values())
    or config.mask_token is not None
  ):
    third = both | switches | {
      "architectures": ["Eagle3Speculator"],
      "speculators_model_type": "eagle3",
      NESTED: layers_json(layers, dtype),
    }  # fmt: skip
    if config.mask_token is None:
      return third
    return third | {
      "architectures": ["PEagleSpeculator"],
      "speculators_model_type": "peagle",
      "mask_token_id": config.mask_token,
      "embed_requires_grad": True,
    }
  # vLLM reads the top-level ids first, as inputs of layers; SGLang and
  # SpecForge read the nested ones, as outputs.
  return layers_json(layers, dtype) | both | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {
      _FUSED: [int(i) - 1 for i in features],
      "use_aux_hidden_state": True,
    },
  }  # fmt: skip
