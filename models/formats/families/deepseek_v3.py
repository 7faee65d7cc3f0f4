"""DeepSeek-V3: latent attention, dense layers and then mixtures."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Gguf, Joined, Settings
from models.formats.families.reading import get
from models.networks.description import (
  AttentionSpec,
  DenseSpec,
  Latent,
  LayerSpec,
  TransformerConfig,
)

_ATTENTION = "layers.#.self_attn"
TENSORS = {
  **llama.TENSORS,
  **mixtures.DEEPSEEK_TENSORS,
  "layers.#.attention.q_a": f"{_ATTENTION}.q_a_proj",
  "layers.#.attention.q_a_norm": f"{_ATTENTION}.q_a_layernorm",
  "layers.#.attention.q_b": f"{_ATTENTION}.q_b_proj",
  "layers.#.attention.kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
  "layers.#.attention.kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
  "layers.#.attention.kv_b": f"{_ATTENTION}.kv_b_proj",
}
DEFAULTS = dict(
  mixtures.DEEPSEEK_DEFAULTS, num_key_value_heads=None, kv_lora_rank=512,
  qk_rope_head_dim=64, rope_interleave=True,
)  # fmt: skip
HARMLESS = mixtures.DEEPSEEK_HARMLESS | {
  "pretraining_tp", "ep_size", "aux_loss_alpha", "seq_aux",
  "head_dim", "qk_head_dim",  # which follow from others
}  # fmt: skip


def described(settings: Settings, dense: Sequence[bool]) -> TransformerConfig:
  """A model of latents; which of its layers are dense."""
  sizes = reading.sizes(settings, names={"head_dim": "qk_rope_head_dim"})
  if sizes["num_kv_heads"] != sizes["num_heads"]:
    raise ValueError(
      "num_key_value_heads must be num_attention_heads where latents are "
      f"cached, got {sizes['num_kv_heads']} and {sizes['num_heads']}"
    )
  latent = Latent(
    rank=get(settings, "kv_lora_rank", int),
    rope_dim=sizes["head_dim"],
    still_dim=get(settings, "qk_nope_head_dim", int),
    value_dim=get(settings, "v_head_dim", int),
    query_rank=get(settings, "q_lora_rank", int, None),
    interleaved=get(settings, "rope_interleave", bool),
  )
  bias = get(settings, "attention_bias", bool)
  attention = AttentionSpec(
    num_heads=sizes["num_heads"],
    num_kv_heads=1,
    head_dim=latent.rank + latent.rope_dim,
    rope=reading.rope(settings, latent.rope_dim),
    scale=_scale(settings, latent),
    latent=latent,
    qkv_bias=bias,
    out_bias=bias,
  )
  mlp = DenseSpec(width=sizes["mlp_dim"], activation=sizes["activation"])
  experts = mixtures.of_deepseek(settings, sizes)
  return TransformerConfig.of_layers(
    [
      LayerSpec(attention=attention, feed_forward=mlp if each else experts)
      for each in dense
    ],
    **reading.frame(sizes),
  )


def _scale(settings: Settings, latent: Latent) -> float:
  """Scale of scores, which holds YaRN's factor in place of the rotation."""
  said = {}
  for where in ("rope_scaling", "rope_parameters"):
    given = settings.get(where)
    said |= given if isinstance(given, Mapping) else {}
  by = get(said, "mscale_all_dim", float, 0.0)
  factor = get(said, "factor", float, 1.0)
  kind = said.get("rope_type", said.get("type", "default"))
  scale = (latent.still_dim + latent.rope_dim) ** -0.5
  if kind != "default" and by and factor > 1:
    scale *= (0.1 * by * math.log(factor) + 1) ** 2
  return scale


def _read(settings: Settings) -> TransformerConfig:
  dense = get(settings, "first_k_dense_replace", int, least=0)
  count = get(settings, "num_hidden_layers", int)
  return described(settings, [i < dense for i in range(count)])


