"""Settings and tensor names shared by families with mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from models.formats.families import llama
from models.formats.families.family import SWAPPED, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig
from models.networks.mixture import Mixture

# Training settings.
HARMLESS = frozenset(
  {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
)
# All experts are one parameter; * is an expert's number.
TENSORS = {
  "layers.#.mlp.router": "layers.#.mlp.gate",
  **{
    f"layers.#.mlp.experts.{x}": f"layers.#.mlp.experts.*.{x}_proj.weight"
    for x in ("gate", "up", "down")
  },
}
LAYOUTS = {f"layers.#.mlp.experts.{x}": SWAPPED for x in ("gate", "up", "down")}
# Keys of GGUF metadata.
GGUF_KEYS = {
  **llama.GGUF_KEYS,
  "expert_count": "num_experts",
  "expert_used_count": "num_experts_per_tok",
}


def shared_tensors(module: str) -> dict[str, str]:
  """Tensor names of the shared expert, which files call `module`."""
  return {
    f"layers.#.mlp.shared.{x}": f"layers.#.mlp.{module}.{x}_proj.weight"
    for x in ("gate", "up", "down")
  }


# Qwen's shared expert, which is gated.
QWEN_SHARED = {
  **shared_tensors("shared_expert"),
  "layers.#.mlp.shared.weigh": "layers.#.mlp.shared_expert_gate.weight",
}


# Qwen's models have experts in every layer and no windows.
QWEN_FIXED = dict(
  mlp_only_layers=[], decoder_sparse_step=1, use_sliding_window=False
)
QWEN_HARMLESS = HARMLESS | {
  "sliding_window", "max_window_layers", "layer_types",
}  # fmt: skip


def without_mlp(tensors: Mapping[str, str]) -> dict[str, str]:
  """A family's tensor names without those of a dense MLP."""
  return {k: v for k, v in tensors.items() if ".mlp." not in k}


def mixture(
  settings: Settings,
  sizes: Mapping[str, Any],
  *,
  num_experts: str = "num_experts",
  num_chosen: str = "num_experts_per_tok",
  expert_dim: str = "intermediate_size",
  **switches,
) -> Mixture:
  """The mixture of a layer.

  `num_experts`, `num_chosen` and `expert_dim` are the keys of these settings;
  `switches` are other fields of `Mixture`.
  """
  return Mixture(
    num_experts=get(settings, num_experts, int),
    num_chosen=get(settings, num_chosen, int),
    embed_dim=sizes["embed_dim"],
    expert_dim=get(settings, expert_dim, int),
    activation=sizes["activation"],
    **switches,
  )


def with_shared(
  settings: Settings, sizes: Mapping[str, Any], *, renormalized: bool
) -> Mixture:
  """Qwen's mixture with a gated shared expert."""
  return mixture(
    settings, sizes, expert_dim="moe_intermediate_size",
    renormalized=renormalized,
    shared_dim=get(settings, "shared_expert_intermediate_size", int),
    shared_gate=True,
  )  # fmt: skip


# DeepSeek-V3's mixture, also GLM-4.5's.
DEEPSEEK_TENSORS = {
  **TENSORS,
  **shared_tensors("shared_experts"),
  "layers.#.mlp.router.correction": (
    "layers.#.mlp.gate.e_score_correction_bias"
  ),
}
DEEPSEEK_DEFAULTS = dict(
  llama.DEFAULTS, attention_bias=False, norm_topk_prob=True
)
# Settings of MTP layers, which the model does not use.
DEEPSEEK_HARMLESS = HARMLESS | {"num_nextn_predict_layers", "num_mtp_layers"}


def of_drafting_layers(name: str, config: TransformerConfig) -> bool:
  """True for tensors of the MTP layers after the last layer."""
  kind, layer = [*name.split("."), "", ""][:2]
  is_layer = kind == "layers" and layer.isdecimal()
  return is_layer and int(layer) >= config.num_layers


def of_deepseek(settings: Settings, sizes: Mapping[str, Any]) -> Mixture:
  """DeepSeek-V3's mixture: the router's correction affects only the choice."""
  width = get(settings, "moe_intermediate_size", int)
  return mixture(
    settings, sizes, num_experts="n_routed_experts",
    expert_dim="moe_intermediate_size", router="sigmoid",
    renormalized=get(settings, "norm_topk_prob", bool),
    num_groups=get(settings, "n_group", int),
    num_groups_kept=get(settings, "topk_group", int),
    scale=get(settings, "routed_scaling_factor", float),
    shared_dim=width * get(settings, "n_shared_experts", int),
  )  # fmt: skip
