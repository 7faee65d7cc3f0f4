"""Qwen3: Llama with norms of each head's queries and keys, and windows."""

from models.formats.families import llama, qwen2
from models.formats.families.family import Family, Gguf, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  bias = get(settings, "attention_bias", bool)
  config = llama.alike(settings, qkv_bias=bias, out_bias=bias, qk_norm="head")
  return qwen2.with_windows(settings, config)


FAMILY = Family(
  name="qwen3",
  read=_read,
  tensors=llama.TENSORS,
  defaults=dict(qwen2.DEFAULTS, head_dim=128, attention_bias=False),
  harmless=frozenset({"max_window_layers"}),  # without windows
  gguf=Gguf(
    architecture="qwen3",
    keys=llama.GGUF_KEYS,
    settings=lambda metadata, has: {
      **llama.shared_sizes(metadata),
      "attention_bias": has("attn_q", "attn_output"),
    },
  ),
)
