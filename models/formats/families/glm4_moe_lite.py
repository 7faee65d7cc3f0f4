"""GLM-4.7-Flash: DeepSeek-V3's layers; `mlp_layer_types` lists dense ones."""

from models.formats.families import deepseek_v3, mixtures, reading
from models.formats.families.family import Family, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  usual = ["dense"] + ["sparse"] * (get(settings, "num_hidden_layers", int) - 1)
  kinds = reading.layer_types(
    settings, usual, ["dense", "sparse"], key="mlp_layer_types"
  )
  return deepseek_v3.config_of(settings, [kind == "dense" for kind in kinds])


FAMILY = Family(
  name="glm4_moe_lite",
  read=_read,
  tensors=deepseek_v3.TENSORS,
  layouts=mixtures.LAYOUTS,
  defaults=dict(deepseek_v3.DEFAULTS, q_lora_rank=768, rms_norm_eps=1e-5),
  # transformers does not read it: without a list the first layer is dense.
  fixed=dict(topk_method="noaux_tc", first_k_dense_replace=1),
  harmless=deepseek_v3.HARMLESS | {"qk_head_dim"},
  ignores=mixtures.of_drafting_layers,
)
