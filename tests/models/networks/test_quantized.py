"""Quantized weights: values by definition, and the model that they make."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.networks import linear, quantized, stacked
from models.networks.description import llama_config
from models.networks.mixture import Mixture, MixtureMlp
from models.networks.quantized import Quantization
from models.networks.quantized_tensor import DTYPES, is_quantized, quantize
from models.networks.transformer import Transformer, as_language_model

RNG = np.random.default_rng(0)
SMALL = dict(
  vocab_size=61, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=8, mlp_dim=64, max_positions=64,
)  # fmt: skip
TOKENS = RNG.integers(0, 61, (2, 4))
EXPERTS = Mixture(
  num_experts=3, num_chosen=2, embed_dim=32, expert_dim=64, expert_bias=True
)


def by_definition(weight, dtype, group):
  """Dequantized values and their scales, in NumPy."""
  n, d = weight.shape
  most = {"int8": 127, "int4": 7, "fp8": 448, "fp4": 6}[dtype]
  groups = weight.reshape(n, -1, group or d)
  scales = np.abs(groups).max(-1, keepdims=True) / np.float32(most)
  values = groups / np.where(scales == 0, 1, scales)
  if dtype.startswith("fp"):
    values = values.astype(DTYPES[dtype].dtype).astype(np.float32)
  else:
    values = np.round(values)
  return (values * scales).reshape(n, d), scales[..., 0]


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_values_match_dtype_definition(dtype, group):
  weight = RNG.standard_normal((5, 64)).astype(np.float32)
  weight[1] *= 1e-3
  weight[2] = 0
  actual = quantize(weight, dtype, group)
  expected, scales = by_definition(weight, dtype, group)
  assert actual.values.dtype == DTYPES[dtype].dtype
  assert (actual.num_groups, actual.group) == (64 // (group or 64), group or 64)
  np.testing.assert_allclose(actual.scales, scales, rtol=1e-6)
  np.testing.assert_allclose(actual.dequantized(), expected, rtol=1e-6)
  # Experts' lie the other way around.
  turned = quantize(weight.T[None], dtype, group, inputs=-2)
  np.testing.assert_array_equal(turned.values[0].T, actual.values)
  np.testing.assert_array_equal(turned.scales[0].T, actual.scales)
  np.testing.assert_array_equal(turned.dequantized()[0].T, actual.dequantized())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_products_match_dequantized_weights(dtype, monkeypatch):
  monkeypatch.setattr(linear, "_CHUNK", 2 * 576)  # three of two outputs
  weight = RNG.standard_normal((6, 576)).astype(np.float32)
  x = 30 * RNG.standard_normal((3, 576)).astype(np.float32)
  low = quantize(weight, "int8", 32)
  minima = jnp.asarray(RNG.standard_normal((6, 18)), jnp.float32)
  for one in (
    quantize(weight, "fp8"), low, dataclasses.replace(low, minima=minima)
  ):  # fmt: skip
    whole = np.asarray(one.dequantized())
    expected = np.asarray(x, dtype).astype(np.float32) @ whole.T
    close = 9 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
    for multiply, rows in (
      (linear.project, 3), (linear.group_products, 3),
      (linear.chunk_products, 3), (linear.fused_products, 2),
      (linear.fused_products, 1),
    ):  # fmt: skip
      actual = multiply(jnp.asarray(x[:rows], dtype), one)
      assert actual.dtype == dtype
      np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected[:rows], rtol=0, atol=close
      )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_grouped_weights_are_rounded_once(dtype):
  weight = 1e-4 * RNG.standard_normal((3, 64)).astype(np.float32)
  one = quantize(weight, "int8", 32)
  expected = one.dequantized().T.astype(dtype)
  for multiply in (linear.project, linear.group_products):
    actual = multiply(jnp.eye(64, dtype=dtype), one)
    np.testing.assert_array_equal(actual, expected)
    assert multiply(jnp.zeros((2, 0, 64), dtype), one).shape == (2, 0, 3)


@pytest.mark.parametrize("rows", [100, 256, 257])
def test_products_of_prompts_match_with_avx512(rows, monkeypatch):
  monkeypatch.setattr(linear, "_has_avx512", lambda: True)
  monkeypatch.setattr(linear, "_CHUNK", 0)
  x, weight = RNG.standard_normal((rows, 24)), RNG.standard_normal((7, 24))
  actual = linear.project(*(jnp.asarray(a, jnp.float32) for a in (x, weight)))
  np.testing.assert_allclose(actual, x @ weight.T, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_cpu_loop_never_holds_a_dequantized_weight(rows, monkeypatch):
  monkeypatch.setattr(linear, "_CHUNK", 2**14)
  one = quantize(jnp.ones((512, 512), jnp.float32), "int8", 32)

  @jax.jit
  def loop(x, one):
    return jax.lax.fori_loop(0, 9, lambda _, x: linear.project(x, one), x)

  program = loop.lower(jnp.ones((rows, 512)), one).compile()
  assert program.memory_analysis().temp_size_in_bytes < 512**2


@nnx.jit(static_argnums=0)
def new(config):
  """A module of random weights, in one program."""
  return Transformer(config, rngs=nnx.Rngs(0))


def copy_of(module, how):
  copy = nnx.merge(*nnx.split(module))
  quantized.quantize_module(copy, how)
  return copy


def dequantized(module):
  """A copy with the weights that quantized ones stand for."""
  graphdef, state = nnx.split(module)
  whole = lambda x: x.dequantized() if is_quantized(x) else x
  return nnx.merge(graphdef, jax.tree.map(whole, state, is_leaf=is_quantized))


def tree_logits(model):
  """`f32[2, 4, V]` of a tree's nodes behind texts of two and three tokens."""
  mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]) == 1

  def both(params, tokens):
    _, cache = model.apply(params, tokens, model.init_cache(2, 12))
    cache = cache.replace(length=jnp.array([2, 3]))
    places = cache.length[:, None] + np.array([0, 1, 1, 2])
    output, _ = model.apply(params, tokens, cache, positions=places, mask=mask)
    return output.logits

  return jax.jit(both)


