"""OLMoE: mixtures of experts, and norms over all heads of queries and keys."""

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Gguf, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  layer = reading.layer(
    sizes,
    mixtures.mixture(
      settings, sizes, renormalized=get(settings, "norm_topk_prob", bool)
    ),
    rope=reading.rope(settings, sizes["head_dim"]),
    qk_norm="width",
    clip=get(settings, "clip_qkv", float, None),
    bias=get(settings, "attention_bias", bool),
  )
  return reading.model(sizes, [layer] * sizes["num_layers"])


FAMILY = Family(
  name="olmoe",
  read=_read,
  tensors=mixtures.without_mlp(llama.TENSORS) | mixtures.TENSORS,
  layouts=mixtures.LAYOUTS,
  defaults=dict(
    llama.DEFAULTS, rms_norm_eps=1e-5, attention_bias=False,
    norm_topk_prob=False,
  ),
  harmless=mixtures.HARMLESS,
  gguf=Gguf(
    architecture="olmoe", keys=mixtures.GGUF_KEYS, settings=llama.gguf_biases
  ),
)  # fmt: skip
