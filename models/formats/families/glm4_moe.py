"""GLM-4.5: dense layers, then mixtures with DeepSeek-V3's router.

Rotary embeddings are partial, and the mixtures have a shared expert.
"""

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  attention = dict(
    rope=reading.rope(settings, sizes["head_dim"], share=0.5),
    qkv_bias=get(settings, "attention_bias", bool),
    qk_norm="head" if get(settings, "use_qk_norm", bool) else None,
  )
  count = get(settings, "first_k_dense_replace", int, least=0)
  dense = reading.layer(sizes, **attention)
  mixed = reading.layer(
    sizes, mixtures.of_deepseek(settings, sizes), **attention
  )
  return reading.model(
    sizes, [dense if i < count else mixed for i in range(sizes["num_layers"])]
  )


FAMILY = Family(
  name="glm4_moe",
  read=_read,
  tensors=llama.TENSORS | mixtures.DEEPSEEK_TENSORS,
  layouts=mixtures.LAYOUTS,
  defaults=dict(
    mixtures.DEEPSEEK_DEFAULTS, rms_norm_eps=1e-5, num_key_value_heads=8,
    use_qk_norm=False,
  ),
  harmless=mixtures.DEEPSEEK_HARMLESS,
  ignores=mixtures.of_drafting_layers,
)  # fmt: skip
