"""Parts of a `config.json` that families with mixtures of experts share."""

from collections.abc import Mapping
from typing import Any

from models.formats.families import llama
from models.formats.families.family import TURNED, Settings
from models.formats.families.reading import get
from models.networks.description import TransformerConfig
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


def shared_tensors(module: str) -> dict[str, str]:
  """Names of the expert that every token is given, in files' `module`."""
  return {
    f"layers.#.mlp.shared.{x}": f"layers.#.mlp.{module}.{x}_proj.weight"
    for x in ("gate", "up", "down")
  }


# Qwen's expert of every token, which is gated.
QWEN_SHARED = {
  **shared_tensors("shared_expert"),
  "layers.#.mlp.shared.weigh": "layers.#.mlp.shared_expert_gate.weight",
}


# Of Qwen's models, which have experts in every layer and no windows.
QWEN_FIXED = dict(
  mlp_only_layers=[], decoder_sparse_step=1, use_sliding_window=False
)
QWEN_HARMLESS = HARMLESS | {
  "sliding_window", "max_window_layers", "layer_types",
}  # fmt: skip


def without_mlp(tensors: Mapping[str, str]) -> dict[str, str]:
  """Names of a family's tensors, those of a dense MLP apart."""
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

  `num_experts`, `num_chosen` and `expert_dim` are the keys of these numbers,
  `switches` more of `Mixture`.
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
  """Qwen's mixture with a gated expert of every token."""
  return mixture(
    settings, sizes, expert_dim="moe_intermediate_size",
    renormalized=renormalized,
    shared_dim=get(settings, "shared_expert_intermediate_size", int),
    shared_gate=True,
  )  # fmt: skip


# DeepSeek-V3's mixture, which GLM-4.5 has too.
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
# Of layers that draft for the model, which are not read.
DEEPSEEK_HARMLESS = HARMLESS | {"num_nextn_predict_layers", "num_mtp_layers"}


def of_drafting_layers(name: str, config: TransformerConfig) -> bool:
  """Tensors of layers after the last, which draft for the model."""
  kind, layer = [*name.split("."), "", ""][:2]
  is_layer = kind == "layers" and layer.isdecimal()
  return is_layer and int(layer) >= config.num_layers


def of_deepseek(settings: Settings, sizes: Mapping[str, Any]) -> Mixture:
  """DeepSeek-V3's mixture: chosen with a correction, weighted without."""
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
