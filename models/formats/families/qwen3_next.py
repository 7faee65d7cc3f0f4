"""Qwen3-Next: the gated delta rule in three of four layers.

Every fourth layer is attention with an output gate. Mixtures have a gated
shared expert, like Qwen2-MoE's.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Layout, Settings
from models.formats.families.reading import FULL, get
from models.networks.description import (
  DeltaSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.mixture import Mixture

LINEAR = "linear_attention"
_SHARE = 0.25  # of a head's channels rotate, the first ones
# Settings of 3D rotary positions, which coincide for text.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def config_of(
  settings: Settings,
  sizes: Mapping[str, Any],
  feed_forward: DenseSpec | Mixture,
) -> TransformerConfig:
  """A model with this feed-forward block in every layer."""
  period = get(settings, "full_attention_interval", int, 4)
  usual = [
    LINEAR if (i + 1) % period else FULL for i in range(sizes["num_layers"])
  ]
  full = reading.layer(
    sizes, output_gate=True, qk_norm="head",
    rope=reading.rope(
      settings, sizes["head_dim"], share=_SHARE, ignored=_OF_IMAGES
    ),
    bias=get(settings, "attention_bias", bool),
  ).attention  # fmt: skip
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
    LayerSpec(
      attention=full if kind == FULL else linear, feed_forward=feed_forward
    )
    for kind in reading.layer_types(settings, usual, [LINEAR, FULL])
  ]
  return reading.model(sizes, layers, norm="rms_plus_one")


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  experts = mixtures.with_shared(
    settings, sizes, renormalized=get(settings, "norm_topk_prob", bool)
  )
  return config_of(settings, sizes, experts)


def _delta(config: TransformerConfig) -> tuple[DeltaSpec, int]:
  """The delta-rule spec, and the number of value rows per key head."""
  delta = next(iter(config.deltas.values()))
  return delta, delta.num_value_heads // delta.num_key_heads * delta.value_dim


def grouped(x: np.ndarray, config: TransformerConfig) -> np.ndarray:
  """Groups the rows of queries, then keys, then values, by key head."""
  (delta, values), order, first = _delta(config), [], 0
  for width in (delta.key_dim, delta.key_dim, values):
    rows = first + np.arange(delta.num_key_heads * width)
    order.append(rows.reshape(delta.num_key_heads, -1))
    first += rows.size
  return x[np.concatenate(order, axis=1).ravel()]


def _part(name: str, last: bool) -> Layout:
  """The first or last part of the rows of every key head.

  Args:
    name: "qkvz", whose last part is z, or "ba", with two halves.
    last: whether to take the last part.
  """

  def rows(config: TransformerConfig) -> tuple[int, int, int]:
    """Number of key heads, and rows of both parts per head."""
    delta, values = _delta(config)
    if name == "ba":
      return delta.num_key_heads, *[values // delta.value_dim] * 2
    return delta.num_key_heads, delta.channels, values

  def take(x: np.ndarray, config: TransformerConfig) -> np.ndarray:
    heads, first, _ = rows(config)
    by_head = x.reshape(heads, -1, *x.shape[1:])
    chosen = by_head[:, first:] if last else by_head[:, :first]
    return chosen.reshape(-1, *x.shape[1:])

  def shape(s: tuple[int, ...], config: TransformerConfig) -> tuple[int, ...]:
    heads, *both = rows(config)
    return heads * sum(both), *s[1:]

  return Layout(take, shape)


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
  linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
  linear_value_head_dim=128, linear_num_value_heads=32,
)  # fmt: skip
FIXED = dict(attn_output_gate=True, output_gate_type="swish")
# `mamba_ssm_dtype` is ignored: states are at least float32.
HARMLESS = frozenset({
  "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype",
})  # fmt: skip

FAMILY = Family(
  name="qwen3_next",
  read=_read,
  tensors={
    **TENSORS,
    **mixtures.TENSORS,
    **mixtures.QWEN_SHARED,
    "layers.#.attention.qkv": f"{_LINEAR}.in_proj_qkvz",
    "layers.#.attention.z": f"{_LINEAR}.in_proj_qkvz",
    "layers.#.attention.b": f"{_LINEAR}.in_proj_ba",
    "layers.#.attention.a": f"{_LINEAR}.in_proj_ba",
  },
  layouts={
    **LAYOUTS,
    **mixtures.LAYOUTS,
    "layers.#.attention.qkv": _part("qkvz", last=False),
    "layers.#.attention.z": _part("qkvz", last=True),
    "layers.#.attention.b": _part("ba", last=False),
    "layers.#.attention.a": _part("ba", last=True),
  },
  defaults=dict(DEFAULTS, norm_topk_prob=True),
  fixed=FIXED | mixtures.QWEN_FIXED,
  harmless=mixtures.HARMLESS | HARMLESS,
)  # fmt: skip
