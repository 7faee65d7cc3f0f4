"""GPT-2: learned positions, and transposed matrices."""

import numpy as np

from models.formats.families import reading
from models.formats.families.family import (
  AS_IS,
  THIRDS,
  TRANSPOSED,
  Family,
  Gguf,
  Layout,
  Settings,
)
from models.networks.description import (
  AttentionSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)

_NAMES = dict(
  hidden_size="n_embd", num_hidden_layers="n_layer",
  num_attention_heads="n_head", intermediate_size="n_inner",
  max_position_embeddings="n_positions", hidden_act="activation_function",
  rms_norm_eps="layer_norm_epsilon",
)  # fmt: skip


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings, names=_NAMES, mlp_dim=lambda width: 4 * width)
  layer = LayerSpec(
    attention=AttentionSpec(
      **reading.heads(sizes), qkv_bias=True, out_bias=True
    ),
    feed_forward=DenseSpec(
      width=sizes["mlp_dim"],
      activation=sizes["activation"],
      gated=False,
      bias=True,
    ),
  )
  return TransformerConfig(
    layers=(layer,) * sizes["num_layers"],
    norm="layer",
    learned_positions=True,
    **reading.frame(sizes),
  )


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
    n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
  ),
  aliases={  # names of transformers' own for the same
    key: _NAMES[key]
    for key in (
      "hidden_size", "num_hidden_layers", "num_attention_heads",
      "max_position_embeddings",
    )
  },
  # Of attention's scales, models.formats.huggingface takes care.
  harmless=frozenset({
    "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "reorder_and_upcast_attn", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
  }),
  gguf=Gguf(
    architecture="gpt2",
    keys={
      "context_length": "n_positions",
      "embedding_length": "n_embd",
      "feed_forward_length": "n_inner",
      "block_count": "n_layer",
      "attention.head_count": "n_head",
      "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    layouts={
      **THIRDS,
      "layers.#.attention.out": AS_IS,
      "layers.#.mlp.up": AS_IS,
      "layers.#.mlp.down": AS_IS,
    },
  ),
)  # fmt: skip
