"""Gemma 4's files in llama.cpp's format, which say of each layer what it is."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.formats.families.family import Gguf, Tensors
from models.formats.families.llama import GGUF_SIZES
from models.formats.families.reading import FULL, SLIDES

_SHARED = "attention.shared_kv_layers"
_BESIDE, _PATTERN = "layers.#.beside", "attention.sliding_window_pattern"


def _each(settings: Mapping[str, Any], key: str, count: int) -> list[int]:
  """Whole numbers, of every layer one, or one that is said of them all."""
  values = np.ravel(settings.get(key, ())).tolist()
  values = values * count if len(values) == 1 else values
  if len(values) != count or any(type(x) not in (int, bool) for x in values):
    raise ValueError(
      f"{key} must be {count} whole numbers, or one, got {values!r:.80}"
    )
  return values


def _size(settings: Mapping[str, Any], suffix: str) -> int:
  """Channels of a head, of keys, values and rotation alike."""
  (size,) = _each(settings, f"attention.key_length{suffix}", 1)
  for other in ("attention.value_length", "rope.dimension_count"):
    if settings.get(f"{other}{suffix}", size) != size:
      raise ValueError(
        f"{other}{suffix} must be that of keys, {size}, got "
        f"{settings[f'{other}{suffix}']!r:.40}"
      )
  return size


def _rope(
  settings: Mapping[str, Any], has: Tensors, size: int
) -> dict[str, Any]:
  """Frequencies of full layers: the first turn, the others stand still."""
  full: dict[str, Any] = {"rope_theta": settings.get("rope.freq_base", 1e6)}
  if "rope_freqs.weight" in has.shapes:
    factors = has.read("rope_freqs.weight")
    turning = int(np.sum(factors == 1))
    still = factors[turning:]
    if len(factors) != size // 2 or not np.all(still >= 1e29):
      raise ValueError(
        f"rope_freqs.weight must be {size // 2} numbers, ones and then 1e30"
      )
    # Half a pair more, for what is rounded down.
    share = min((2 * turning + 1) / size, 1)
    full |= {"rope_type": "proportional", "partial_rotary_factor": share}
  return {
    FULL: full,
    SLIDES: {"rope_theta": settings.get("rope.freq_base_swa", 1e4)},
  }


def _settings(settings: Mapping[str, Any], has: Tensors) -> dict[str, Any]:
  (count,) = _each(settings, "block_count", 1)
  if count > 2**16:  # of which nothing is listed
    raise ValueError(f"block_count must be at most 65536, got {count}")
  shared = settings.get(_SHARED, 0)
  kinds = [SLIDES if x else FULL for x in _each(settings, _PATTERN, count)]
  heads = _each(settings, "attention.head_count_kv", count)
  widths = _each(settings, "feed_forward_length", count)
  sizes = {FULL: _size(settings, ""), SLIDES: _size(settings, "_swa")}
  wide = shared > 0 and widths[-1] == 2 * widths[0]
  last = 2 if wide else 1
  if widths != [
    widths[0] * (last if i >= count - shared else 1) for i in range(count)
  ]:
    raise ValueError(
      "feed_forward_length must be the same in all layers, or twice that in "
      f"those that share keys, got {widths!r:.80}"
    )
  full = [i for i in range(count - shared) if kinds[i] == FULL]
  by_layer = "per_layer_token_embd.weight"
  return {
    "layer_types": kinds,
    "num_key_value_heads": heads[0],
    "intermediate_size": widths[0],
    "use_double_wide_mlp": wide,
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
    f"{_BESIDE}.router.scale": "layers.#.router.proj.scale",
    f"{_BESIDE}.router.expert_scale": "layers.#.experts.down_proj.scale",
    f"{_BESIDE}.experts.gate": "layers.#.experts.gate_up_proj.weight",
    f"{_BESIDE}.experts.up": "layers.#.experts.gate_up_proj.weight",
    f"{_BESIDE}.experts.down": "layers.#.experts.down_proj.weight",
  },
  settings=_settings,
)  # fmt: skip