def _gguf_settings(
  metadata: Mapping[str, Any], has: Callable[..., bool]
) -> dict[str, Any]:
  """Sizes of heads, under names of their own where there are latents alone."""
  keys, values = (
    metadata.get(
      f"attention.{of}_length_mla", metadata.get(f"attention.{of}_length")
    )
    for of in ("key", "value")
  )
  if keys is None or values is None:
    raise ValueError(
      "attention.key_length or attention.value_length is missing"
    )
  settings = {
    **mixtures.gguf_layers(metadata, 1),
    "num_key_value_heads": None,
    "qk_nope_head_dim": keys - metadata["rope.dimension_count"],
    "v_head_dim": values,
    "q_lora_rank": metadata.get("attention.q_lora_rank"),
    "n_group": metadata.get("expert_group_count", 1),
    "topk_group": metadata.get("expert_group_used_count", 1),
    "attention_bias": has("attn_kv_a_mqa"),
  }
  kind = metadata.get("rope.scaling.type", "none")
  if kind != "none":
    # A float32 of a tenth of both.
    by = round(10 * metadata.get("rope.scaling.yarn_log_multiplier", 0), 6)
    settings["rope_scaling"] = {
      "rope_type": kind,
      "factor": metadata.get("rope.scaling.factor"),
      reading.ROPE_LENGTH: metadata.get("rope.scaling.original_context_length"),
      "beta_fast": metadata.get("rope.scaling.yarn_beta_fast"),
      "beta_slow": metadata.get("rope.scaling.yarn_beta_slow"),
      "mscale": by or None,
      "mscale_all_dim": by or None,
    }
  return settings


def _of_heads(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
  """Rows of each head's keys and values, of `[H, R, N]` and `[H, V, R]`."""
  both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
  return both.reshape(-1, both.shape[-1])


FAMILY = Family(
  name="deepseek_v3",
  read=_read,
  tensors=TENSORS,
  layouts=mixtures.LAYOUTS,
  defaults=dict(
    DEFAULTS, moe_intermediate_size=2048, n_routed_experts=256,
    routed_scaling_factor=2.5, q_lora_rank=1536, v_head_dim=128,
    qk_nope_head_dim=128, n_group=8, topk_group=4, first_k_dense_replace=3,
    max_position_embeddings=4096,
  ),
  aliases=mixtures.DEEPSEEK_ALIASES,
  fixed=dict(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc"),
  harmless=HARMLESS,
  left_out=mixtures.of_drafting_layers,
  gguf=Gguf(
    architecture="deepseek2",
    keys={
      **llama.GGUF_SIZES,
      **mixtures.DEEPSEEK_GGUF_KEYS,
      "attention.layer_norm_rms_epsilon": "rms_norm_eps",
      "attention.q_lora_rank": "q_lora_rank",
      "attention.kv_lora_rank": "kv_lora_rank",
      "rope.dimension_count": "qk_rope_head_dim",
      "rope.freq_base": "rope_theta",
    },
    optional=mixtures.DEEPSEEK_GGUF_OPTIONAL | {"attention.q_lora_rank"},
    also=mixtures.DEEPSEEK_GGUF_ALSO | {
      "attention.head_count_kv", "attention.key_length",
      "attention.key_length_mla", "attention.value_length",
      "attention.value_length_mla", "rope.scaling.type", "rope.scaling.factor",
      "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast",
      "rope.scaling.yarn_beta_slow",
    },
    joined={
      f"{_ATTENTION}.kv_b_proj": Joined(
        (f"{_ATTENTION}.k_b_proj", f"{_ATTENTION}.v_b_proj"),
        lambda keys, values: (keys[0] * (keys[2] + values[1]), keys[1]),
        _of_heads,
      )
    },
    settings=_gguf_settings,
    rotary=None,
  ),
)  # fmt: skip
