"""Qwen2: Llama with biases of queries, keys and values, and windows."""

import dataclasses

from models.formats.families import llama, reading
from models.formats.families.family import Family, Gguf, Settings
from models.formats.families.reading import FULL, SLIDES, get
from models.networks import description
from models.networks.description import TransformerConfig

DEFAULTS = dict(
  llama.DEFAULTS, num_key_value_heads=32, use_sliding_window=False,
  sliding_window=4096, max_window_layers=28, layer_types=None,
)  # fmt: skip


def with_windows(
  settings: Settings, config: TransformerConfig
) -> TransformerConfig:
  """The model with the windows of Qwen's settings."""
  layers, window = config.num_layers, get(settings, "sliding_window", int, None)
  full = layers
  if not get(settings, "use_sliding_window", bool):
    window = None
  if window is not None:
    full = get(settings, "max_window_layers", int, least=0)
  usual = [FULL if i < full else SLIDES for i in range(layers)]
  allowed = [FULL] if window is None else [FULL, SLIDES]
  types = reading.layer_types(settings, usual, allowed, window)
  if window is None:
    return config
  windows = [window if kind == SLIDES else None for kind in types]
  return dataclasses.replace(
    config, layers=description.with_windows(config.layers, windows)
  )


FAMILY = Family(
  name="qwen2",
  read=lambda settings: with_windows(
    settings, llama.alike(settings, qkv_bias=True)
  ),
  tensors=llama.TENSORS,
  defaults=DEFAULTS,
  fixed=dict(use_mrope=False, attention_bias=False, mlp_bias=False),
  harmless=frozenset({"max_window_layers"}),  # without windows
  gguf=Gguf(
    architecture="qwen2",
    keys=llama.GGUF_KEYS,
    settings=lambda metadata, has: llama.shared_sizes(metadata),
  ),
)
