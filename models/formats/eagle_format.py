"""EAGLE's heads as they are published.

EAGLE-1 and 2 (`fc` over embedding and feature, a layer without a first norm),
and EAGLE-3 as its authors, SpecForge and NVIDIA save it (`midlayer`), and as
the `speculators` library does (`layers.0`, `speculators_model_type`).
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from models.formats import head_files, head_settings, json_files
from models.formats.families import llama
from models.formats.families.reading import get
from models.formats.head_settings import INERT, OF_LAYERS
from models.formats.weights import Tensor
from models.head_shapes import HeadShape, Target
from models.networks.eagle import EAGLE3_SWITCHES, EagleConfig
from models.networks.layers import TransformerConfig
from models.networks.transformer import FINAL, Features

_NUMBER = re.compile(r"layers\.(\d{1,3})\.")
_FUSED = "eagle_aux_hidden_state_layer_ids"
# Settings of EAGLE-3 in any form, and in that of its authors alone.
_OF_EAGLE3 = frozenset(
  {"draft_vocab_size", "target_hidden_size", _FUSED, *EAGLE3_SWITCHES}
)
_NATIVE = frozenset({"eagle_config", "use_aux_norm", "num_aux_hidden_states"})
# Variants that are not read, which files may say that they are not.
_VARIANTS = ("add_para_norm", "layernorms", "truncated_vocab_size")
# What NVIDIA's `eagle_config` says besides, and must say.
_OF_EAGLE_CONFIG = {
  "use_aux_hidden_state": True,
  "use_last_layernorm": True,
  "use_input_layernorm_in_first_layer": True,
  "use_mtp_layernorm": False,
  "next_layer_regular": True,
  "parallel_draft_step": 1,
}


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
  if kind not in (None, "eagle3"):
    raise ValueError(
      f"speculators_model_type must be 'eagle3', 'dflash' or 'mtp', got "
      f"{kind!r}"
    )
  if kind is None:
    known = {*OF_LAYERS, *_OF_EAGLE3, *_NATIVE, "bias", *_VARIANTS, *INERT}
    json_files.refuse_unknown(config, known)
  third = kind is not None or (
    generation == 3
    if tensors is None
    else "layers.0.hidden_norm.weight" in tensors
  )
  layer = _layer(config, tensors, third)
  if layer.vocab_size != target.vocab_size:
    raise ValueError(
      f"it was made for {layer.vocab_size} tokens, and the target has "
      f"{target.vocab_size}"
    )
  make = _third if third else _first
  described, features = make(config, layer, target, tensors or {})
  words = described.draft_vocab_size or layer.vocab_size
  for name in _VARIANTS:
    given = config.get(name)
    if given and (name, given) != ("truncated_vocab_size", words):
      raise ValueError(f"{name} is not supported, got {given!r:.80}")
  return HeadShape(config=described, features=features)


def opened(
  config: Mapping[str, Any], tensors: Mapping[str, Tensor], described: HeadShape
) -> head_files.Opened:
  """A head of a shape, opened.

  Args:
    config, tensors: as of `shape`.
    described: of `shape`.

  Raises:
    ValueError: if it says twice, and differently, whether embeddings are tied.
  """
  head = described.config
  assert isinstance(head, EagleConfig)
  names = table(head)
  has = lambda module: f"{module}.weight" in tensors
  if has("embed_tokens") and not has("lm_head") and head.generation == 3:
    name, nested = "tie_word_embeddings", "transformer_layer_config"
    said = {name: _flat(config).get(name)}
    said[f"{nested}.{name}"] = config.get(nested, {}).get(name)
    if json_files.agreed(said):  # its embedding is its output projection too
      names["lm_head.weight"] = "embed_tokens.weight"
  return head_files.Opened(
    shape=described,
    tensors=tensors,
    locate=head_files.by_table(names),
    also=frozenset({"d2t", "t2d"} if head.generation == 3 else ()),
  )


def table(config: EagleConfig) -> dict[str, str]:
  """Parameters whose tensors have other names, and these, of a head."""
  return {
    "embed.embedding": "embed_tokens.weight",
    **llama.layer_tensors("", "layers.0."),
    "input_norm.scale": "input_norm.weight",
    "embed_norm.scale": "layers.0.input_layernorm.weight",
    "hidden_norm.scale": "layers.0.hidden_norm.weight",
    "final_norm.scale": "norm.weight",
    **{
      f"fc_norms.{i}.scale": f"fc_norm.{i}.weight"
      for i in range(config.num_fused)
    },
    **{
      name: tensor
      for i in range(1, config.layers.num_layers)
      for name, tensor in llama.layer_tensors(
        f"later.{i - 1}.", f"layers.{i}."
      ).items()
    },
  }


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The configuration without vLLM's nesting of EAGLE-1's."""
  nested = config.get("model")
  if config.get("model_type") != "eagle" or not isinstance(nested, Mapping):
    return config
  rest = {k: v for k, v in config.items() if k not in ("model", "model_type")}
  for key in {*nested} & {*rest} - INERT:
    json_files.agreed({key: rest[key], f"model.{key}": nested[key]})
  return {**nested, **{k: v for k, v in rest.items() if v is not None}}


