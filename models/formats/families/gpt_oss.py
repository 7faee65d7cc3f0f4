"""gpt-oss: attention sinks, a biased router, clamped experts, some windows."""

from collections.abc import Callable, Mapping
from typing import Any

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import (
  AS_IS,
  SWAPPED,
  Family,
  Gguf,
  Layout,
  Settings,
)
from models.formats.families.reading import FULL, SLIDING, get
from models.networks.description import TransformerConfig

# GGUF files have no key for YaRN without truncation.
_ROPE = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_EXPERTS = "layers.#.mlp.experts"
_PARTS = ("gate", "up", "down")


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  window = get(settings, "sliding_window", int, None)
  experts = mixtures.mixture(
    settings, sizes, num_experts="num_local_experts", router_bias=True,
    expert_bias=True, limit=get(settings, "swiglu_limit", float),
    slope=get(settings, "swiglu_alpha", float),
  )  # fmt: skip
  layers = {
    kind: reading.layer(
      sizes, experts, window=window if kind == SLIDING else None, sinks=True,
      rope=reading.rope(settings, sizes["head_dim"], theta=150_000.0),
      bias=get(settings, "attention_bias", bool),
    )
    for kind in (FULL, SLIDING)
  }  # fmt: skip
  usual = [i % 2 == 0 for i in range(sizes["num_layers"])]
  kinds = reading.windowed(settings, usual, window)
  return reading.model(sizes, [layers[kind] for kind in kinds])


def _gguf_settings(
  metadata: Mapping[str, Any], has: Callable[..., bool]
) -> dict[str, Any]:
  said = {
    "rope_type": metadata["rope.scaling.type"],
    "factor": metadata["rope.scaling.factor"],
    reading.ROPE_LENGTH: metadata["rope.scaling.original_context_length"],
  }
  return {**llama.gguf_biases(metadata, has), "rope_scaling": _ROPE | said}


def _every_other(first: int) -> Layout:
  """Every other column: gates are even, up projections odd."""
  return Layout(
    lambda x, c: x[..., first::2],
    lambda s, c: (*s[:-1], 2 * s[-1]),
    of_parts=True,
  )


FAMILY = Family(
  name="gpt_oss",
  read=_read,
  tensors={
    **mixtures.without_mlp(llama.TENSORS),
    "layers.#.attention.sinks": "layers.#.self_attn.sinks",
    "layers.#.mlp.router": "layers.#.mlp.router",
    f"{_EXPERTS}.gate": f"{_EXPERTS}.gate_up_proj",
    f"{_EXPERTS}.up": f"{_EXPERTS}.gate_up_proj",
    f"{_EXPERTS}.down": f"{_EXPERTS}.down_proj",
    f"{_EXPERTS}.gate_bias": f"{_EXPERTS}.gate_up_proj_bias",
    f"{_EXPERTS}.up_bias": f"{_EXPERTS}.gate_up_proj_bias",
    f"{_EXPERTS}.down_bias": f"{_EXPERTS}.down_proj_bias",
  },
  layouts={
    f"{_EXPERTS}.gate": _every_other(0),
    f"{_EXPERTS}.up": _every_other(1),
    f"{_EXPERTS}.gate_bias": _every_other(0),
    f"{_EXPERTS}.up_bias": _every_other(1),
  },
  defaults=dict(
    hidden_act="silu", rms_norm_eps=1e-5, head_dim=64, attention_bias=True,
    tie_word_embeddings=False, num_key_value_heads=8, sliding_window=128,
    swiglu_limit=7.0, swiglu_alpha=1.702,
  ),
  quantized=frozenset({"mxfp4"}),
  harmless=mixtures.HARMLESS | {"initial_context_length", "experts_per_token"},
  gguf=Gguf(
    architecture="gpt-oss",
    keys={
      **llama.GGUF_KEYS,
      "expert_feed_forward_length": "intermediate_size",
      "expert_count": "num_local_experts",
      "expert_used_count": "num_experts_per_tok",
      "attention.sliding_window": "sliding_window",
    },
    # Gate and up projections are separate, each expert's transposed.
    tensors={
      "layers.#.attention.sinks": "layers.#.self_attn.sinks.weight",
      **{f"{_EXPERTS}.{x}": f"{_EXPERTS}.{x}_proj.weight" for x in _PARTS},
      **{f"{_EXPERTS}.{x}_bias": f"{_EXPERTS}.{x}_proj.bias" for x in _PARTS},
    },
    layouts={
      **{f"{_EXPERTS}.{x}": SWAPPED for x in _PARTS},
      **{f"{_EXPERTS}.{x}_bias": AS_IS for x in _PARTS},
    },
    settings=_gguf_settings,
  ),
)  # fmt: skip