@pytest.mark.parametrize("dtype, group", [("int8", None), ("int4", 32)])
def test_tree_pass_matches_dequantized_model_along_paths(dtype, group):
  config = llama_config(**SMALL, tied_embeddings=group is None)
  low = copy_of(new(config), Quantization(dtype=dtype, group=group))
  model, params = as_language_model(low)
  actual = tree_logits(model)(params, TOKENS)
  rows = np.zeros((2, 3, 6), int)  # the paths to nodes 2, 3 and, of 3, to 1
  last = np.array([[3, 4, 3], [4, 5, 4]])
  for row, length in enumerate((2, 3)):
    for i, path in enumerate(((0, 2), (0, 1, 3), (0, 1))):
      text = [*TOKENS[row, :length], *TOKENS[row, list(path)]]
      rows[row, i, : len(text)] = text
  graphdef, state = nnx.split(dequantized(low))
  forward = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x)[0].logits)
  whole = np.asarray(forward(state, rows.reshape(6, 6))).reshape(2, 3, 6, -1)
  expected = np.take_along_axis(whole, last[..., None, None], axis=2)[:, :, 0]
  close = dict(rtol=0, atol=2e-5 * np.abs(expected).max())
  np.testing.assert_allclose(actual[:, [2, 3, 1]], expected, **close)


def test_stacked_quantization_matches_and_rows_are_independent():
  how = Quantization(dtype="int8", embedding=True)
  module = new(llama_config(**SMALL))
  low = copy_of(module, how)
  params = stacked.quantize(stacked.stack(module), module.config, how)
  shapes = stacked.abstract_params(
    module.config, dtype=jnp.float32, weights=how
  )
  form = lambda x: (x.shape, x.dtype)
  assert jax.tree.map(form, params) == jax.tree.map(form, shapes)
  forward = tree_logits(stacked.as_language_model(module.config, weights=how))
  actual = forward(params, TOKENS)
  model, plain = as_language_model(low)
  expected = tree_logits(model)(plain, TOKENS)
  atol = 2e-5 * np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)
  other = forward(params, np.stack([TOKENS[0], 60 - TOKENS[1]]))
  np.testing.assert_array_equal(other[0], actual[0])
  assert not np.array_equal(other[1], actual[1])


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4", "fp4"])
def test_quantized_experts_match_dequantized_ones(dtype):
  how = Quantization(dtype=dtype, group=32 if "4" in dtype else None)
  block = MixtureMlp(EXPERTS, jnp.float32, rngs=nnx.Rngs(0))
  block.experts.form = "pairs" if dtype in ("int8", "fp4") else "ragged"
  for name in ("gate_bias", "up_bias", "down_bias"):
    bias = getattr(block.experts, name)
    bias[...] = jnp.asarray(RNG.standard_normal(bias.shape), jnp.float32)
  low = copy_of(block, how)
  whole = dequantized(low)
  for name in quantized.EXPERTS:
    one = lambda w: quantize(w.T, dtype, how.group).dequantized().T
    each = [*map(one, getattr(block.experts, name)[...])]
    np.testing.assert_array_equal(getattr(whole.experts, name)[...], each)
  x = jnp.asarray(RNG.standard_normal((2, 3, 32)), jnp.float32)
  run = jax.jit(lambda g, state: nnx.merge(g, state)(x), static_argnums=0)
  actual, expected = (run(*nnx.split(module)) for module in (low, whole))
  atol = 1e-5 * np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_unsupported_quantization_is_rejected():
  with pytest.raises(ValueError, match="groups of 64 do not divide the 32 in"):
    quantize(jnp.ones((2, 32)), "int4", 64)
  for wrong, got in (("int2", None), "'int2'"), (("int8", 7), "7"):
    with pytest.raises(ValueError, match=f"got {got}"):
      Quantization(dtype=wrong[0], group=wrong[1])
  tied = llama_config(**SMALL, tied_embeddings=True)
  how = Quantization(dtype="int8", embedding=True)
  with pytest.raises(ValueError, match="embedding not tied"):
    quantized.check_weights(tied, how, on_mesh=False)
  for dtype in ("int8", "fp8"):
    with pytest.raises(ValueError, match=f"of int8.* fewer bits, got {dtype}"):
      quantized.for_copy(Quantization(dtype=dtype), how)


