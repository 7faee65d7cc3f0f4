"""Gemma 4's GGUF files, whose metadata describes every layer."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.formats.families.family import Gguf, Tensors
from models.formats.families.llama import GGUF_SIZES
from models.formats.families.reading import FULL, SLIDING

_SHARED = "attention.shared_kv_layers"
_EXTRA, _PATTERN = "layers.#.extra", "attention.sliding_window_pattern"


def _each(settings: Mapping[str, Any], key: str, count: int) -> list[int]:
  """A setting's integers, one per layer, or one for all layers."""
  values = np.ravel(settings[key]).tolist()
  values = values * count if len(values) == 1 else values
  if len(values) != count:
    raise ValueError(f"{key} must be one or {count} integers, got {values!r}")
  return values


def _size(settings: Mapping[str, Any], suffix: str) -> int:
  """The head dimension, which keys, values and rotation must share."""
  names = ("key_length", "value_length")
  sizes = {settings[f"attention.{name}{suffix}"] for name in names}
  sizes.add(settings[f"rope.dimension_count{suffix}"])
  if len(sizes) > 1:
    raise ValueError(f"key, value and rope{suffix} sizes differ: {sizes}")
  return sizes.pop()


def _rope(
  settings: Mapping[str, Any], has: Tensors, size: int
) -> dict[str, Any]:
  """Rotary settings; full layers rotate only their first frequencies."""
  full: dict[str, Any] = {"rope_theta": settings["rope.freq_base"]}
  if "rope_freqs.weight" in has.shapes:
    turning = int(np.sum(has.read("rope_freqs.weight") == 1))
    # Half a pair more, since the share is rounded down.
    share = min((2 * turning + 1) / size, 1)
    full |= {"rope_type": "proportional", "partial_rotary_factor": share}
  return {FULL: full, SLIDING: {"rope_theta": settings["rope.freq_base_swa"]}}


def _settings(settings: Mapping[str, Any], has: Tensors) -> dict[str, Any]:
  count = settings["block_count"]
  shared = settings.get(_SHARED, 0)
  kinds = [SLIDING if x else FULL for x in _each(settings, _PATTERN, count)]
  heads = _each(settings, "attention.head_count_kv", count)
  widths = _each(settings, "feed_forward_length", count)
  sizes = {FULL: _size(settings, ""), SLIDING: _size(settings, "_swa")}
  full = [i for i in range(count - shared) if kinds[i] == FULL]
  by_layer = "per_layer_token_embd.weight"
  return {
    "layer_types": kinds,
    "num_key_value_heads": heads[0],
    "intermediate_size": widths[0],
    "use_double_wide_mlp": shared > 0 and widths[-1] == 2 * widths[0],
    "per_layer_config": {
      str(i): {"head_dim": sizes[kind], "num_key_value_heads": heads[i]}
      for i, kind in enumerate(kinds)
    },
    "attention_k_eq_v": any(not has("attn_v.weight", layer=i) for i in full),
    "attention_bias": has("attn_q", "attn_output"),
    "rope_parameters": _rope(settings, has, sizes[FULL]),
    "enable_moe_block": bool(settings.get("expert_count")),
    "vocab_size_per_layer_input": has.shapes.get(by_layer, (None,))[0],
  }


GGUF = Gguf(
  architecture="gemma4",
  keys={
    **GGUF_SIZES,
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    _SHARED: "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
  },
  tensors={
    "layers.#.scalar": "layers.#.layer_scalar.weight",
    f"{_EXTRA}.router.scale": "layers.#.router.proj.scale",
    f"{_EXTRA}.router.expert_scale": "layers.#.experts.down_proj.scale",
    f"{_EXTRA}.experts.gate": "layers.#.experts.gate_up_proj.weight",
    f"{_EXTRA}.experts.up": "layers.#.experts.gate_up_proj.weight",
    f"{_EXTRA}.experts.down": "layers.#.experts.down_proj.weight",
  },
  settings=_settings,
)  # fmt: skip
