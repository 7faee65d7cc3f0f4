"""GPT-NeoX (Pythia): parallel blocks, and a part of each head that rotates."""

import numpy as np

from models.formats.families import reading
from models.formats.families.family import Family, Gguf, Layout, Settings
from models.formats.families.llama import GGUF_SIZES
from models.formats.families.reading import get
from models.networks.description import TransformerConfig

# Keys of other families, which transformers does not read in these.
_UNREAD = {
  "rope_theta": "rotary_emb_base",
  "partial_rotary_factor": "rotary_pct",
}


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings, names={"rms_norm_eps": "layer_norm_eps"})
  for key, theirs in _UNREAD.items():
    if settings.get(key) is not None and settings.get(theirs) is None:
      raise ValueError(f"{key} of a gpt_neox model is called {theirs}")
  rope = reading.rope(settings, sizes["head_dim"], share=0.25)
  bias = get(settings, "attention_bias", bool)
  return TransformerConfig(
    **sizes, **reading.rope_fields(rope), rotary_dim=rope.dim, norm="layer",
    gated_mlp=False, qkv_bias=bias, out_bias=bias, mlp_bias=True,
    parallel_residual=get(settings, "use_parallel_residual", bool),
  )  # fmt: skip


def _qkv_per_head(part: int) -> Layout:
  """Rows run over heads, then queries, keys, values, channels."""

  def take(x, c):
    x = x.reshape(c.num_heads, 3, c.head_dim, *x.shape[1:])
    return x[:, part].reshape(-1, *x.shape[3:])

  return Layout(lambda s: (3 * s[0], *s[1:]), take)


def _rows(name: str, config: TransformerConfig) -> np.ndarray | None:
  """llama.cpp has all queries before all keys."""
  if name != "query_key_value":
    return None
  rows = np.arange(3 * config.num_heads * config.head_dim)
  return rows.reshape(3, -1, config.head_dim).swapaxes(0, 1).ravel()


FAMILY = Family(
  name="gpt_neox",
  read=_read,
  tensors={
    "embed": "embed_in",
    "final_norm": "final_layer_norm",
    "lm_head": "lm_head",
    "layers.#.attention_norm": "layers.#.input_layernorm",
    "layers.#.attention.q": "layers.#.attention.query_key_value",
    "layers.#.attention.k": "layers.#.attention.query_key_value",
    "layers.#.attention.v": "layers.#.attention.query_key_value",
    "layers.#.attention.out": "layers.#.attention.dense",
    "layers.#.mlp_norm": "layers.#.post_attention_layernorm",
    "layers.#.mlp.up": "layers.#.mlp.dense_h_to_4h",
    "layers.#.mlp.down": "layers.#.mlp.dense_4h_to_h",
  },
  layouts={
    f"layers.#.attention.{x}": _qkv_per_head(i) for i, x in enumerate("qkv")
  },
  defaults=dict(
    hidden_act="gelu", layer_norm_eps=1e-5, use_parallel_residual=True,
    attention_bias=True, tie_word_embeddings=False,
  ),
  harmless=frozenset({"classifier_dropout", "hidden_dropout"}),
  gguf=Gguf(
    architecture="gptneox",
    prefix="gpt_neox.",
    keys={
      **GGUF_SIZES,
      "attention.layer_norm_epsilon": "layer_norm_eps",
      "use_parallel_residual": "use_parallel_residual",
      "rope.freq_base": "rope_theta",
    },
    optional=frozenset({"use_parallel_residual"}),
    settings=lambda metadata, has: {"attention_bias": has("attn_qkv")},
    rows=_rows,
    rotary="part",
  ),
)  # fmt: skip
