"""Qwen2-MoE: Qwen2 with mixtures and a shared expert with a sigmoid gate."""

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Gguf, Layout, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  experts = mixtures.with_shared(
    settings, sizes, renormalized=get(settings, "norm_topk_prob", bool)
  )
  layer = reading.layer(
    sizes, experts, rope=reading.rope(settings, sizes["head_dim"]),
    qkv_bias=get(settings, "qkv_bias", bool),
  )  # fmt: skip
  return reading.model(sizes, [layer] * sizes["num_layers"])


FAMILY = Family(
  name="qwen2_moe",
  read=_read,
  tensors=llama.TENSORS | mixtures.TENSORS | mixtures.QWEN_SHARED,
  layouts=mixtures.LAYOUTS,
  defaults=dict(
    llama.DEFAULTS, num_key_value_heads=16, qkv_bias=True, norm_topk_prob=False
  ),
  fixed=mixtures.QWEN_FIXED,
  harmless=mixtures.QWEN_HARMLESS,
  gguf=Gguf(
    architecture="qwen2moe",
    keys={
      **mixtures.GGUF_KEYS,
      "expert_feed_forward_length": "moe_intermediate_size",
      "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    settings=lambda metadata, has: {
      "qkv_bias": has("attn_q"),
      "norm_topk_prob": False,  # as in llama.cpp
    },
    layouts={
      "layers.#.mlp.shared.weigh": Layout(
        lambda x, c: x[None], lambda s, c: s[1:]
      )
    },
  ),
)  # fmt: skip
