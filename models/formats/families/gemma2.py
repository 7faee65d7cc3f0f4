"""Gemma 2: norms around both blocks, soft caps, windows in every other layer.

Its `post_attention_layernorm` norms attention's output; in Llama's files the
same name is the norm before the MLP.
"""

from collections.abc import Callable, Mapping
from typing import Any

from models.formats.families import llama, reading
from models.formats.families.family import Family, Gguf, Layout, Settings
from models.formats.families.reading import FULL, SLIDING, get
from models.networks.description import TransformerConfig
from models.networks.rope import Rope

TENSORS = {
  **llama.TENSORS,
  "layers.#.attention_out_norm": "layers.#.post_attention_layernorm",
  "layers.#.mlp_norm": "layers.#.pre_feedforward_layernorm",
  "layers.#.mlp_out_norm": "layers.#.post_feedforward_layernorm",
}
DEFAULTS = dict(
  hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6,
  tie_word_embeddings=True, attention_bias=False, query_pre_attn_scalar=256,
  sliding_window=4096, head_dim=256, num_attention_heads=8,
  num_key_value_heads=4,
)  # fmt: skip
FIXED = dict(use_bidirectional_attention=False)
# hidden_activation and sliding_window take precedence.
HARMLESS = frozenset({"hidden_act", "sliding_window_size"})
GGUF_KEYS = {
  **llama.GGUF_KEYS,
  "attention.sliding_window": "sliding_window",
  "attn_logit_softcapping": "attn_logit_softcapping",
  "final_logit_softcapping": "final_logit_softcapping",
}
# GGUF files store 1 + w for every norm.
GGUF_LAYOUTS = {
  name: Layout(lambda x, c: x - 1) for name in TENSORS if name.endswith("norm")
}


def config_of(
  settings: Settings,
  *,
  slides: Callable[[int], bool],
  ropes: Callable[[int], Mapping[str, Rope]],
  **attention,
) -> TransformerConfig:
  """A Gemma 2 or 3.

  `slides` is the default for which layers have windows, `ropes` maps a head
  dimension to the rotation of every layer type, and `attention` has further
  fields of `AttentionSpec`.
  """
  sizes = reading.sizes(settings, names={"hidden_act": "hidden_activation"})
  window = get(settings, "sliding_window", int, None)
  layers = {
    kind: reading.layer(
      sizes,
      window=window if kind == SLIDING else None,
      rope=rope,
      scale=get(settings, "query_pre_attn_scalar", float) ** -0.5,
      bias=get(settings, "attention_bias", bool),
      norms="both",
      **attention,
    )
    for kind, rope in ropes(sizes["head_dim"]).items()
  }
  kinds = reading.windowed(
    settings, map(slides, range(sizes["num_layers"])), window
  )
  return reading.model(
    sizes,
    [layers[kind] for kind in kinds],
    norm="rms_plus_one",
    embed_scale=sizes["embed_dim"] ** 0.5,
    logit_softcap=get(settings, "final_logit_softcapping", float, None),
  )


def _read(settings: Settings) -> TransformerConfig:
  return config_of(
    settings,
    slides=lambda layer: layer % 2 == 0,
    ropes=lambda size: dict.fromkeys(
      (FULL, SLIDING), reading.rope(settings, size)
    ),
    softcap=get(settings, "attn_logit_softcapping", float, None),
  )


def scalar(metadata: Mapping[str, Any], layers_of_27b: int) -> float:
  """`query_pre_attn_scalar`, which GGUF files lack; as in llama.cpp."""
  size = metadata["embedding_length"] / metadata["attention.head_count"]
  if metadata["block_count"] == layers_of_27b:
    return size
  return metadata.get("attention.key_length", size)


FAMILY = Family(
  name="gemma2",
  read=_read,
  tensors=TENSORS,
  defaults=dict(
    DEFAULTS, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
  ),
  fixed=FIXED,
  harmless=HARMLESS,
  gguf=Gguf(
    architecture="gemma2",
    keys=GGUF_KEYS,
    settings=lambda metadata, has: {
      "query_pre_attn_scalar": scalar(metadata, 46)
    },
    layouts=GGUF_LAYOUTS,
  ),
)
