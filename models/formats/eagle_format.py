"""EAGLE's heads as they are published.

EAGLE-1 and 2 (`fc` over embedding and feature, a layer without a first norm),
and EAGLE-3 as its authors, SpecForge and NVIDIA save it (`midlayer`), and as
the `speculators` library does (`layers.0`, `speculators_model_type`).
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.formats import json_files
from models.formats.families import llama
from models.formats.weights import Tensor
from models.head_shapes import HeadShape, Target, head_layers
from models.networks.eagle import EAGLE3_SWITCHES, EagleConfig
from models.networks.layers import TransformerConfig
from models.networks.transformer import FINAL, Features

_NUMBER = re.compile(r"layers\.(\d{1,3})\.")
_MOST_FUSED = 64  # layers whose features are fused; published heads fuse 3
# Parameter -> the tensor's name in the normal form, if it is another.
_TABLE = {
  "embed.embedding": "embed_tokens.weight",
  **llama.layer_tensors("", "layers.0."),
  # EAGLE-3's own.
  "input_norm.scale": "input_norm.weight",
  "embed_norm.scale": "layers.0.input_layernorm.weight",
  "hidden_norm.scale": "layers.0.hidden_norm.weight",
  "final_norm.scale": "norm.weight",
  **{f"fc_norms.{i}.scale": f"fc_norm.{i}.weight" for i in range(64)},
}
# What a configuration may say: of the head's layers; of the head, in the form
# of its authors or of speculators; and what changes nothing. Anything else
# might change its logits, and is refused.
_OF_LAYERS = frozenset(
  """
  vocab_size hidden_size intermediate_size num_hidden_layers head_dim
  num_attention_heads num_key_value_heads hidden_act rms_norm_eps
  max_position_embeddings rope_theta rope_scaling rope_parameters
  attention_bias mlp_bias qkv_bias tie_word_embeddings sliding_window
  use_sliding_window max_window_layers layer_types model_type rope_interleaved
  """.split()
)
_FUSED = "eagle_aux_hidden_state_layer_ids"
_OF_EAGLE1 = frozenset({"add_para_norm", "layernorms"})
_OF_EAGLE3 = frozenset(
  {"eagle_config", "use_aux_norm", "num_aux_hidden_states", "logit_scale"}
  | {"draft_vocab_size", "target_hidden_size", _FUSED, *EAGLE3_SWITCHES}
)
_NATIVE = _OF_EAGLE1 | _OF_EAGLE3 | {"bias", "truncated_vocab_size"}
_SPECULATORS = frozenset(
  {"speculators_model_type", "speculators_version", "speculators_config"}
  | {"transformer_layer_config", "embed_requires_grad"}
  | {"draft_vocab_size", "target_hidden_size", _FUSED, *EAGLE3_SWITCHES}
  | {"model_type", "tie_word_embeddings"}
)
_INERT = frozenset(
  """
  architectures auto_map transformers_version torch_dtype dtype use_cache
  initializer_range pretraining_tp attention_dropout bos_token_id eos_token_id
  pad_token_id _name_or_path target_model_type num_local_experts
  num_experts_per_tok experts_per_token output_router_logits
  router_aux_loss_coef has_no_defaults_at_init enable_sp_ulysses
  """.split()
)
# What NVIDIA's `eagle_config` says besides, and must say.
_OF_EAGLE_CONFIG = {
  "use_aux_hidden_state": True,
  "use_last_layernorm": True,
  "use_input_layernorm_in_first_layer": True,
  "use_mtp_layernorm": False,
  "next_layer_regular": True,
  "parallel_draft_step": 1,
}
_OTHER_KINDS = ("peagle", "dspark", "mlp", "eagle", "medusa")


def shape(
  config: Mapping[str, Any],
  target: Target,
  tensors: Mapping[str, Tensor] | None,
  *,
  generation: int | None = None,
) -> HeadShape:
  """Shapes of the EAGLE head that a configuration describes.

  Args:
    config: what `config.json` holds.
    target: the model that it drafts for.
    tensors: by the names of the normal form; None if there are none to look at.
    generation: 1 or 3, where there are no tensors and the file does not say.

  Raises:
    ValueError: for switches that are not known, or another target.
  """
  config = _flat(config)
  kind = config.get("speculators_model_type")
  if kind is not None and kind != "eagle3":
    known = "another head" if kind in _OTHER_KINDS else "unknown"
    raise ValueError(
      "speculators_model_type must be 'eagle3', 'dflash' or 'mtp', got "
      f"{kind!r} ({known})"
    )
  form = _OF_LAYERS | _NATIVE if kind is None else _SPECULATORS
  json_files.refuse_unknown(config, form | _INERT)
  if tensors is None:
    third = kind == "eagle3" or generation == 3
  else:
    third = kind == "eagle3" or "layers.0.hidden_norm.weight" in tensors
  _refuse_later(tensors or {})
  layer, _ = _layer(config, tensors, third)
  if layer.vocab_size != target.vocab_size:
    raise ValueError(
      f"it was made for {layer.vocab_size} tokens, and the target has "
      f"{target.vocab_size}"
    )
  if third:
    described, features = _third(config, layer, target, tensors or {})
  else:
    described, features = _first(config, layer, target)
  return HeadShape(config=described, features=features)


def table(
  config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, str]:
  """Parameters whose tensors have other names, and these.

  Args:
    config, tensors: as of `shape`.
  """
  config = _flat(config)
  third = "layers.0.hidden_norm.weight" in tensors
  layer, tied = _layer(config, tensors, third)
  names = dict(_TABLE)
  for i in range(1, layer.num_layers):
    names |= llama.layer_tensors(f"later.{i - 1}.", f"layers.{i}.")
  has_embedding = (
    "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors
  )
  if has_embedding and third:
    if "speculators_model_type" in config:
      name = "tie_word_embeddings"
      inside = config["transformer_layer_config"].get(name)
      where = {
        name: config.get(name),
        f"transformer_layer_config.{name}": inside,
      }
      tied = json_files.agreed(where)
    if tied:  # its embedding is its output projection too
      names["lm_head.weight"] = "embed_tokens.weight"
  return names


def scaled(
  config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
  """The tensors, the output projection multiplied by `logit_scale`.

  Args:
    config, tensors: as of `shape`.

  Raises:
    ValueError: if the projection is the target's, or that is no number.
  """
  scale = _flat(config).get("logit_scale", 1.0)
  if scale == 1:
    return tensors
  name = "lm_head.weight"
  if type(scale) not in (int, float) or not 0 < scale < math.inf:
    raise ValueError(f"logit_scale must be a positive number, got {scale!r}")
  if name not in tensors:
    raise ValueError(f"logit_scale must be 1 without {name}, got {scale}")
  read = tensors[name].read
  scaled_embedding = dataclasses.replace(
    tensors[name], read=lambda index: read(index).astype(np.float32) * scale
  )
  return {**tensors, name: scaled_embedding}


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The configuration without vLLM's nesting of EAGLE-1's."""
  nested = config.get("model")
  if config.get("model_type") != "eagle" or not isinstance(nested, Mapping):
    return config
  rest = {k: v for k, v in config.items() if k not in ("model", "model_type")}
  for key in {*nested} & {*rest} - _INERT:
    json_files.agreed({key: rest[key], f"model.{key}": nested[key]})
  return nested | {k: v for k, v in rest.items() if v is not None}


