"""Qwen3.5, the text model: Qwen3-Next's layers, one tensor per projection."""

from models.formats.families import qwen3_next, reading
from models.formats.families.family import Family, Layout, Settings
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  return qwen3_next.config_of(settings, sizes, reading.dense(sizes))


_TENSORS = {
  **qwen3_next.TENSORS,
  **{
    f"layers.#.attention.{x}": f"layers.#.linear_attn.in_proj_{x}"
    for x in ("qkv", "z", "b", "a")
  },
}
_LAYOUTS = {
  **qwen3_next.LAYOUTS,
  "layers.#.attention.qkv": Layout(qwen3_next.grouped),
}

FIXED = qwen3_next.FIXED | dict(mlp_only_layers=[])

FAMILY = Family(
  name="qwen3_5_text",
  read=_read,
  tensors=_TENSORS,
  layouts=_LAYOUTS,
  defaults=dict(qwen3_next.DEFAULTS, num_key_value_heads=4),
  fixed=FIXED,
  harmless=qwen3_next.HARMLESS,
  multimodal={"qwen3_5": {}},
)
