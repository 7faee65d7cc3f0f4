"""Qwen3: Llama with norms on each head's queries and keys, and with windows."""

from models.formats.families import llama, qwen2
from models.formats.families.family import Family, Gguf
from models.formats.families.reading import get

FAMILY = Family(
  name="qwen3",
  read=lambda settings: qwen2.config_of(
    settings, bias=get(settings, "attention_bias", bool), qk_norm="head"
  ),
  tensors=llama.TENSORS,
  defaults=dict(qwen2.DEFAULTS, head_dim=128, attention_bias=False),
  gguf=Gguf(
    architecture="qwen3", keys=llama.GGUF_KEYS, settings=llama.gguf_biases
  ),
)
