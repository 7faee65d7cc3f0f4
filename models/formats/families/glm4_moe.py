"""GLM-4.5: dense layers, then mixtures whose router is DeepSeek-V3's.

A part of each head rotates, and an expert beside the mixture is every token's.
"""

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Settings
from models.formats.families.reading import get
from models.networks.description import DenseSpec, TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  experts = mixtures.of_deepseek(settings, sizes)
  mlp = DenseSpec(width=sizes["mlp_dim"], activation=sizes["activation"])
  dense = get(settings, "first_k_dense_replace", int, least=0)
  rope = reading.rope(settings, sizes["head_dim"], share=0.5)
  layers = [
    mixtures.layer(
      sizes, mlp if i < dense else experts, rope=rope,
      bias=get(settings, "attention_bias", bool), out_bias=False,
      qk_norm="head" if get(settings, "use_qk_norm", bool) else None,
    )
    for i in range(sizes["num_layers"])
  ]  # fmt: skip
  return TransformerConfig(layers=tuple(layers), **reading.frame(sizes))


FAMILY = Family(
  name="glm4_moe",
  read=_read,
  tensors=llama.TENSORS | mixtures.DEEPSEEK_TENSORS,
  layouts=mixtures.LAYOUTS,
  defaults=dict(
    mixtures.DEEPSEEK_DEFAULTS, rms_norm_eps=1e-5, num_key_value_heads=8,
    use_qk_norm=False, moe_intermediate_size=1408, n_routed_experts=128,
    routed_scaling_factor=1.0, n_group=1, topk_group=1,
    first_k_dense_replace=1,
  ),
  aliases=mixtures.DEEPSEEK_ALIASES,
  harmless=mixtures.DEEPSEEK_HARMLESS,
  left_out=mixtures.of_drafting_layers,
)  # fmt: skip
