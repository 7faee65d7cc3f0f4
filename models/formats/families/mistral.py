"""Mistral: Llama with a sliding window in all layers or none."""

from models.formats.families import llama
from models.formats.families.family import Family
from models.formats.families.reading import get

FAMILY = Family(
  name="mistral",
  read=lambda settings: llama.config_of(
    settings, window=get(settings, "sliding_window", int, None)
  ),
  tensors=llama.TENSORS,
  fixed=dict(attention_bias=False, mlp_bias=False),
  defaults=dict(llama.DEFAULTS, num_key_value_heads=8, sliding_window=4096),
  harmless=frozenset({"layer_types"}),  # transformers ignores it
)
