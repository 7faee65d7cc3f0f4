"""Llama, whose layers and tensor names most other families modify."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from models.formats.families import reading
from models.formats.families.family import Family, Gguf, Layout, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig

DEFAULTS = dict(hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False)
# Modules of a layer, and their names in files.
LAYER = {
  "attention_norm": "input_layernorm",
  "attention.q": "self_attn.q_proj",
  "attention.k": "self_attn.k_proj",
  "attention.v": "self_attn.v_proj",
  "attention.out": "self_attn.o_proj",
  "attention.q_norm": "self_attn.q_norm",
  "attention.k_norm": "self_attn.k_norm",
  "mlp_norm": "post_attention_layernorm",
  "mlp.gate": "mlp.gate_proj",
  "mlp.up": "mlp.up_proj",
  "mlp.down": "mlp.down_proj",
}
TENSORS = {
  "embed": "embed_tokens",
  "final_norm": "norm",
  "lm_head": "lm_head",
  **{f"layers.#.{ours}": f"layers.#.{name}" for ours, name in LAYER.items()},
}
# Keys of GGUF metadata, and of `config.json`.
GGUF_SIZES = {
  "context_length": "max_position_embeddings",
  "embedding_length": "hidden_size",
  "feed_forward_length": "intermediate_size",
  "block_count": "num_hidden_layers",
  "attention.head_count": "num_attention_heads",
}
GGUF_KEYS = {
  **GGUF_SIZES,
  "attention.head_count_kv": "num_key_value_heads",
  "attention.key_length": "head_dim",
  "attention.layer_norm_rms_epsilon": "rms_norm_eps",
  "rope.freq_base": "rope_theta",
}


def layer_tensors(ours: str, theirs: str) -> dict[str, str]:
  """Maps a layer's parameters, `ours` + name, to tensors, `theirs` + name."""
  names = {}
  for module, name in LAYER.items():
    if module.endswith("norm"):
      names[f"{ours}{module}.scale"] = f"{theirs}{name}.weight"
      continue
    for leaf in ("weight", "bias"):
      names[f"{ours}{module}.{leaf}"] = f"{theirs}{name}.{leaf}"
  return names


def config_of(
  settings: Settings, *, mlp_bias: bool = False, **attention
) -> TransformerConfig:
  """A model of identical Llama layers; `attention` as for `reading.layer`."""
  sizes = reading.sizes(settings)
  layer = reading.layer(
    sizes,
    reading.dense(sizes, bias=mlp_bias),
    rope=reading.rope(settings, sizes["head_dim"]),
    **attention,
  )
  return reading.model(sizes, [layer] * sizes["num_layers"])


def _read(settings: Settings) -> TransformerConfig:
  return config_of(
    settings,
    bias=get(settings, "attention_bias", bool),
    mlp_bias=get(settings, "mlp_bias", bool),
  )


def gguf_biases(
  metadata: Mapping[str, Any], has: Callable[..., bool]
) -> dict[str, bool]:
  """`attention_bias`, for which GGUF files have no key."""
  del metadata
  return {"attention_bias": has("attn_q", "attn_output")}


def _gguf_settings(
  metadata: Mapping[str, Any], has: Callable[..., bool]
) -> dict[str, Any]:
  """Files with a window are Mistral's, those with experts are Mixtral's."""
  biases = {
    "attention_bias": has("attn_q", "attn_output"),
    "mlp_bias": has("ffn_gate", "ffn_up", "ffn_down"),
  }
  window = {"sliding_window": metadata.get("attention.sliding_window") or None}
  given = {name: True for name in biases if biases[name]}  # others reject these
  if metadata.get("expert_count"):
    experts = {
      "model_type": "mixtral",
      "rope_theta": metadata.get("rope.freq_base", 1e4),
      "num_local_experts": metadata["expert_count"],
      "num_experts_per_tok": metadata.get("expert_used_count"),
    }
    return experts | window | given
  if not window["sliding_window"]:
    return biases | window
  return {"model_type": "mistral"} | given


def _pairs(heads: str) -> Layout:
  """Files rotate pairs of adjacent channels; here halves of a head rotate."""

  def take(x: np.ndarray, config: TransformerConfig) -> np.ndarray:
    by_head = x.reshape(getattr(config.attention, heads), -1, 2, *x.shape[1:])
    return by_head.swapaxes(1, 2).reshape(x.shape)

  return Layout(take, of_parts=True)


FAMILY = Family(
  name="llama",
  read=_read,
  tensors=TENSORS,
  defaults=dict(DEFAULTS, attention_bias=False, mlp_bias=False),
  fixed=dict(use_sliding_window=False, rope_interleaved=False),
  harmless=frozenset({
    "max_sequence_length", "max_window_layers", "pretraining_tp",
    "sliding_window", "layer_types",  # transformers ignores them
  }),
  gguf=Gguf(
    architecture="llama",
    keys={**GGUF_KEYS, "attention.sliding_window": "sliding_window"},
    settings=_gguf_settings,
    layouts={
      "layers.#.attention.q": _pairs("num_heads"),
      "layers.#.attention.k": _pairs("num_kv_heads"),
    },
  ),
)  # fmt: skip
