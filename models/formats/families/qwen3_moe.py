"""Qwen3-MoE: Qwen3 with mixtures of experts in all layers or in some."""

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Gguf, Settings
from models.formats.families.reading import get
from models.networks.description import DenseSpec, TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  window = get(settings, "sliding_window", int, None)
  if not get(settings, "use_sliding_window", bool):
    window = None
  experts = mixtures.mixture(
    settings, sizes, num_experts="num_experts",
    expert_dim="moe_intermediate_size",
    renormalised=get(settings, "norm_topk_prob", bool),
  )  # fmt: skip
  mlp = DenseSpec(width=sizes["mlp_dim"], activation=sizes["activation"])
  rope = reading.rope(settings, sizes["head_dim"])
  layers = [
    mixtures.layer(
      sizes, mlp if dense else experts, rope=rope, window=window,
      qk_norm="head", bias=get(settings, "attention_bias", bool),
    )
    for dense in mixtures.dense_layers(settings, sizes["num_layers"])
  ]  # fmt: skip
  return TransformerConfig(layers=tuple(layers), **reading.frame(sizes))


FAMILY = Family(
  name="qwen3_moe",
  read=_read,
  tensors=llama.TENSORS | mixtures.TENSORS,
  layouts=mixtures.LAYOUTS,
  defaults=dict(
    llama.DEFAULTS, num_key_value_heads=4, attention_bias=False,
    use_sliding_window=False, sliding_window=4096, decoder_sparse_step=1,
    mlp_only_layers=None, moe_intermediate_size=768, num_experts_per_tok=8,
    num_experts=128, norm_topk_prob=False,
  ),
  aliases={"num_local_experts": "num_experts"},
  # Qwen3-Coder's files say what is so in all.
  fixed=dict(
    qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0
  ),
  harmless=mixtures.HARMLESS | {"max_window_layers"},  # all slide or none
  gguf=Gguf(
    architecture="qwen3moe",
    keys={
      **mixtures.GGUF_KEYS,
      "expert_feed_forward_length": "moe_intermediate_size",
    },
    settings=lambda metadata, has: {
      **llama.shared_sizes(metadata),
      "attention_bias": has("attn_q", "attn_output"),
      "norm_topk_prob": True,  # as llama.cpp has it
    },
  ),
)  # fmt: skip
