"""The families of decoder-only models, by `model_type`; one file each."""

from models.formats.families import (
  deepseek_v3,
  gemma2,
  gemma3,
  gemma4,
  glm4_moe,
  glm4_moe_lite,
  gpt2,
  gpt_neox,
  gpt_oss,
  llama,
  mimo,
  mistral,
  mixtral,
  olmo2,
  olmo3,
  olmoe,
  qwen2,
  qwen2_moe,
  qwen3,
  qwen3_5,
  qwen3_5_moe,
  qwen3_moe,
  qwen3_next,
)
from models.formats.families.family import Family

FAMILIES: dict[str, Family] = {
  module.FAMILY.name: module.FAMILY
  for module in (
    gpt2, gpt_neox, llama, mistral, qwen2, qwen3, gemma2, gemma3, gemma4,
    olmo2, olmo3, mixtral, qwen2_moe, qwen3_moe, olmoe, glm4_moe, gpt_oss,
    deepseek_v3, glm4_moe_lite, qwen3_next, qwen3_5,
    qwen3_5_moe, mimo,
  )
}  # fmt: skip
