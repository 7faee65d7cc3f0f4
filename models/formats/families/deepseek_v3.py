"""DeepSeek-V3: multi-head latent attention; dense layers, then mixtures."""

import math
from collections.abc import Sequence

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Settings
from models.formats.families.reading import get
from models.networks.description import (
  AttentionSpec,
  Latent,
  LayerSpec,
  TransformerConfig,
)

_ATTENTION = "layers.#.self_attn"
TENSORS = {
  **llama.TENSORS,
  **mixtures.DEEPSEEK_TENSORS,
  "layers.#.attention.q_a": f"{_ATTENTION}.q_a_proj",
  "layers.#.attention.q_a_norm": f"{_ATTENTION}.q_a_layernorm",
  "layers.#.attention.q_b": f"{_ATTENTION}.q_b_proj",
  "layers.#.attention.kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
  "layers.#.attention.kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
  "layers.#.attention.kv_b": f"{_ATTENTION}.kv_b_proj",
}
DEFAULTS = dict(
  mixtures.DEEPSEEK_DEFAULTS, q_lora_rank=1536, qk_rope_head_dim=64,
  rope_interleave=True,
)  # fmt: skip
HARMLESS = mixtures.DEEPSEEK_HARMLESS | {
  "pretraining_tp", "ep_size", "aux_loss_alpha", "seq_aux",
}  # fmt: skip


def config_of(settings: Settings, dense: Sequence[bool]) -> TransformerConfig:
  """A model with latent attention; `dense` says which layers are dense."""
  sizes = reading.sizes(settings, names={"head_dim": "qk_rope_head_dim"})
  latent = Latent(
    rank=get(settings, "kv_lora_rank", int),
    rope_dim=sizes["head_dim"],
    nope_dim=get(settings, "qk_nope_head_dim", int),
    value_dim=get(settings, "v_head_dim", int),
    query_rank=get(settings, "q_lora_rank", int, None),
    interleaved=get(settings, "rope_interleave", bool),
  )
  bias = get(settings, "attention_bias", bool)
  attention = AttentionSpec(
    num_heads=sizes["num_heads"],
    num_kv_heads=1,
    head_dim=latent.rank + latent.rope_dim,
    rope=reading.rope(settings, latent.rope_dim),
    scale=_scale(settings, latent),
    latent=latent,
    qkv_bias=bias,
    out_bias=bias,
  )
  blocks = mixtures.of_deepseek(settings, sizes), reading.dense(sizes)
  return reading.model(
    sizes,
    [LayerSpec(attention=attention, feed_forward=blocks[x]) for x in dense],
  )


def _scale(settings: Settings, latent: Latent) -> float:
  """The attention scale, with YaRN's factor, which the rotation leaves out."""
  given = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
  by = get(given, "mscale_all_dim", float, 0.0)
  factor = get(given, "factor", float, 1.0)
  kind = given.get("rope_type", given.get("type", "default"))
  scale = (latent.nope_dim + latent.rope_dim) ** -0.5
  if kind != "default" and by and factor > 1:
    scale *= (0.1 * by * math.log(factor) + 1) ** 2
  return scale


def _read(settings: Settings) -> TransformerConfig:
  dense = get(settings, "first_k_dense_replace", int, least=0)
  count = get(settings, "num_hidden_layers", int)
  return config_of(settings, [i < dense for i in range(count)])


FAMILY = Family(
  name="deepseek_v3",
  read=_read,
  tensors=TENSORS,
  layouts=mixtures.LAYOUTS,
  defaults=DEFAULTS,
  fixed=dict(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc"),
  # These follow from others.
  harmless=HARMLESS | {"head_dim", "qk_head_dim"},
  ignores=mixtures.of_drafting_layers,
)
