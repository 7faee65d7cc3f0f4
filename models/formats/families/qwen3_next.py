"""Qwen3-Next: gated delta rule in three layers of four.

The fourth is attention with an output gate. Mixtures have an expert beside them
for every token, as Qwen2-MoE's.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Layout, Settings
from models.formats.families.reading import FULL, get
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.mixture import Mixture

LINEAR = "linear_attention"
_SHARE = 0.25  # of a head's channels, the first ones rotate
# Of a rotation by three positions, which are the same in texts.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def described(
  settings: Settings,
  sizes: Mapping[str, Any],
  feed_forward: list[DenseSpec | Mixture],
) -> TransformerConfig:
  """The model of some feed-forward blocks, one a layer."""
  period = get(settings, "full_attention_interval", int, 4)
  usual = [
    LINEAR if (i + 1) % period else FULL for i in range(len(feed_forward))
  ]
  types = reading.layer_types(settings, usual, [LINEAR, FULL], None)
  rotary = settings.get("rope_parameters") or {}
  if isinstance(rotary, Mapping):
    rotary = {k: v for k, v in rotary.items() if k not in _OF_IMAGES}
  bias = get(settings, "attention_bias", bool)
  full = AttentionSpec(
    **reading.heads(sizes),
    rope=reading.rope(
      _Other(settings, rope_parameters=rotary), sizes["head_dim"], share=_SHARE
    ),
    qk_norm="head", output_gate=True, qkv_bias=bias, out_bias=bias,
  )  # fmt: skip
  size = lambda name: get(settings, f"linear_{name}", int)
  linear = DeltaSpec(
    num_key_heads=size("num_key_heads"),
    num_value_heads=size("num_value_heads"),
    key_dim=size("key_head_dim"),
    value_dim=size("value_head_dim"),
    kernel=size("conv_kernel_dim"),
    activation=sizes["activation"],
  )
  layers = [
    LayerSpec(attention=full if kind == FULL else linear, feed_forward=block)
    for kind, block in zip(types, feed_forward, strict=True)
  ]
  return TransformerConfig(
    layers=tuple(layers), norm="rms_plus_one", **reading.frame(sizes)
  )


class _Other(Mapping):
  """Settings some of which are others; what is asked is noted of them."""

  def __init__(self, settings: Settings, **others):
    self._settings, self._others = settings, others

  def __getitem__(self, key):
    return self._others.get(key, self._settings[key])

  def __iter__(self):
    return iter({*self._settings, *self._others})

  def __len__(self):
    return len({*self._settings, *self._others})


def experts(
  settings: Settings, sizes: Mapping[str, Any], *, renormalised: bool
) -> Mixture:
  """The mixture of a layer, with the expert of every token."""
  return mixtures.mixture(
    settings, sizes, num_experts="num_experts",
    expert_dim="moe_intermediate_size",
    renormalised=renormalised,
    shared_dim=get(settings, "shared_expert_intermediate_size", int),
    shared_gate=True,
  )  # fmt: skip


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  mixed = experts(
    settings, sizes, renormalised=get(settings, "norm_topk_prob", bool)
  )
  mlp = DenseSpec(width=sizes["mlp_dim"], activation=sizes["activation"])
  dense = mixtures.dense_layers(settings, sizes["num_layers"])
  return described(settings, sizes, [mlp if one else mixed for one in dense])


def _delta(config: TransformerConfig) -> DeltaSpec:
  return next(iter(config.deltas.values()))


def grouped(x: np.ndarray, config: TransformerConfig) -> np.ndarray:
  """Rows by key heads, of a tensor with queries, keys and values in turn."""
  delta, order, first = _delta(config), [], 0
  served = delta.num_value_heads // delta.num_key_heads
  for width in (delta.key_dim, delta.key_dim, served * delta.value_dim):
    rows = first + np.arange(delta.num_key_heads * width)
    order.append(rows.reshape(delta.num_key_heads, -1))
    first += rows.size
  return x[np.concatenate(order, axis=1).ravel()]


def _group(start: int | None, stop: int | None, width: str) -> Layout:
  """A part of the rows of every key head.

  Args:
    start, stop: multiples of `channels` or of value heads by key heads.
    width: "qkvz" or "ba", what a key head has in the tensor.
  """

  def rows(config: TransformerConfig) -> int:
    delta = _delta(config)
    served = delta.num_value_heads // delta.num_key_heads
    of_head = delta.channels + served * delta.value_dim
    return delta.num_key_heads * (of_head if width == "qkvz" else 2 * served)

  def take(x: np.ndarray, config: TransformerConfig) -> np.ndarray:
    delta = _delta(config)
    served = delta.num_value_heads // delta.num_key_heads
    unit = delta.channels if width == "qkvz" else served
    by_head = x.reshape(delta.num_key_heads, -1, *x.shape[1:])
    at = slice(start and start * unit, stop and stop * unit)
    return by_head[:, at].reshape(-1, *x.shape[1:])

  return Layout(take, lambda s, c: (rows(c), *s[1:]))


def _half_of_heads(part: int) -> Layout:
  """Rows run over heads, then queries and gates, then channels."""

  def take(x: np.ndarray, config: TransformerConfig) -> np.ndarray:
    x = x.reshape(-1, 2, config.attention.head_dim, *x.shape[1:])
    return x[:, part].reshape(-1, *x.shape[3:])

  return Layout(take, lambda s, c: (2 * s[0], *s[1:]))


_LINEAR = "layers.#.linear_attn"
TENSORS = {
  **llama.TENSORS,
  "layers.#.attention.gate": "layers.#.self_attn.q_proj",
  "layers.#.attention.delta_out": f"{_LINEAR}.out_proj",
  "layers.#.attention.conv": f"{_LINEAR}.conv1d.weight",
  "layers.#.attention.log_decay": f"{_LINEAR}.A_log",
  "layers.#.attention.step_bias": f"{_LINEAR}.dt_bias",
  "layers.#.attention.norm": f"{_LINEAR}.norm.weight",
}
LAYOUTS = {
  "layers.#.attention.q": _half_of_heads(0),
  "layers.#.attention.gate": _half_of_heads(1),
  "layers.#.attention.conv": Layout(
    lambda x, c: grouped(x[:, 0], c), lambda s, c: (s[0], 1, s[1])
  ),
}
DEFAULTS = dict(
  llama.DEFAULTS, head_dim=256, num_key_value_heads=2, attention_bias=False,
  layer_types=None, linear_conv_kernel_dim=4, linear_key_head_dim=128,
  linear_value_head_dim=128, linear_num_key_heads=16,
  linear_num_value_heads=32,
)  # fmt: skip
FIXED = dict(attn_output_gate=True, output_gate_type="swish")
# States are float32, or wider where the model is.
HARMLESS = frozenset({
  "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype",
})  # fmt: skip
SHARED = {
  **mixtures.shared_tensors("shared_expert"),
  "layers.#.mlp.shared.weigh": "layers.#.mlp.shared_expert_gate.weight",
}

FAMILY = Family(
  name="qwen3_next",
  read=_read,
  tensors={
    **TENSORS,
    **mixtures.TENSORS,
    **SHARED,
    "layers.#.attention.qkv": f"{_LINEAR}.in_proj_qkvz",
    "layers.#.attention.z": f"{_LINEAR}.in_proj_qkvz",
    "layers.#.attention.b": f"{_LINEAR}.in_proj_ba",
    "layers.#.attention.a": f"{_LINEAR}.in_proj_ba",
  },
  layouts={
    **LAYOUTS,
    **mixtures.LAYOUTS,
    "layers.#.attention.qkv": _group(None, 1, "qkvz"),
    "layers.#.attention.z": _group(1, None, "qkvz"),
    "layers.#.attention.b": _group(None, 1, "ba"),
    "layers.#.attention.a": _group(1, None, "ba"),
  },
  defaults=dict(
    DEFAULTS, decoder_sparse_step=1, mlp_only_layers=None,
    moe_intermediate_size=512, shared_expert_intermediate_size=512,
    num_experts_per_tok=10, num_experts=512, norm_topk_prob=True,
  ),
  aliases={"num_local_experts": "num_experts"},
  fixed=FIXED | dict(use_sliding_window=False),
  harmless=mixtures.HARMLESS | HARMLESS,
)  # fmt: skip
