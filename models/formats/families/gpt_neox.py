"""GPT-NeoX (Pythia): parallel blocks, and a part of each head that rotates."""

from collections.abc import Callable, Mapping
from typing import Any

from models.formats.families import reading
from models.formats.families.family import (
  THIRDS,
  Family,
  Gguf,
  Layout,
  Settings,
)
from models.formats.families.llama import GGUF_SIZES
from models.formats.families.reading import get
from models.networks.description import (
  AttentionSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)

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
  layer = LayerSpec(
    attention=AttentionSpec(
      **reading.heads(sizes), rope=rope, qkv_bias=bias, out_bias=bias
    ),
    feed_forward=DenseSpec(
      width=sizes["mlp_dim"],
      activation=sizes["activation"],
      gated=False,
      bias=True,
    ),
    parallel=get(settings, "use_parallel_residual", bool),
  )
  return TransformerConfig(
    layers=(layer,) * sizes["num_layers"], norm="layer", **reading.frame(sizes)
  )


def _qkv_per_head(part: int) -> Layout:
  """Rows run over heads, then queries, keys, values, channels."""

  def take(x, c):
    a = c.attention
    x = x.reshape(a.num_heads, 3, a.head_dim, *x.shape[1:])
    return x[:, part].reshape(-1, *x.shape[3:])

  return Layout(take, lambda s, c: (3 * s[0], *s[1:]))


def _gguf_settings(
  metadata: Mapping[str, Any], has: Callable[..., bool]
) -> dict[str, Any]:
  size = metadata["embedding_length"] // metadata["attention.head_count"]
  # Half a channel more, for what is rounded down.
  rotary = metadata.get("rope.dimension_count", size) + 0.5
  return {
    "attention_bias": has("attn_qkv"),
    "rotary_pct": min(rotary / size, 1.0),
  }


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
    keys={
      **GGUF_SIZES,
      "attention.layer_norm_epsilon": "layer_norm_eps",
      "use_parallel_residual": "use_parallel_residual",
      "rope.freq_base": "rotary_emb_base",
    },
    settings=_gguf_settings,
    layouts=THIRDS,
  ),
)  # fmt: skip
