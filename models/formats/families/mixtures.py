"""What families with mixtures of experts read of a `config.json` alike."""

from collections.abc import Mapping
from typing import Any

from models.formats.families import llama, reading
from models.formats.families.family import TURNED, Settings
from models.formats.families.reading import get
from models.networks.description import (
  AttentionSpec,
  DenseSpec,
  LayerSpec,
  Rope,
)
from models.networks.mixture import Mixture

# Of training.
HARMLESS = frozenset(
  {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
)
# An expert's tensors are one parameter: * is its number.
TENSORS = {
  "layers.#.mlp.router": "layers.#.mlp.gate",
  **{
    f"layers.#.mlp.experts.{x}": f"layers.#.mlp.experts.*.{x}_proj.weight"
    for x in ("gate", "up", "down")
  },
}
LAYOUTS = {f"layers.#.mlp.experts.{x}": TURNED for x in ("gate", "up", "down")}
# Keys of the metadata of GGUF files.
GGUF_KEYS = {
  **llama.GGUF_KEYS,
  "expert_count": "num_experts",
  "expert_used_count": "num_experts_per_tok",
}


def without_mlp(tensors: Mapping[str, str]) -> dict[str, str]:
  """Names of a family's tensors, those of a dense MLP apart."""
  return {k: v for k, v in tensors.items() if ".mlp." not in k}


def mixture(
  settings: Settings,
  sizes: Mapping[str, Any],
  *,
  num_experts: str,
  expert_dim: str = "intermediate_size",
  **switches,
) -> Mixture:
  """The mixture of a layer.

  Args:
    settings: of the model.
    sizes: from `reading.sizes`.
    num_experts, expert_dim: keys of these numbers.
    **switches: more of `Mixture`.
  """
  return Mixture(
    num_experts=get(settings, num_experts, int),
    num_chosen=get(settings, "num_experts_per_tok", int),
    embed_dim=sizes["embed_dim"],
    expert_dim=get(settings, expert_dim, int),
    activation=sizes["activation"],
    **switches,
  )


def layer(
  sizes: Mapping[str, Any],
  feed_forward: Mixture | DenseSpec,
  *,
  rope: Rope,
  bias: bool = False,
  **attention,
) -> LayerSpec:
  """A layer with norms before its blocks.

  Args:
    sizes: from `reading.sizes`.
    feed_forward: its feed-forward block.
    rope: its rotary embeddings.
    bias: of all projections of its attention.
    **attention: more of `AttentionSpec`.
  """
  return LayerSpec(
    attention=AttentionSpec(
      **reading.heads(sizes), rope=rope, qkv_bias=bias, out_bias=bias,
      **attention,
    ),
    feed_forward=feed_forward,
  )  # fmt: skip
