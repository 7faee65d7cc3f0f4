"""OLMo 2: norms after both blocks, and over all queries and keys of a token."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from models.formats.families import llama, reading
from models.formats.families.family import Family, Gguf, Settings
from models.formats.families.reading import FULL, SLIDES, get
from models.networks.description import (
  AttentionSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.rope import Rope

TENSORS = {
  name: theirs
  for name, theirs in llama.TENSORS.items()
  if name not in ("layers.#.attention_norm", "layers.#.mlp_norm")
} | {
  "layers.#.attention_out_norm": "layers.#.post_attention_layernorm",
  "layers.#.mlp_out_norm": "layers.#.post_feedforward_layernorm",
}
DEFAULTS = dict(
  hidden_act="silu", rms_norm_eps=1e-5, tie_word_embeddings=False,
  attention_bias=False,
)  # fmt: skip


def described(
  settings: Settings,
  types: Sequence[str],
  ropes: Mapping[str, Rope],
  windows: Mapping[str, int | None],
) -> TransformerConfig:
  """An OLMo 2 or 3.

  Args:
    settings: its `config.json`.
    types: of every layer.
    ropes, windows: of every type.
  """
  sizes = reading.sizes(settings)
  bias = get(settings, "attention_bias", bool)
  feed_forward = DenseSpec(
    width=sizes["mlp_dim"], activation=sizes["activation"]
  )
  layer = {
    kind: LayerSpec(
      attention=AttentionSpec(
        **reading.heads(sizes),
        window=windows[kind],
        rope=ropes[kind],
        qk_norm="width",
        qkv_bias=bias,
        out_bias=bias,
      ),
      feed_forward=feed_forward,
      norms="post",
    )
    for kind in windows
  }
  return TransformerConfig(
    layers=tuple(layer[kind] for kind in types), **reading.frame(sizes)
  )


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  rope = reading.rope(settings, sizes["head_dim"])
  types = [FULL] * sizes["num_layers"]
  return described(settings, types, {FULL: rope}, {FULL: None})


_YARN = {
  "factor": "factor",
  "original_context_length": reading.ROPE_LENGTH,
  "yarn_attn_factor": "attention_factor",
  "yarn_beta_fast": "beta_fast",
  "yarn_beta_slow": "beta_slow",
}
_SLIDES = "attention.sliding_window_pattern"


def _gguf_settings(
  metadata: Mapping[str, Any], has: Callable[..., bool]
) -> dict[str, Any]:
  """OLMo 3's files are OLMo 2's with windows, and YaRN in full layers."""
  settings = {
    **llama.shared_sizes(metadata),
    "attention_bias": has("attn_q", "attn_output"),
  }
  kind = metadata.get("rope.scaling.type", "none")
  if not metadata.get("attention.sliding_window"):
    if kind != "none":
      raise ValueError(f"rope.scaling.type must be 'none', got {kind!r:.40}")
    return settings
  theta = {"rope_theta": metadata.get("rope.freq_base", 5e5)}
  full = {
    ours: metadata.get(f"rope.scaling.{key}") for key, ours in _YARN.items()
  }
  full["rope_type"] = "default" if kind == "none" else kind
  return settings | {
    "model_type": "olmo3",
    "layer_types": [
      SLIDES if slides else FULL
      for slides in np.ravel(metadata.get(_SLIDES, ()))
    ],
    "rope_parameters": {FULL: theta | full, SLIDES: theta},
  }


FAMILY = Family(
  name="olmo2",
  read=_read,
  tensors=TENSORS,
  defaults=DEFAULTS,
  gguf=Gguf(
    architecture="olmo2",
    keys={**llama.GGUF_KEYS, "attention.sliding_window": "sliding_window"},
    settings=_gguf_settings,
  ),
)
