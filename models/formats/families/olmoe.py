"""OLMoE: mixtures of experts, and norms over the whole width of queries."""

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Gguf, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  layer = mixtures.layer(
    sizes,
    mixtures.mixture(
      settings, sizes, num_experts="num_experts",
      renormalised=get(settings, "norm_topk_prob", bool),
    ),
    rope=reading.rope(settings, sizes["head_dim"]),
    qk_norm="width",
    clip=get(settings, "clip_qkv", float, None),
    bias=get(settings, "attention_bias", bool),
  )  # fmt: skip
  return TransformerConfig(
    layers=(layer,) * sizes["num_layers"], **reading.frame(sizes)
  )


FAMILY = Family(
  name="olmoe",
  read=_read,
  tensors=mixtures.without_mlp(llama.TENSORS) | mixtures.TENSORS,
  layouts=mixtures.LAYOUTS,
  defaults=dict(
    llama.DEFAULTS, rms_norm_eps=1e-5, attention_bias=False, clip_qkv=None,
    num_experts_per_tok=8, num_experts=64, norm_topk_prob=False,
  ),
  aliases={"num_local_experts": "num_experts"},
  harmless=mixtures.HARMLESS,
  gguf=Gguf(
    architecture="olmoe",
    keys=mixtures.GGUF_KEYS,
    settings=lambda metadata, has: {
      **llama.shared_sizes(metadata),
      "attention_bias": has("attn_q", "attn_output"),
    },
  ),
)  # fmt: skip
