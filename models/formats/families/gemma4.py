"""Gemma 4, the text model: full and sliding layers differ in head size.

Full layers may use their keys as values; the last layers may reuse the KV cache
of earlier ones. Norms scale by w, not by 1 + w as in Gemma 2 and 3.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.formats import json_files
from models.formats.families import gemma2, gemma4_gguf, mixtures, reading
from models.formats.families.family import SWAPPED, Family, Layout, Settings
from models.formats.families.reading import FULL, SLIDING, get
from models.networks.description import TransformerConfig
from models.networks.mixture import Mixture


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings, names={"hidden_act": "hidden_activation"})
  count, window = sizes["num_layers"], get(settings, "sliding_window", int)
  kinds = reading.windowed(
    settings, [(i + 1) % 6 > 0 for i in range(count)], window
  )
  kinds = [*kinds[:-1], FULL]  # the last layer always is one
  shared = get(settings, "num_kv_shared_layers", int, 0, least=0)
  unshared = kinds[: count - shared]
  same, wide, bias = (
    get(settings, key, bool)
    for key in ("attention_k_eq_v", "use_double_wide_mlp", "attention_bias")
  )
  extra, layers = _mixture(settings, sizes), []
  for i, kind in enumerate(kinds):
    shares = i >= len(unshared)
    heads = _heads(settings, sizes, i, kind)
    ropes = reading.rope_by_type(
      {"rope_parameters": settings.get("rope_parameters") or _ROPE,
       "max_position_embeddings": settings.get("max_position_embeddings")},
      heads["head_dim"], older={}, theta={FULL: 1e6, SLIDING: 1e4},
    )  # fmt: skip
    width = sizes["mlp_dim"] * (2 if shares and wide else 1)
    layer = reading.layer(
      sizes, reading.dense(sizes, width=width), bias=bias, norms="both",
      **heads, scale=1.0, qk_norm="head", v_norm=True,
      window=window if kind == SLIDING else None,
      rope=ropes[kind],
      keys_as_values=same and kind == FULL,
      source=len(unshared) - 1 - unshared[::-1].index(kind) if shares else None,
    )  # fmt: skip
    layers.append(dataclasses.replace(layer, scaled=True, extra=extra))
  size = get(settings, "hidden_size_per_layer_input", int, 0, least=0)
  tokens = get(settings, "vocab_size_per_layer_input", int) if size else 0
  return reading.model(
    sizes, layers, embed_scale=sizes["embed_dim"] ** 0.5,
    logit_softcap=get(settings, "final_logit_softcapping", float, None),
    per_layer_dim=size, per_layer_vocab=tokens,
  )  # fmt: skip


def _heads(
  settings: Settings, sizes: Mapping[str, Any], layer: int, kind: str
) -> dict[str, int]:
  """Number and size of a layer's key/value heads."""
  names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
  given, more = settings.get("per_layer_config"), {}
  if given is not None:  # transformers pads layer numbers with zeros
    more = {int(number): x for number, x in given.items()}.get(layer, {})
    json_files.refuse_unknown(more, names, "settings of per_layer_config")
  elif kind == FULL:
    more = {"head_dim": get(settings, "global_head_dim", int, 512)}
    if settings["attention_k_eq_v"]:
      few = settings.get("num_global_key_value_heads")
      more["num_key_value_heads"] = few
  return {ours: get(more, key, int, sizes[ours]) for key, ours in names.items()}


def _mixture(settings: Settings, sizes: Mapping[str, Any]) -> Mixture | None:
  if not get(settings, "enable_moe_block", bool):
    return None
  return mixtures.mixture(
    settings, sizes, num_chosen="top_k_experts",
    expert_dim="moe_intermediate_size", router_norm_eps=sizes["norm_eps"],
  )  # fmt: skip


def _half(which: int) -> Layout:
  """One half of each expert's rows: gates are first, then up projections."""
  return Layout(
    lambda x, c: x.reshape(len(x), 2, -1, x.shape[2])[:, which].swapaxes(1, 2),
    lambda s, c: (s[0], 2 * s[2], s[1]),
  )


def _ignores(name: str, config: TransformerConfig) -> bool:
  """True for keys and values of layers that share another layer's."""
  parts = name.split(".")
  if len(parts) < 4 or parts[2] != "self_attn" or parts[3][0] not in "kv":
    return False
  layer = int(parts[1]) if parts[1].isdecimal() else config.num_layers
  return layer < config.num_layers and layer not in config.cached


_ROPE = {
  FULL: dict(rope_type="proportional", partial_rotary_factor=0.25), SLIDING: {},
}  # fmt: skip
_EXTRA, _THEIRS = "layers.#.extra", "layers.#.experts.gate_up_proj"
FAMILY = Family(
  name="gemma4_text",
  read=_read,
  tensors={
    **gemma2.TENSORS,
    "per_layer_embed": "embed_tokens_per_layer",
    "per_layer_projection": "per_layer_model_projection",
    "per_layer_norm": "per_layer_projection_norm",
    "layers.#.per_layer_gate": "layers.#.per_layer_input_gate",
    "layers.#.per_layer_out": "layers.#.per_layer_projection",
    "layers.#.per_layer_out_norm": "layers.#.post_per_layer_input_norm",
    "layers.#.scalar": "layers.#.layer_scalar",
    "layers.#.mlp_alone_norm": "layers.#.post_feedforward_layernorm_1",
    "layers.#.beside_norm": "layers.#.pre_feedforward_layernorm_2",
    "layers.#.beside_out_norm": "layers.#.post_feedforward_layernorm_2",
    f"{_EXTRA}.router": "layers.#.router.proj",
    f"{_EXTRA}.router.scale": "layers.#.router.scale",
    f"{_EXTRA}.router.expert_scale": "layers.#.router.per_expert_scale",
    f"{_EXTRA}.experts.gate": _THEIRS,
    f"{_EXTRA}.experts.up": _THEIRS,
    f"{_EXTRA}.experts.down": "layers.#.experts.down_proj",
  },
  layouts={
    f"{_EXTRA}.experts.gate": _half(0),
    f"{_EXTRA}.experts.up": _half(1),
    f"{_EXTRA}.experts.down": SWAPPED,
  },
  defaults=dict(
    gemma2.DEFAULTS, sliding_window=512, final_logit_softcapping=None,
    hidden_size_per_layer_input=256, vocab_size_per_layer_input=262_144,
    attention_k_eq_v=False, enable_moe_block=False, use_double_wide_mlp=False,
    max_position_embeddings=131_072,
  ),
  fixed=dict(use_bidirectional_attention="vision"),  # affects only images
  harmless=gemma2.HARMLESS | {
    "query_pre_attn_scalar",  # scores are not scaled
    # Sizes of features that may be off.
    "num_experts", "top_k_experts", "moe_intermediate_size", "global_head_dim",
    "num_global_key_value_heads", "vocab_size_per_layer_input",
  },
  ignores=_ignores,
  multimodal={"gemma4": dict(tie_word_embeddings=True)},
  gguf=gemma4_gguf.GGUF,
)  # fmt: skip
