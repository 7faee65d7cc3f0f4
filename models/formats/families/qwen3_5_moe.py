"""Qwen3.5-MoE: Qwen3.5 with mixtures and a shared expert in every layer."""

from models.formats.families import mixtures, qwen3_5, qwen3_next, reading
from models.formats.families.family import Family, Settings
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  experts = mixtures.with_shared(settings, sizes, renormalized=True)
  return qwen3_next.config_of(settings, sizes, experts)


FAMILY = Family(
  name="qwen3_5_moe_text",
  read=_read,
  tensors={
    **mixtures.without_mlp(qwen3_5.FAMILY.tensors),
    **mixtures.TENSORS,
    **mixtures.QWEN_SHARED,
  },
  layouts={**qwen3_5.FAMILY.layouts, **mixtures.LAYOUTS},
  defaults=qwen3_next.DEFAULTS,
  fixed=qwen3_5.FIXED | dict(norm_topk_prob=True),
  harmless=mixtures.HARMLESS | qwen3_next.HARMLESS | {"intermediate_size"},
  multimodal={"qwen3_5_moe": {}},
)
