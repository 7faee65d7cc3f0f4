"""Qwen3-MoE: Qwen3 with mixtures of experts instead of MLPs."""

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Gguf, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  # Qwen's files use the first name, those of transformers 5 the second.
  names = ("num_experts", "num_local_experts")
  experts = mixtures.mixture(
    settings, sizes, num_experts=names[settings.get(names[0]) is None],
    expert_dim="moe_intermediate_size",
    renormalized=get(settings, "norm_topk_prob", bool),
  )  # fmt: skip
  layer = reading.layer(
    sizes, experts, rope=reading.rope(settings, sizes["head_dim"]),
    qk_norm="head", bias=get(settings, "attention_bias", bool),
  )  # fmt: skip
  return reading.model(sizes, [layer] * sizes["num_layers"])


FAMILY = Family(
  name="qwen3_moe",
  read=_read,
  tensors=llama.TENSORS | mixtures.TENSORS,
  layouts=mixtures.LAYOUTS,
  defaults=dict(
    llama.DEFAULTS, num_key_value_heads=4, attention_bias=False,
    norm_topk_prob=False,
  ),
  # Qwen3-Coder's files spell these out; they hold for all models.
  fixed=mixtures.QWEN_FIXED | dict(
    qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0
  ),
  harmless=mixtures.QWEN_HARMLESS,
  gguf=Gguf(
    architecture="qwen3moe",
    keys={
      **mixtures.GGUF_KEYS,
      "expert_feed_forward_length": "moe_intermediate_size",
    },
    settings=lambda metadata, has: {
      **llama.gguf_biases(metadata, has),
      "norm_topk_prob": True,  # as in llama.cpp
    },
  ),
)  # fmt: skip