def _layer_json(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The settings of the head's layer, nested or not."""
  if config.get("speculators_model_type") is None:
    return config
  nested = config.get("transformer_layer_config")
  if not isinstance(nested, Mapping):
    raise ValueError("transformer_layer_config must be an object")
  json_files.refuse_unknown(
    nested, _OF_LAYERS | _INERT, "settings of transformer_layer_config"
  )
  return nested


def _layer(
  config: Mapping[str, Any],
  tensors: Mapping[str, Tensor] | None,
  third: bool,
) -> tuple[TransformerConfig, bool]:
  """The configuration of the head's layers, and whether embeddings are tied.

  A head may say `qkv_bias`; a missing base of the rotary frequencies is 10,000
  whatever the target's is. Only speculators' heads are made of the layers that
  their `model_type` names: the others' are Llama's, whatever their target's
  are, and where the tensors tell they are believed.
  """
  given = _layer_json(config)
  settings = {k: v for k, v in given.items() if k in _OF_LAYERS}
  speculators = config.get("speculators_model_type") is not None
  if not speculators:
    settings["model_type"] = _family(settings, tensors or {})
  if settings.get("model_type") not in ("llama", "qwen2", "qwen3"):
    settings["model_type"] = "llama"  # as "mixtral", whose heads are dense
  bias = settings.pop("qkv_bias", None)
  count = settings.setdefault("num_hidden_layers", 1)
  if third and not speculators and tensors is not None:
    count = settings["num_hidden_layers"] = _num_layers(tensors)
  if count != 1 and not third:
    raise ValueError(f"num_hidden_layers must be 1 in EAGLE-1, got {count!r}")
  if count != 1 and tensors is None and not speculators:
    raise ValueError(
      "num_hidden_layers must be 1 where no tensors are there to tell, got "
      f"{count!r}"
    )
  layer = head_layers(settings)
  tied = layer.tied_embeddings
  layer = dataclasses.replace(layer, tied_embeddings=False)
  if bias is not None:
    layer = dataclasses.replace(layer, qkv_bias=_flag("qkv_bias", bias))
  return layer, tied


def _family(
  settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> str | None:
  """The family of a head's layer, by tensors that Llama's do not have."""
  named = settings.get("model_type")
  if named == "qwen2" and "layers.0.self_attn.q_proj.bias" not in tensors:
    return "llama"
  if named == "qwen3" and "layers.0.self_attn.q_norm.weight" not in tensors:
    return "llama"
  return named


def _num_layers(tensors: Mapping[str, Tensor]) -> int:
  """Layers of a native EAGLE-3 head, whose configuration may say its target's.

  Raises:
    ValueError: if a later one is not Llama's.
  """
  numbers = {int(m[1]) for name in tensors if (m := _NUMBER.match(name))}
  count = len(numbers)
  if numbers != set(range(count)):
    raise ValueError(f"layers are not numbered from 0 on: {sorted(numbers)}")
  return count


def _refuse_later(tensors: Mapping[str, Tensor]) -> None:
  """Raises ValueError if a layer after the first is not Llama's or Qwen3's."""
  later = [
    name
    for name in sorted(tensors)
    if name.endswith(".hidden_norm.weight") and name[:9] != "layers.0."
  ]
  if later:
    raise ValueError(
      "layers after the first that have a hidden_norm, as the first one has, "
      f"are not known: {', '.join(later)}"
    )


def _flag(name: str, value: Any) -> bool:
  if not isinstance(value, bool):
    raise ValueError(f"{name} must be true or false, got {value!r}")
  return value


def _first(config, layer, target: Target) -> tuple[EagleConfig, Features]:
  """EAGLE-1 and 2: one layer over the target's final hidden state."""
  if layer.embed_dim != target.embed_dim:
    raise ValueError(
      f"its width is {layer.embed_dim}, and the target's {target.embed_dim}"
    )
  whole = {"draft_vocab_size": layer.vocab_size}
  for key in sorted(_OF_EAGLE3 - {"logit_scale"}):
    if config.get(key) not in (None, False, whole.get(key)):
      raise ValueError(
        f"{key} is a setting of EAGLE-3, and this head is EAGLE-1's: got "
        f"{config[key]!r:.80}"
      )
  _refuse_first(config, layer.vocab_size)
  head = EagleConfig(
    layer=layer,
    generation=1,
    num_features=target.embed_dim,
    # Files that do not say have one.
    fc_bias=_flag("bias", config.get("bias", True)),
  )
  return head, (FINAL,)


def _refuse_first(config: Mapping[str, Any], words: int) -> None:
  """Raises ValueError for variants of EAGLE-1 that are not read.

  Args:
    config: of the head.
    words: the tokens that it predicts.
  """
  for switch in (*sorted(_OF_EAGLE1), "truncated_vocab_size"):
    given = config.get(switch)
    if given and (switch, given) != ("truncated_vocab_size", words):
      raise ValueError(f"{switch} is not supported, got {given!r:.80}")


def _third(
  config, layer, target: Target, tensors: Mapping[str, Tensor]
) -> tuple[EagleConfig, Features]:
  """EAGLE-3 and its descendants."""
  also = {  # other names of the same
    "fc_norm": ("use_aux_norm", config.get("use_aux_norm")),
    "norm_before_fc": (
      "eagle_config.norm_before_fc",
      _eagle_config(config).get("norm_before_fc"),
    ),
  }
  switches = {}
  for name in EAGLE3_SWITCHES:
    said = {name: config.get(name)}
    if name in also:
      said[also[name][0]] = also[name][1]
    for where, value in said.items():
      _flag(where, False if value is None else value)
    switches[name] = bool(json_files.agreed(said))
  if config.get("speculators_model_type") is None:
    # Until September 2026 SpecForge had `norm_output` for whether logits are of
    # the normed state, true by default, and fed back what is not normed; since
    # then, and in all servers, it says what is fed back. Logits are of the
    # normed state here, and what is fed back is it where the features are
    # normed too: that is EAGLE-3.1, which no earlier head is.
    normed = switches["fc_norm"] or switches["norm_before_fc"]
    switches["norm_output"] = switches["norm_output"] and normed
  layers = _fused_layers(config, target.num_layers)
  width = config.get("target_hidden_size") or target.embed_dim
  if width != target.embed_dim:
    raise ValueError(
      f"it reads features of {width} channels, the target has "
      f"{target.embed_dim}"
    )
  draft_vocab = config.get("draft_vocab_size")
  if draft_vocab is None and "d2t" in tensors:
    draft_vocab = tensors["d2t"].shape[0]
  if draft_vocab is None or draft_vocab == layer.vocab_size:
    draft_vocab = None
  elif type(draft_vocab) is not int:
    raise ValueError(
      f"draft_vocab_size must be an integer, got {draft_vocab!r}"
    )
  _refuse_first(config, draft_vocab or layer.vocab_size)
  head = EagleConfig(
    layer=layer,
    generation=3,
    num_features=len(layers) * width,
    num_fused=len(layers),
    draft_vocab_size=draft_vocab,
    fc_bias="fc.bias" in tensors,
    **switches,
  )
  return head, layers


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The checked `eagle_config` that NVIDIA, SpecForge and vLLM nest."""
  nested = config.get("eagle_config") or {}
  if not isinstance(nested, Mapping):
    raise ValueError("eagle_config must be an object")
  known = {_FUSED, "layer_ids", "norm_before_fc", *_OF_EAGLE_CONFIG}
  json_files.refuse_unknown(nested, known, "settings of eagle_config")
  for key, only in _OF_EAGLE_CONFIG.items():
    if nested.get(key, only) != only:
      raise ValueError(
        f"eagle_config.{key} must be {json.dumps(only)}, got {nested[key]!r}"
      )
  return nested


def _fused_layers(config, num_layers: int) -> tuple[int, ...]:
  """The layers whose *inputs* are fused, in our numbers (0 is the embedding).

  Three conventions: `eagle_config.eagle_aux_hidden_state_layer_ids` (SpecForge,
  SGLang, NVIDIA) are outputs of layers, `eagle_aux_hidden_state_layer_ids` at
  the top (speculators) and `eagle_config.layer_ids` (vLLM) are inputs, and
  where no file says, the paper's code reads those of layers 2, N / 2 and N - 3.
  """
  nested, said = _eagle_config(config), {}
  for name, ids, shift in (
    (f"eagle_config.{_FUSED}", nested.get(_FUSED), 1),
    ("eagle_config.layer_ids", nested.get("layer_ids"), 0),
    (_FUSED, config.get(_FUSED), 0),
  ):
    if ids is None:
      continue
    if (
      not isinstance(ids, list)
      or not 0 < len(ids) <= _MOST_FUSED
      or any(type(i) is not int for i in ids)
    ):
      raise ValueError(f"{name} must be a list of layers, got {ids!r:.80}")
    said[f"{name} (as inputs)"] = tuple(i + shift for i in ids)
  usual = (2, num_layers // 2, num_layers - 3)
  layers = json_files.agreed(said) or usual
  count = config.get("num_aux_hidden_states", len(layers))
  if count != len(layers):
    raise ValueError(
      f"num_aux_hidden_states is {count!r}, and {len(layers)} layers are read"
    )
  # What comes after the last layer may be meant with its norm or without;
  # speculators means it without, and norms it itself where it needs that.
  last = num_layers - (config.get("speculators_model_type") is None)
  if min(layers) < 0 or max(layers) > last:
    raise ValueError(
      f"it reads the inputs of layers {[*layers]}, which are not layers of a "
      f"target of {num_layers}"
    )
  return layers