def _layer(
  config: Mapping[str, Any],
  tensors: Mapping[str, Tensor] | None,
  third: bool,
) -> TransformerConfig:
  """The configuration of the head's layers.

  A head may say `qkv_bias`; a missing base of the rotary frequencies is 10,000
  whatever the target's is. Only speculators' heads are made of the layers that
  their `model_type` names: the others' are Llama's, whatever their target's
  are, and where the tensors tell they are believed.
  """
  speculators = "speculators_model_type" in config
  if speculators:
    config = head_settings.speculators_layers(
      config, {*_OF_EAGLE3, "embed_requires_grad"}
    )
    head_settings.refuse_unknown_of_layers(config)
  settings = {k: v for k, v in config.items() if k in OF_LAYERS}
  has = lambda name: f"layers.0.self_attn.{name}" in (tensors or {})
  named = settings.get("model_type")
  if not speculators and (
    (named == "qwen2" and not has("q_proj.bias"))
    or (named == "qwen3" and not has("q_norm.weight"))
  ):
    named = "llama"
  # Of others too, as "mixtral", heads are dense.
  known = named in ("llama", "qwen2", "qwen3")
  settings["model_type"] = named if known else "llama"
  bias = get(settings, "qkv_bias", bool, None)
  settings.pop("qkv_bias", None)
  count = settings.setdefault("num_hidden_layers", 1)
  if third and not speculators and tensors is not None:
    # It may say its target's.
    numbers = {m[1] for name in tensors if (m := _NUMBER.match(name))}
    count = settings["num_hidden_layers"] = len(numbers)
  if count != 1 and (not third or (tensors is None and not speculators)):
    raise ValueError(f"num_hidden_layers must be 1 here, got {count!r}")
  layer = head_settings.head_layers(settings)
  if bias is None:
    return layer
  return layer.with_attention(lambda a: dataclasses.replace(a, qkv_bias=bias))


def _first(
  config, layer, target: Target, tensors
) -> tuple[EagleConfig, Features]:
  """EAGLE-1 and 2: one layer over the target's final hidden state."""
  del tensors
  head_settings.refuse_other_target(layer, target)
  for key in sorted(_OF_EAGLE3 | _NATIVE):
    whole = key == "draft_vocab_size" and config.get(key) == layer.vocab_size
    if not whole and config.get(key) not in (None, False):
      raise ValueError(
        f"{key} is a setting of EAGLE-3, and this head is EAGLE-1's: got "
        f"{config[key]!r:.80}"
      )
  head = EagleConfig(
    layers=layer,
    generation=1,
    num_features=target.embed_dim,
    fc_bias=get(config, "bias", bool, True),
  )
  return head, (FINAL,)


def _third(
  config, layer, target: Target, tensors: Mapping[str, Tensor]
) -> tuple[EagleConfig, Features]:
  """EAGLE-3 and its descendants."""
  nested = _eagle_config(config)
  switches = {}
  for name in EAGLE3_SWITCHES:
    said = {name: get(config, name, bool, None)}
    if name == "fc_norm":
      said["use_aux_norm"] = get(config, "use_aux_norm", bool, None)
    if name == "norm_before_fc":
      said[f"eagle_config.{name}"] = get(nested, name, bool, None)
    switches[name] = bool(json_files.agreed(said))
  if "speculators_model_type" not in config:
    # Until September 2026 SpecForge had `norm_output` for whether logits are of
    # the normed state, true by default, and fed back what is not normed; since
    # then, and in all servers, it says what is fed back. Logits are of the
    # normed state here, and what is fed back is it where the features are
    # normed too: that is EAGLE-3.1, which no earlier head is.
    normed = switches["fc_norm"] or switches["norm_before_fc"]
    switches["norm_output"] = switches["norm_output"] and normed
  layers = _fused_layers(config, nested, target)
  width = config.get("target_hidden_size") or target.embed_dim
  if width != target.embed_dim:
    raise ValueError(
      f"it reads features of {width} channels, the target has "
      f"{target.embed_dim}"
    )
  words = get(config, "draft_vocab_size", int, None)
  if words is None and "d2t" in tensors:
    words = tensors["d2t"].shape[0]
  head = EagleConfig(
    layers=layer,
    generation=3,
    num_features=len(layers) * width,
    num_fused=len(layers),
    draft_vocab_size=None if words == layer.vocab_size else words,
    fc_bias="fc.bias" in tensors,
    **switches,
  )
  return head, layers


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The checked `eagle_config` that NVIDIA, SpecForge and vLLM nest."""
  nested = config.get("eagle_config") or {}
  known = {_FUSED, "layer_ids", "norm_before_fc", *_OF_EAGLE_CONFIG}
  json_files.refuse_unknown(nested, known, "settings of eagle_config")
  for key, only in _OF_EAGLE_CONFIG.items():
    if nested.get(key, only) != only:
      raise ValueError(f"eagle_config.{key} must be {only}, got {nested[key]}")
  return nested


def _fused_layers(
  config, nested: Mapping[str, Any], target: Target
) -> tuple[int, ...]:
  """The layers whose *inputs* are fused, in our numbers (0 is the embedding).

  Three conventions: `eagle_config.eagle_aux_hidden_state_layer_ids` (SpecForge,
  SGLang, NVIDIA) are outputs of layers, `eagle_aux_hidden_state_layer_ids` at
  the top (speculators) and `eagle_config.layer_ids` (vLLM) are inputs, and
  where no file says, the paper's code reads those of layers 2, N / 2 and N - 3.
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
  count = target.num_layers
  layers = json_files.agreed(said) or (2, count // 2, count - 3)
  if min(layers) < 0:
    raise ValueError(f"a target of {count} layers needs {_FUSED}")
  if config.get("num_aux_hidden_states", len(layers)) != len(layers):
    raise ValueError(
      f"num_aux_hidden_states is {config['num_aux_hidden_states']!r}, and "
      f"{len(layers)} layers are read"
    )
  return layers
