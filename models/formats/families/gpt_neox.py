"""GPT-NeoX (Pythia): parallel blocks and partial rotary embeddings."""

from models.formats.families import reading
from models.formats.families.family import Family, Layout, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings, names={"rms_norm_eps": "layer_norm_eps"})
  layer = reading.layer(
    sizes,
    reading.dense(sizes, gated=False, bias=True),
    rope=reading.rope(settings, sizes["head_dim"], share=0.25),
    bias=get(settings, "attention_bias", bool),
    parallel=get(settings, "use_parallel_residual", bool),
  )
  return reading.model(sizes, [layer] * sizes["num_layers"], norm="layer")


def _qkv_per_head(part: int) -> Layout:
  """Rows run over heads, then queries, keys, values, channels."""

  def take(x, c):
    x = x.reshape(c.attention.num_heads, 3, -1, *x.shape[1:])
    return x[:, part].reshape(-1, *x.shape[3:])

  return Layout(take, lambda s, c: (3 * s[0], *s[1:]))


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
)  # fmt: skip
