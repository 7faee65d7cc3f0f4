"""GPT-2: learned positions, and transposed matrices."""

import numpy as np

from models.formats.families import reading
from models.formats.families.family import (
  TRANSPOSED,
  Family,
  Layout,
  Settings,
)
from models.formats.families.reading import get
from models.networks.description import TransformerConfig

_NAMES = dict(
  hidden_size="n_embd", num_hidden_layers="n_layer",
  num_attention_heads="n_head", intermediate_size="n_inner",
  max_position_embeddings="n_positions", hidden_act="activation_function",
  rms_norm_eps="layer_norm_epsilon",
)  # fmt: skip


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings, names=_NAMES)
  mlp = reading.dense(sizes, gated=False, bias=True)
  by_layer = get(settings, "scale_attn_by_inverse_layer_idx", bool)
  root = sizes["head_dim"] ** -0.5
  scale = root if get(settings, "scale_attn_weights", bool) else 1.0
  layers = [
    reading.layer(
      sizes, mlp, bias=True, scale=scale / (i + 1 if by_layer else 1)
    )
    for i in range(sizes["num_layers"])
  ]
  return reading.model(sizes, layers, norm="layer", learned_positions=True)


def _qkv_columns(part: int) -> Layout:
  """Queries, keys and values side by side in the last axis."""
  return Layout(
    lambda x, c: np.split(x, 3, axis=-1)[part].T,
    lambda s, c: (*s[1:], 3 * s[0]),
  )


FAMILY = Family(
  name="gpt2",
  read=_read,
  tensors={
    "embed": "wte",
    "position_embed": "wpe",
    "final_norm": "ln_f",
    "lm_head": "lm_head",
    "layers.#.attention_norm": "h.#.ln_1",
    "layers.#.attention.q": "h.#.attn.c_attn",
    "layers.#.attention.k": "h.#.attn.c_attn",
    "layers.#.attention.v": "h.#.attn.c_attn",
    "layers.#.attention.out": "h.#.attn.c_proj",
    "layers.#.mlp_norm": "h.#.ln_2",
    "layers.#.mlp.up": "h.#.mlp.c_fc",
    "layers.#.mlp.down": "h.#.mlp.c_proj",
  },
  layouts={
    **{f"layers.#.attention.{x}": _qkv_columns(i) for i, x in enumerate("qkv")},
    "layers.#.attention.out": TRANSPOSED,
    "layers.#.mlp.up": TRANSPOSED,
    "layers.#.mlp.down": TRANSPOSED,
  },
  defaults=dict(
    activation_function="gelu_new", layer_norm_epsilon=1e-5,
    tie_word_embeddings=True, scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
  ),
  harmless=frozenset({
    "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "reorder_and_upcast_attn",
  }),
)  # fmt: skip
