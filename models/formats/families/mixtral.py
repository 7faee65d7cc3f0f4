"""Mixtral: Mistral with a mixture of experts instead of the MLP."""

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig

_BLOCK = "layers.#.block_sparse_moe"


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  layer = reading.layer(
    sizes,
    mixtures.mixture(
      settings, sizes, num_experts="num_local_experts", renormalized=True
    ),
    rope=reading.rope(settings, sizes["head_dim"], theta=1e6),
    window=get(settings, "sliding_window", int, None),
  )
  return reading.model(sizes, [layer] * sizes["num_layers"])


FAMILY = Family(
  name="mixtral",
  read=_read,
  tensors={
    **mixtures.without_mlp(llama.TENSORS),
    "layers.#.mlp.router": f"{_BLOCK}.gate",
    "layers.#.mlp.experts.gate": f"{_BLOCK}.experts.*.w1.weight",
    "layers.#.mlp.experts.up": f"{_BLOCK}.experts.*.w3.weight",
    "layers.#.mlp.experts.down": f"{_BLOCK}.experts.*.w2.weight",
  },
  layouts=mixtures.LAYOUTS,
  defaults=dict(llama.DEFAULTS, rms_norm_eps=1e-5, num_key_value_heads=8),
  fixed=dict(attention_bias=False, mlp_bias=False),
  harmless=mixtures.HARMLESS,
)
