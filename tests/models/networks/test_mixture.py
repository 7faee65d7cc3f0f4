"""Mixtures of experts beside a slow forward, and rows by themselves."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import several
from flax import nnx

from models.networks import expert_forms
from models.networks.mixture import Mixture, MixtureMlp, cut_by

E, D = 8, 12
SIZES = dict(num_experts=E, num_chosen=3, embed_dim=D, expert_dim=10)
FAMILIES = {
  "mixtral": dict(),
  "qwen2": dict(renormalized=False, shared_dim=7, shared_gate=True),
  "gpt-oss": dict(router_bias=True, expert_bias=True, limit=0.7),
  "deepseek": dict(
    router="sigmoid", num_groups=4, num_groups_kept=2, scale=2.5, shared_dim=20
  ),
  "gemma4": dict(router_norm_eps=1e-3, activation="gelu_tanh"),
}  # fmt: skip
X = np.random.default_rng(1).normal(size=(3, 7, D))


def made(family, dtype, form=None, sizes=SIZES):
  """A module whose numbers are all random, and matter."""
  module = MixtureMlp(
    Mixture(**FAMILIES[family] | sizes), dtype, rngs=nnx.Rngs(0)
  )
  module.experts.form = form
  rng = np.random.default_rng(2)
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
  nnx.update(module, jax.tree.map(draw, nnx.state(module)))
  return module


def slowly(module, x):
  """Token by token and expert by expert, `f64[N, D] -> f64[N, D]`."""
  m, out = module.mixture, np.zeros_like(x)
  w = {
    ".".join(path): np.asarray(value[...], np.float64)
    for path, value in nnx.to_flat_state(nnx.state(module))
  }
  sigmoid = lambda x: 1 / (1 + np.exp(-x))
  none, group = np.zeros(E), np.arange(E) * m.num_groups // E

  def inner(gate, up):
    if m.limit is not None:
      gate, up = np.minimum(gate, m.limit), np.clip(up, -m.limit, m.limit)
      return gate * sigmoid(m.slope * gate) * (up + 1)
    if m.activation == "silu":
      return gate * sigmoid(gate) * up
    bent = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return gate * (1 + np.tanh(bent)) / 2 * up

  for token, sums in zip(x, out, strict=True):
    read = token
    if m.router_norm_eps is not None:
      read = token / np.sqrt((token**2).mean() + m.router_norm_eps)
      read = read * w["router.scale"] / np.sqrt(D)
    logits = w["router.weight"] @ read + w.get("router.bias", none)
    scores = sigmoid(logits) if m.router == "sigmoid" else np.exp(logits)
    by = scores + w.get("router.correction", none)
    worth = [np.sort(by[group == g])[-2:].sum() for g in range(m.num_groups)]
    kept = np.argsort(worth)[-m.num_groups_kept :]
    chosen = [e for e in np.argsort(-by) if group[e] in kept][: m.num_chosen]
    total = scores[chosen if m.renormalized else slice(None)].sum()
    for e in chosen:
      project = lambda name, x, e=e: (
        x @ w[f"experts.{name}"][e] + w.get(f"experts.{name}_bias", none)[e]
      )
      hidden = inner(project("gate", token), project("up", token))
      weight = m.scale * scores[e] / total
      weight *= w.get("router.expert_scale", none + 1)[e]
      sums += weight * project("down", hidden)
    if m.shared_dim:
      hidden = inner(w["shared.gate"] @ token, w["shared.up"] @ token)
      weight = sigmoid(w["shared.weigh"] @ token) if m.shared_gate else 1
      sums += weight * (w["shared.down"] @ hidden)
  return out


@jax.jit(static_argnums=0)
def _run(graph, state, x):
  return nnx.merge(graph, state)(x)


def run(module, x):
  return np.asarray(_run(*nnx.split(module), jnp.asarray(x)))


def error(actual, expected) -> float:
  return np.abs(actual - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_form_matches_naive_reference(family):
  with jax.enable_x64(True):
    modules = [made(family, jnp.float64, form) for form in expert_forms.FORMS]
    expected = slowly(modules[0], X.reshape(-1, D)).reshape(X.shape)
    for module in modules:
      assert error(run(module, X), expected) < 1e-12
  actual = run(made(family, jnp.float32), X.astype(np.float32))
  assert error(actual, expected) < 1e-4


# Usual shapes, as far as a test may have them.
WIDE = dict(
  num_experts=16, num_chosen=4, embed_dim=256, expert_dim=96, shared_dim=64
)


def same_bits(a, b):
  return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", expert_forms.FORMS)
def test_rows_are_bitwise_independent_of_their_neighbors(form, dtype):
  """Other rows' tokens change, and with them every expert's share; also NaN."""
  module = made("qwen2", dtype, form, WIDE)
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
def test_pairs_form_is_bitwise_independent_of_pass_size(dtype):
  """In passes of 1, 3 and 20 tokens, given what the router says."""
  module = made("mixtral", dtype, "pairs", WIDE)
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


def test_expert_forms_have_equal_gradients():
  results = []
  for form in expert_forms.FORMS:
    graph, state = nnx.split(made("qwen2", jnp.float32, form))
    loss = lambda state, x, graph=graph: jnp.sum(
      nnx.merge(graph, state)(x) ** 2
    )
    grads = jax.jit(jax.grad(loss, (0, 1)))(state, jnp.asarray(X, jnp.float32))
    results.append(jax.tree.leaves(grads))
  for other in results[1:]:
    for a, b in zip(results[0], other, strict=True):
      assert error(np.asarray(b), np.asarray(a)) < 1e-4


@pytest.mark.parametrize("form", expert_forms.FORMS)
def test_stacked_experts_are_indexed_by_layer(form):
  """As a scan over layers has them, which would copy what it slices out."""
  module, x = made("gpt-oss", jnp.float32, form), jnp.asarray(X, jnp.float32)
  expected = run(module, x)
  for path, value in nnx.to_flat_state(nnx.state(module.experts)):
    every = jnp.stack([2 * value[...], value[...], -value[...]])
    nnx.update(
      module.experts, nnx.from_flat_state([(path, value.replace(every))])
    )
  graph, state = nnx.split(module)
  of_layer = jax.jit(lambda state, i: nnx.merge(graph, state)(x, layer=i))
  wrong = [error(np.asarray(of_layer(state, i)), expected) for i in range(3)]
  assert wrong[1] < 1e-5 < 0.03 < min(wrong[0], wrong[2])


def test_router_can_read_a_separate_input():
  module, x = made("gemma4", jnp.float32), jnp.asarray(X, jnp.float32)
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


def test_sharded_experts_match_unsharded_ones():
  """By width and by expert, rows over 'data' mapped as the loop maps them."""
  outcomes = json.loads(several.printed(_EIGHT_DEVICES))
  for how, (wrong, cut, gathers) in outcomes.items():
    assert wrong < 1e-13, how
    assert cut == (8 if "width" in how else 9), how  # arrays that lie in four
    assert not gathers, how


def test_cut_by_chooses_the_expert_sharding_axis():
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
