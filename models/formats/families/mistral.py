"""Mistral: Llama with a sliding window in all layers, or in none."""

from models.formats.families import llama, reading
from models.formats.families.family import Family, Settings
from models.formats.families.reading import FULL, SLIDES, get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  layers = get(settings, "num_hidden_layers", int)
  window = get(settings, "sliding_window", int, None)
  # transformers itself ignores layer_types here.
  usual = FULL if window is None else SLIDES
  config = llama.alike(settings, window=window)  # which bounds the layers
  reading.layer_types(settings, [usual] * layers, [usual], window)
  return config


FAMILY = Family(
  name="mistral",
  read=_read,
  tensors=llama.TENSORS,
  fixed=dict(attention_bias=False, mlp_bias=False),
  defaults=dict(
    llama.DEFAULTS, num_key_value_heads=8, sliding_window=4096, layer_types=None
  ),
)
