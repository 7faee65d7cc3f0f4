"""Qwen2: Llama with biases on queries, keys and values, and with windows."""

from models.formats.families import llama, reading
from models.formats.families.family import Family, Gguf, Settings
from models.formats.families.reading import SLIDING, get
from models.networks.description import TransformerConfig

DEFAULTS = dict(
  llama.DEFAULTS, num_key_value_heads=32, use_sliding_window=False,
  sliding_window=4096, max_window_layers=28,
)  # fmt: skip


def window(settings: Settings) -> int | None:
  """The size of Qwen's sliding windows; None if no layer has one."""
  size = get(settings, "sliding_window", int, 0, least=0)
  return size if get(settings, "use_sliding_window", bool) and size else None


def config_of(settings: Settings, **attention) -> TransformerConfig:
  """A Qwen2 or 3; `attention` as for `reading.layer`."""
  sizes, size = reading.sizes(settings), window(settings)
  full = get(settings, "max_window_layers", int, 0, least=0)
  kinds = reading.windowed(
    settings, [i >= full for i in range(sizes["num_layers"])], size
  )
  rope = reading.rope(settings, sizes["head_dim"])
  layers = [
    reading.layer(
      sizes, rope=rope, window=size if kind == SLIDING else None, **attention
    )
    for kind in kinds
  ]
  return reading.model(sizes, layers)


FAMILY = Family(
  name="qwen2",
  read=lambda settings: config_of(settings, qkv_bias=True),
  tensors=llama.TENSORS,
  defaults=DEFAULTS,
  fixed=dict(use_mrope=False, attention_bias=False, mlp_bias=False),
  gguf=Gguf(architecture="qwen2", keys=llama.GGUF_KEYS),
)
