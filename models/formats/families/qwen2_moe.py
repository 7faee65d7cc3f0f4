"""Qwen2-MoE: Qwen2 with mixtures, and an expert beside them for every token.

What that expert gives is weighted by a sigmoid of the token.
"""

from models.formats.families import llama, mixtures, qwen2, reading
from models.formats.families.family import Family, Gguf, Layout, Settings
from models.formats.families.reading import SLIDES, get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes, window = reading.sizes(settings), qwen2.window(settings)
  count, rope = sizes["num_layers"], reading.rope(settings, sizes["head_dim"])
  before = get(settings, "max_window_layers", int, least=0)
  kinds = reading.windowed(
    settings, [i % 2 == 0 and i < before for i in range(count)], window
  )
  experts = mixtures.with_shared(
    settings, sizes, renormalized=get(settings, "norm_topk_prob", bool)
  )
  layers = [
    reading.layer(
      sizes, None if dense else experts, rope=rope,
      window=window if kind == SLIDES else None,
      qkv_bias=get(settings, "qkv_bias", bool),
    )
    for kind, dense in zip(
      kinds, mixtures.dense_layers(settings, count), strict=True
    )
  ]  # fmt: skip
  return reading.model(sizes, layers)


FAMILY = Family(
  name="qwen2_moe",
  read=_read,
  tensors=llama.TENSORS | mixtures.TENSORS | mixtures.QWEN_SHARED,
  layouts=mixtures.LAYOUTS,
  defaults=dict(
    qwen2.DEFAULTS, num_key_value_heads=16, qkv_bias=True,
    decoder_sparse_step=1, norm_topk_prob=False,
  ),
  harmless=mixtures.HARMLESS,
  gguf=Gguf(
    architecture="qwen2moe",
    keys={
      **mixtures.GGUF_KEYS,
      "expert_feed_forward_length": "moe_intermediate_size",
      "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    settings=lambda metadata, has: {
      "qkv_bias": has("attn_q"),
      "norm_topk_prob": False,  # as llama.cpp has it
    },
    layouts={
      "layers.#.mlp.shared.weigh": Layout(
        lambda x, c: x[None], lambda s, c: s[1:]
      )
    },
  ),
)  # fmt: skip
