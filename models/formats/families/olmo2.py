"""OLMo 2: norms after both blocks, and over all heads of queries and keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from models.formats.families import llama, reading
from models.formats.families.family import Family, Settings
from models.formats.families.reading import FULL, SLIDING, get
from models.networks.description import TransformerConfig
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


def config_of(
  settings: Settings,
  sizes: Mapping[str, Any],
  types: Sequence[str],
  ropes: Mapping[str, Rope],
  window: int | None = None,
) -> TransformerConfig:
  """An OLMo 2 or 3 with layers of the given types; `ropes` is by type."""
  layers = {
    kind: reading.layer(
      sizes,
      window=window if kind == SLIDING else None,
      rope=rope,
      qk_norm="width",
      bias=get(settings, "attention_bias", bool),
      norms="post",
    )
    for kind, rope in ropes.items()
  }
  return reading.model(sizes, [layers[kind] for kind in types])


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  rope = reading.rope(settings, sizes["head_dim"])
  return config_of(settings, sizes, [FULL] * sizes["num_layers"], {FULL: rope})


FAMILY = Family(
  name="olmo2",
  read=_read,
  tensors=TENSORS,
  defaults=DEFAULTS,
)
