"""Mixtures of experts beside transformers' modules, and rows by themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.glm4_moe import modeling_glm4_moe as glm4
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

from models.networks import mixture as mixture_lib
from models.networks.mixture import Mixture, MixtureMlp

pytestmark = pytest.mark.usefixtures("quick_to_compile")

E, K, D, I = 8, 3, 12, 10
SIZES = dict(num_experts=E, num_chosen=K, embed_dim=D, expert_dim=I)
HF = dict(
  hidden_size=D, num_experts_per_tok=K, num_hidden_layers=1,
  num_attention_heads=2, vocab_size=8,
)  # fmt: skip


def _qwen(module, name, **more):
  config = getattr(transformers, f"{name}Config")(
    **HF, moe_intermediate_size=I, num_experts=E, **more
  )
  return getattr(module, f"{name}SparseMoeBlock")(config)


def _grouped(module, name):
  config = getattr(transformers, f"{name}Config")(
    **HF, moe_intermediate_size=I, n_routed_experts=E, n_shared_experts=2,
    n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
  )  # fmt: skip
  return getattr(module, f"{name}MoE")(config)


class Gemma4(torch.nn.Module):
  """Router and experts as Gemma 4's layer calls them, on one input."""

  def __init__(self):
    super().__init__()
    config = transformers.Gemma4TextConfig(
      **{k: v for k, v in HF.items() if k != "num_experts_per_tok"},
      num_experts=E, top_k_experts=K, moe_intermediate_size=I,
      enable_moe_block=True, rms_norm_eps=1e-3,
    )  # fmt: skip
    self.gate = gemma4.Gemma4TextRouter(config)
    self.experts = gemma4.Gemma4TextExperts(config)

  def forward(self, x):
    flat = x.reshape(-1, D)
    _, weights, chosen = self.gate(flat)
    return self.experts(flat, chosen, weights).reshape(x.shape)


GROUPED = dict(
  router="sigmoid", num_groups=4, num_groups_kept=2, scale=2.5, shared_dim=2 * I
)
FAMILIES = {
  "mixtral": (
    lambda: mixtral.MixtralSparseMoeBlock(
      transformers.MixtralConfig(
        **HF, num_local_experts=E, intermediate_size=I
      )
    ),
    dict(),
  ),
  "qwen2": (
    lambda: _qwen(qwen2, "Qwen2Moe", shared_expert_intermediate_size=7),
    dict(renormalised=False, shared_dim=7, shared_gate=True),
  ),
  "qwen3": (lambda: _qwen(qwen3, "Qwen3Moe", norm_topk_prob=True), dict()),
  "qwen3-not": (
    lambda: _qwen(qwen3, "Qwen3Moe", norm_topk_prob=False),
    dict(renormalised=False),
  ),
  "olmoe": (
    lambda: olmoe.OlmoeSparseMoeBlock(
      transformers.OlmoeConfig(**HF, num_experts=E, intermediate_size=I)
    ),
    dict(renormalised=False),
  ),
  "gpt-oss": (
    lambda: gpt_oss.GptOssMLP(
      transformers.GptOssConfig(
        **HF, num_local_experts=E, intermediate_size=I
      )
    ),
    dict(router_bias=True, expert_bias=True, limit=7.0),
  ),
  "glm4": (lambda: _grouped(glm4, "Glm4Moe"), GROUPED),
  "deepseek": (lambda: _grouped(deepseek, "DeepseekV3"), GROUPED),
  "gemma4": (
    Gemma4, dict(router_norm_eps=1e-3, activation="gelu_tanh"),
  ),
}  # fmt: skip


def random_weights(module) -> None:
  """All weights random, large enough that every switch shows."""
  torch.manual_seed(0)
  module.double().eval()
  for name, value in [*module.named_parameters(), *module.named_buffers()]:
    size = 3.0 if "gate_up" in name else 0.7
    value.data.copy_(size * torch.randn(value.shape, dtype=torch.float64))


def theirs(module, family: str) -> dict[str, np.ndarray]:
  """transformers' weights by our names."""
  w = {k: v.detach().numpy() for k, v in module.state_dict().items()}
  gate_up = w["experts.gate_up_proj"]
  if family == "gpt-oss":
    split = lambda x: (x[..., ::2], x[..., 1::2])
    turned = lambda x: x.swapaxes(1, 2)
    gate, up = map(turned, split(gate_up))
    biases = split(w["experts.gate_up_proj_bias"])
    ours = {
      "experts.down": turned(w["experts.down_proj"]),
      "experts.gate_bias": biases[0],
      "experts.up_bias": biases[1],
      "experts.down_bias": w["experts.down_proj_bias"],
      "router.weight": w["router.weight"],
      "router.bias": w["router.bias"],
    }
  else:
    gate, up = np.split(gate_up, 2, axis=1)
    ours = {"experts.down": w["experts.down_proj"]}
    names = {
      "gate.weight": "router.weight",
      "gate.proj.weight": "router.weight",
      "gate.e_score_correction_bias": "router.correction",
      "gate.scale": "router.scale",
      "gate.per_expert_scale": "router.expert_scale",
      "shared_expert_gate.weight": "shared.weigh",
    }
    for part in ("gate", "up", "down"):
      for shared in ("shared_expert", "shared_experts"):
        names[f"{shared}.{part}_proj.weight"] = f"shared.{part}"
    ours |= {names[key]: w[key] for key in names if key in w}
  return ours | {"experts.gate": gate, "experts.up": up}


def ours(weights, mixture, dtype, form=None) -> MixtureMlp:
  module = MixtureMlp(mixture, dtype, form=form, rngs=nnx.Rngs(0))
  wanted = dict(nnx.to_flat_state(nnx.state(module)))
  assert {".".join(path) for path in wanted} == {*weights}
  for path, value in wanted.items():
    assert value[...].shape == weights[".".join(path)].shape
  state = [
    (path, value.replace(jnp.asarray(weights[".".join(path)], dtype)))
    for path, value in wanted.items()
  ]
  nnx.update(module, nnx.from_flat_state(state))
  return module


@functools.cache
def pair(family: str):
  """Weights, what goes in, and what transformers makes of it in float64."""
  make, switches = FAMILIES[family]
  module = make()
  random_weights(module)
  x = np.random.default_rng(1).normal(size=(3, 7, D))
  with torch.no_grad():
    y = module(torch.tensor(x))
  y = y[0] if isinstance(y, tuple) else y
  return theirs(module, family), Mixture(**SIZES, **switches), x, y.numpy()


@functools.partial(jax.jit, static_argnames="graph")
def _run(graph, state, x):
  return nnx.merge(graph, state)(x)


def run(module, x):
  return np.asarray(_run(*nnx.split(module), jnp.asarray(x)))


def error(found, expected) -> float:
  return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_is_transformers_in_float64(family):
  """Its routers are in float32 whatever the weights: hence 1e-6."""
  weights, mixture, x, expected = pair(family)
  with jax.enable_x64(True):
    outs = [
      run(ours(weights, mixture, jnp.float64, form), x)
      for form in mixture_lib.FORMS
    ]
  for out in outs:
    assert error(out, expected) < 1e-6
    assert error(out, outs[0]) < 1e-13
  assert error(run(ours(weights, mixture, jnp.float32), x.astype(np.float32)),
               expected) < 1e-5  # fmt: skip