def test_lower_bit_copy_requantizes_quantized_weights():
  kept = Quantization(dtype="int8", embedding=True)
  how = quantized.for_copy(Quantization(dtype="int4", group=32), kept)
  assert how == Quantization(dtype="int4", group=32, embedding=True)
  module = copy_of(new(llama_config(**SMALL)), kept)
  stack = stacked.stack(module)
  low = copy_of(module, how)  # as a head's shared table, it stays
  jax.tree.map(np.testing.assert_array_equal, *map(nnx.state, (low, module)))
  quantized.quantize_module(low, how, again=True)
  dtypes = {str(x.dtype) for x in jax.tree.leaves(nnx.state(low))}
  assert dtypes == {"int4", "float32"}
  was, now = (x.layers[1].mlp.up.weight[...] for x in (module, low))
  expected = quantize(was.dequantized(), "int4", 32)
  jax.tree.map(np.testing.assert_array_equal, now, expected)
  assert low.final_norm.scale[...] is module.final_norm.scale[...]
  actual = stacked.quantize(stack, module.config, how)
  jax.tree.map(np.testing.assert_array_equal, actual, stacked.stack(low))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_integer_products_meet_their_error_bound(dtype):
  rng = np.random.default_rng(0)
  weight = rng.standard_normal((7, 96)).astype(np.float32)
  one = quantize(weight, "int8")
  x = 30 * rng.standard_normal((2, 3, 96)).astype(np.float32)
  x[0, 1] = 0
  x[1, 2, 5] = 3000  # what is beside it has less
  x = jnp.asarray(x, dtype)
  actual = jax.jit(linear.integer_products)(x, one)
  assert actual.dtype == dtype
  x, whole = (np.asarray(a, np.float64) for a in (x, one.dequantized()))
  step = np.abs(x).max(-1, keepdims=True) / (127 * 254)
  expected = x @ whole.T
  most = step / 2 * np.abs(whole).sum(-1)
  most += 4 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
  assert np.all(np.abs(np.asarray(actual, np.float64) - expected) <= most)
  np.testing.assert_array_equal(actual[0, 1], 0)


@pytest.mark.parametrize("avx512", [False, True])
def test_nonfinite_row_breaks_only_its_own_products(avx512, monkeypatch):
  monkeypatch.setattr(linear, "_has_avx512", lambda: avx512)
  one = quantize(jnp.ones((7, 256)), "int8")
  x = np.ones((4, 256), np.float32)
  x[1, 3], x[2, 3] = np.nan, np.inf
  project = jax.jit(lambda *given: linear.project(*given))  # traced anew
  pairs = jnp.concatenate([project(x[:2], one), project(x[2:], one)])
  for actual in (project(x, one), pairs):
    assert not np.isfinite(actual[1:3]).any()
    np.testing.assert_allclose(actual[::3], 256, rtol=1e-5)


@pytest.mark.parametrize("avx512", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("group", [None, 32])
def test_few_rows_use_integers_or_a_call_of_their_own(
  rows, group, avx512, monkeypatch
):
  monkeypatch.setattr(linear, "_has_avx512", lambda: avx512)
  one = quantize(jnp.ones((8, 256), jnp.float32), "int8", group)
  project = jax.jit(lambda *given: linear.project(*given))  # traced anew
  program = project.lower(jnp.ones((rows, 256)), one).compile()
  assert (" call(" in program.as_text()) == (group is not None or not avx512)
