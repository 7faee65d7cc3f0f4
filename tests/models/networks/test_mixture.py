"""Mixtures of experts beside transformers' modules, and rows by themselves."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import several
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

from models.networks import expert_forms
from models.networks.mixture import (
  Mixture,
  MixtureMlp,
  cut_by,
)

E, K, D, WIDTH = 8, 3, 12, 10
SIZES = dict(num_experts=E, num_chosen=K, embed_dim=D, expert_dim=WIDTH)
HF = dict(
  hidden_size=D, num_experts_per_tok=K, num_hidden_layers=1,
  num_attention_heads=2, vocab_size=8,
)  # fmt: skip


def _qwen(module, name, **more):
  config = getattr(transformers, f"{name}Config")(
    **HF, moe_intermediate_size=WIDTH, num_experts=E, **more
  )
  return getattr(module, f"{name}SparseMoeBlock")(config)


def _grouped(module, name):
  config = getattr(transformers, f"{name}Config")(
    **HF, moe_intermediate_size=WIDTH, n_routed_experts=E, n_shared_experts=2,
    n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
  )  # fmt: skip
  return getattr(module, f"{name}MoE")(config)


class Gemma4(torch.nn.Module):
  """Router and experts as Gemma 4's layer calls them, on one input."""

  def __init__(self):
    super().__init__()
    config = transformers.Gemma4TextConfig(
      **{k: v for k, v in HF.items() if k != "num_experts_per_tok"},
      num_experts=E, top_k_experts=K, moe_intermediate_size=WIDTH,
      enable_moe_block=True, rms_norm_eps=1e-3,
    )  # fmt: skip
    self.gate = gemma4.Gemma4TextRouter(config)
    self.experts = gemma4.Gemma4TextExperts(config)

  def forward(self, x):
    flat = x.reshape(-1, D)
    _, weights, chosen = self.gate(flat)
    return self.experts(flat, chosen, weights).reshape(x.shape)


GROUPED = dict(
  router="sigmoid",
  num_groups=4,
  num_groups_kept=2,
  scale=2.5,
  shared_dim=2 * WIDTH,
)
FAMILIES = {
  "mixtral": (
    lambda: mixtral.MixtralSparseMoeBlock(
      transformers.MixtralConfig(
        **HF, num_local_experts=E, intermediate_size=WIDTH
      )
    ),
    dict(),
  ),
  "qwen2": (
    lambda: _qwen(qwen2, "Qwen2Moe", shared_expert_intermediate_size=7),
    dict(renormalized=False, shared_dim=7, shared_gate=True),
  ),
  "qwen3": (lambda: _qwen(qwen3, "Qwen3Moe", norm_topk_prob=True), dict()),
  "qwen3-not": (
    lambda: _qwen(qwen3, "Qwen3Moe", norm_topk_prob=False),
    dict(renormalized=False),
  ),
  "olmoe": (
    lambda: olmoe.OlmoeSparseMoeBlock(
      transformers.OlmoeConfig(**HF, num_experts=E, intermediate_size=WIDTH)
    ),
    dict(renormalized=False),
  ),
  "gpt-oss": (
    lambda: gpt_oss.GptOssMLP(
      transformers.GptOssConfig(
        **HF, num_local_experts=E, intermediate_size=WIDTH
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
  """The weights of transformers' module by our names."""
  w = {k: v.detach().numpy() for k, v in module.state_dict().items()}
  gate_up = w["experts.gate_up_proj"]
  if family == "gpt-oss":
    split = lambda x: (x[..., ::2], x[..., 1::2])
    gate, up = split(gate_up)
    biases = split(w["experts.gate_up_proj_bias"])
    ours = {
      "experts.down": w["experts.down_proj"],
      "experts.gate_bias": biases[0],
      "experts.up_bias": biases[1],
      "experts.down_bias": w["experts.down_proj_bias"],
      "router.weight": w["router.weight"],
      "router.bias": w["router.bias"],
    }
  else:
    turned = lambda x: x.swapaxes(1, 2)
    gate, up = map(turned, np.split(gate_up, 2, axis=1))
    ours = {"experts.down": turned(w["experts.down_proj"])}
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
  module = MixtureMlp(mixture, dtype, rngs=nnx.Rngs(0))
  module.experts.form = form
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


def error(actual, expected) -> float:
  return np.abs(actual - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_is_transformers_in_float64(family):
  """Its routers are in float32 whatever the weights: hence 1e-6."""
  weights, mixture, x, expected = pair(family)
  with jax.enable_x64(True):
    outs = [
      run(ours(weights, mixture, jnp.float64, form), x)
      for form in expert_forms.FORMS
    ]
  for out in outs:
    assert error(out, expected) < 1e-6
    assert error(out, outs[0]) < 1e-13
  assert error(run(ours(weights, mixture, jnp.float32), x.astype(np.float32)),
               expected) < 1e-5  # fmt: skip


def _before(weights, mixture):
  """A router that chooses before its bias is added."""
  key = "router.correction" if mixture.router == "sigmoid" else "router.bias"
  return weights | {key: 0 * weights[key]}, mixture


def _exchanged(weights, mixture):
  up, gate = weights["experts.gate"], weights["experts.up"]
  return weights | {"experts.gate": gate, "experts.up": up}, mixture


def _replaced(**switches):
  return lambda w, mixture: (w, dataclasses.replace(mixture, **switches))


@pytest.mark.parametrize(
  ("family", "wrong"),
  [
    ("gpt-oss", _before),
    ("glm4", _before),
    ("mixtral", _exchanged),
    ("gpt-oss", _exchanged),
    ("qwen3", _replaced(renormalized=False)),
    ("olmoe", _replaced(renormalized=True)),
    ("gpt-oss", _replaced(limit=None)),
    ("deepseek", _replaced(num_groups=1, num_groups_kept=1)),
    ("deepseek", _replaced(scale=1.0)),
    ("mixtral", _replaced(num_chosen=K - 1)),
  ],
)
def test_a_switch_read_wrongly_is_seen(family, wrong):
  weights, mixture, x, expected = pair(family)
  out = run(ours(*wrong(weights, mixture), jnp.float32), x.astype(np.float32))
  assert error(out, expected) > 0.03


@functools.cache
def wide(form, dtype, family="qwen2"):
  """A module of usual shapes, as far as a test may have them."""
  switches = FAMILIES[family][1]
  mixture = Mixture(
    **dict(
      switches, num_experts=16, num_chosen=4, embed_dim=256, expert_dim=96,
      shared_dim=64 if switches.get("shared_dim") else 0,
    )
  )  # fmt: skip
  module = MixtureMlp(mixture, dtype, rngs=nnx.Rngs(3))
  module.experts.form = form
  return module


def same_bits(a, b):
  return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", expert_forms.FORMS)
def test_no_bit_of_a_row_depends_on_its_neighbors(form, dtype):
  """Other rows' tokens change, and with them every expert's share; also NaN."""
  module = wide(form, dtype)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, 5, 256)).astype(dtype)
  alone = run(module, x)
  for case in range(4):
    others = rng.normal(size=x.shape).astype(dtype)
    if case == 1:
      others[:] = x[2, :1]  # all tokens want the same experts
    if case == 2:
      others[:] = np.nan
    place = case  # and the row may stand anywhere
    others[place] = x[2]
    assert same_bits(run(module, others)[place], alone[2])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_experts_one_by_one_give_a_token_the_same_bits_in_any_pass(dtype):
  """In passes of 1, 3 and 20 tokens, given what the router says."""
  module = wide("pairs", dtype, "mixtral")
  rng = np.random.default_rng(0)
  x = rng.normal(size=(20, 256)).astype(dtype)
  chosen, weights = module.router(jnp.asarray(x))
  whole = np.asarray(_experts(module, x, chosen, weights))
  for part in (slice(7, 8), slice(0, 3)):
    of_tokens = _experts(module, x[part], chosen[part], weights[part])
    assert same_bits(np.asarray(of_tokens), whole[part])


def _experts(module, x, chosen, weights):
  graph, state = nnx.split(module.experts)
  return jax.jit(lambda state, *given: nnx.merge(graph, state)(*given))(
    state, jnp.asarray(x), chosen, weights
  )


def test_the_forms_have_the_same_gradients():
  weights, mixture, x, _ = pair("qwen2")
  results = []
  for form in expert_forms.FORMS:
    graph, state = nnx.split(ours(weights, mixture, jnp.float32, form))
    loss = lambda state, x, graph=graph: jnp.sum(
      nnx.merge(graph, state)(x) ** 2
    )
    grads = jax.jit(jax.grad(loss, (0, 1)))(state, jnp.asarray(x, jnp.float32))
    results.append(jax.tree.leaves(grads))
  for other in results[1:]:
    for a, b in zip(results[0], other, strict=True):
      assert error(np.asarray(b), np.asarray(a)) < 1e-4


@pytest.mark.parametrize("form", expert_forms.FORMS)
def test_experts_of_all_layers_are_used_where_they_lie(form):
  """As a scan over layers has them, which would copy what it slices out."""
  weights, mixture, x, expected = pair("gpt-oss")
  module = ours(weights, mixture, jnp.float32, form)
  for path, value in nnx.to_flat_state(nnx.state(module.experts)):
    every = jnp.stack([2 * value[...], value[...], -value[...]])
    nnx.update(
      module.experts, nnx.from_flat_state([(path, value.replace(every))])
    )
  graph, state = nnx.split(module)
  run = jax.jit(lambda state, x, layer: nnx.merge(graph, state)(x, layer=layer))
  x = jnp.asarray(x, jnp.float32)
  wrong = [error(np.asarray(run(state, x, i)), expected) for i in range(3)]
  assert wrong[1] < 1e-5 < 0.03 < min(wrong[0], wrong[2])


def test_another_input_may_be_what_the_router_reads():
  weights, mixture, x, _ = pair("gemma4")
  module = ours(weights, mixture, jnp.float32)
  x = jnp.asarray(x, jnp.float32)
  other = jnp.flip(x, 0)
  chosen, weights = module.router(other.reshape(-1, D))
  expected = module.experts(x.reshape(-1, D), chosen, weights)
  actual = module(x, routed_by=other)
  np.testing.assert_array_equal(actual.reshape(-1, D), expected)
  assert error(np.asarray(module(x)), np.asarray(actual)) > 0.1


_EIGHT_DEVICES = """
  import json
  import jax, jax.numpy as jnp, numpy as np
  from flax import nnx
  from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
  from models.networks.mixture import Mixture, MixtureMlp, partition_specs

  jax.config.update("jax_num_cpu_devices", 8)
  jax.config.update("jax_enable_x64", True)
  mixture = Mixture(
    num_experts=8, num_chosen=3, embed_dim=16, expert_dim=12, shared_dim=8,
    router_bias=True, expert_bias=True, limit=7.0)
  mesh = jax.make_mesh((2, 4), ("data", "model"),
                       axis_types=(AxisType.Auto,) * 2)
  x = jax.random.normal(jax.random.key(0), (4, 5, 16), jnp.float64)
  found = {}
  for form, by in (("ragged", "width"), ("ragged", "expert"),
                   ("pairs", "expert")):
    whole, cut = (
      MixtureMlp(mixture, jnp.float64, axes=axes, rngs=nnx.Rngs(1))
      for axes in ((), ("model",) if by == "expert" else ()))
    whole.experts.form = cut.experts.form = form
    specs, leaves, parts = partition_specs(by), [], []
    for path, value in nnx.to_flat_state(nnx.state(whole)):
      real = np.random.default_rng(len(parts)).normal(size=value.shape)
      spec = NamedSharding(mesh, specs.get(".".join(path), P()))
      leaves.append((path, value.replace(jnp.asarray(real))))
      parts.append((path, value.replace(jax.device_put(real, spec))))
    lying = [
      value[...].size // value[...].addressable_shards[0].data.size
      for _, value in parts]
    one = lambda graph: lambda state, x: nnx.merge(graph, state)(x)
    rows = jax.shard_map(
      one(nnx.graphdef(cut)), mesh=mesh, in_specs=(P(), P("data")),
      out_specs=P("data"), axis_names={"data"}, check_vma=False)
    state = nnx.from_flat_state(parts)
    with jax.set_mesh(mesh):
      compiled = jax.jit(rows).lower(state, x).compile()
      out = compiled(state, x)
    expected = jax.jit(one(nnx.graphdef(whole)))(nnx.from_flat_state(leaves), x)
    found[form + " " + by] = [
      float(abs(out - expected).max() / abs(expected).max()),
      lying.count(4), " all-gather(" in compiled.as_text()]
  print(json.dumps(found))
"""


def test_experts_cut_over_devices_are_the_whole_ones():
  """By width and by expert, rows over 'data' mapped as the loop maps them."""
  outcomes = json.loads(several.printed(_EIGHT_DEVICES))
  for how, (wrong, cut, gathers) in outcomes.items():
    assert wrong < 1e-13, how
    assert cut == (8 if "width" in how else 9), how  # arrays that lie in four
    assert not gathers, how


def test_how_experts_are_cut():
  of = lambda count, width: dataclasses.replace(
    Mixture(**SIZES), num_experts=count, num_chosen=1, expert_dim=width
  )
  actual = {
    name: [cut_by(of(*sizes), devices) for devices in (1, 2, 8)]
    for name, sizes in {
      "Qwen3-30B-A3B": (128, 768), "Mixtral": (8, 14336), "gpt-oss": (32, 2880),
      "odd": (9, 24),
    }.items()
  }  # fmt: skip
  assert actual == {
    "Qwen3-30B-A3B": ["width", "width", "expert"],
    "Mixtral": ["width", "width", "width"],
    "gpt-oss": ["width", "expert", "expert"],
    "odd": ["width", "width", "width"],
  }
  with pytest.raises(ValueError, match="cannot be cut over 8 devices"):
    cut_by(of(9, 20), 8)


@pytest.mark.parametrize(("switches", "most"), [({}, 8), (GROUPED, 4)])
def test_more_experts_than_can_be_chosen_are_refused(switches, most):
  with pytest.raises(ValueError, match=f"num_chosen must be in 1..{most}"):
    Mixture(**{**SIZES, **switches, "num_chosen": most + 1})
