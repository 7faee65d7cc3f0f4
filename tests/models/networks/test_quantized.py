"""Weights in few bits: values by definition, and the model that they make."""

import functools

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from models import sharding
from models.networks import expert_forms, linear, quantized, stacked
from models.networks.description import llama_config
from models.networks.mixture import Mixture, MixtureMlp
from models.networks.quantized import Quantization
from models.networks.transformer import Transformer, as_language_model

jit = functools.partial(jax.jit, compiler_options=compiling.OPTIONS)
RNG = np.random.default_rng(0)
SMALL = dict(
  vocab_size=61, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=8, mlp_dim=64, max_positions=64,
)  # fmt: skip
TOKENS = RNG.integers(0, 61, (2, 4))


def by_definition(weight, form):
  """Dequantised values and their type's, in NumPy."""
  n, d = weight.shape
  most = {"int8": 127, "int4": 7, "fp8": 448, "fp4": 6}[form.dtype]
  groups = weight.reshape(n, -1, form.group or d)
  scales = np.abs(groups).max(-1, keepdims=True) / np.float32(most)
  values = groups / np.where(scales == 0, 1, scales)
  if form.dtype.startswith("fp"):
    values = values.astype(quantized.KINDS[form.dtype].dtype).astype(np.float32)
  else:
    values = np.round(values)
  return (values * scales).reshape(n, d), scales[..., 0]


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("kind", quantized.KINDS)
def test_stored_values_are_those_of_the_formats_definition(kind, group):
  form = Quantization(dtype=kind, group=group)
  weight = RNG.standard_normal((5, 64)).astype(np.float32)
  weight[1] *= 1e-3
  weight[2] = 0
  values, scales = jit(lambda w: quantized.quantize(w, form))(weight)
  expected, at = by_definition(weight, form)
  assert values.dtype == quantized.KINDS[form.dtype].dtype
  np.testing.assert_allclose(scales, at, rtol=1e-6)
  actual = quantized.dequantize(values, scales)
  np.testing.assert_allclose(actual, expected, rtol=1e-6)
  step = {"int8": 0.5, "int4": 0.5, "fp8": 448 / 28, "fp4": 1}[kind]
  spread = np.repeat(at, 64 // at.shape[1], axis=1)
  assert np.all(np.abs(actual - weight) <= step * spread * 1.001)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_products_are_those_with_the_dequantised_weights(dtype):
  weight = RNG.standard_normal((7, 64)).astype(np.float32)
  x = 30 * RNG.standard_normal((3, 64)).astype(np.float32)
  for form in (Quantization(dtype="fp8"), Quantization(dtype="int8", group=32)):
    stored = quantized.quantize(weight, form)
    expected = np.asarray(x, dtype).astype(np.float32) @ np.asarray(
      quantized.dequantize(*stored).T
    )
    close = 9 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
    for multiply in (quantized.products, quantized.group_products):
      actual = multiply(jnp.asarray(x, dtype), *stored)
      assert actual.dtype == dtype
      np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected, rtol=0, atol=close
      )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_weights_in_groups_are_rounded_once(dtype):
  weight = 1e-4 * RNG.standard_normal((3, 64)).astype(np.float32)
  stored = quantized.quantize(weight, Quantization(dtype="int8", group=32))
  expected = quantized.dequantize(*stored).T.astype(dtype)
  for multiply in (quantized.products, quantized.group_products):
    actual = multiply(jnp.eye(64, dtype=dtype), *stored)
    np.testing.assert_array_equal(actual, expected)
    assert multiply(jnp.zeros((2, 0, 64), dtype), *stored).shape == (2, 0, 3)


@nnx.jit(static_argnums=0)
def new(config):
  """A module of random weights, in one program."""
  return Transformer(config, rngs=nnx.Rngs(0))


def make(form, tied):
  """A module with the weights that a form stands for, and the lowered one."""
  config = llama_config(**SMALL, tied_embeddings=tied)
  module = new(config)
  low = nnx.merge(*nnx.split(module))
  quantized.lower(low, form)
  flat = dict(nnx.to_flat_state(nnx.state(low)))
  for path in [path for path in flat if path[-1] == "scales"]:
    scales = flat.pop(path)
    where = next(p for p in flat if p[:-1] == path[:-1] and p[-1] != "bias")
    whole = quantized.dequantize(flat[where][...], scales[...])
    flat[where] = nnx.Param(whole)
  nnx.update(module, nnx.from_flat_state(list(flat.items())))
  return module, low


def tree_logits(model):
  """`f32[2, 4, V]` of a tree's nodes behind texts of two and three tokens."""
  ancestors = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])

  def both(params, tokens):
    _, cache = model.apply(params, tokens, model.init_cache(2, 12))
    start = jnp.array([2, 3])
    output, _ = model.apply(
      params,
      tokens,
      cache.replace(length=start),
      positions=start[:, None] + np.array([0, 1, 1, 2]),
      mask=ancestors.astype(bool),
    )
    return output.logits

  return jit(both)


@pytest.mark.parametrize(
  ("form", "tied"),
  [
    (Quantization(dtype="int8"), True),
    pytest.param(
      Quantization(dtype="int4", group=32), False, marks=pytest.mark.heavy
    ),
  ],
)
def test_a_tree_pass_is_the_dequantised_models_along_its_paths(form, tied):
  module, low = make(form, tied)
  model, params = as_language_model(low)
  actual = tree_logits(model)(params, TOKENS)
  rows = np.zeros((2, 3, 6), int)  # the paths to nodes 2, 3 and, of 3, to 1
  last = np.array([[3, 4, 3], [4, 5, 4]])
  for row, length in enumerate((2, 3)):
    for i, path in enumerate(((0, 2), (0, 1, 3), (0, 1))):
      text = [*TOKENS[row, :length], *TOKENS[row, list(path)]]
      rows[row, i, : len(text)] = text
  graphdef, state = nnx.split(module)
  forward = jit(lambda s, x: nnx.merge(graphdef, s)(x)[0].logits)
  whole = np.asarray(forward(state, rows.reshape(6, 6))).reshape(2, 3, 6, -1)
  expected = np.take_along_axis(whole, last[..., None, None], axis=2)[:, :, 0]
  atol = 2e-5 * np.abs(expected).max()
  np.testing.assert_allclose(actual[:, [2, 3, 1]], expected, rtol=0, atol=atol)


def test_weights_that_lie_inputs_first_are_stored_as_others_are():
  form = Quantization(dtype="int4", group=32)
  module, turned = (
    new(llama_config(**SMALL)),
    new(llama_config(**SMALL)),
  )
  for layer in turned.layers:
    linear.turn(layer)
  for one in (module, turned):
    quantized.lower(one, form)
  jax.tree.map(np.testing.assert_array_equal, *map(nnx.state, (module, turned)))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_fast_copy_are_the_dequantised_ones(tied):
  module, low = make(Quantization(dtype="int4", group=32), tied)
  quantized.hasten(low)
  expected, actual = (
    dict(nnx.to_flat_state(nnx.state(x))) for x in (module, low)
  )
  for path, weight in expected.items():
    np.testing.assert_array_equal(actual[path][...], weight[...])
  scales = actual.keys() - expected.keys()
  assert len(scales) == 15  # of seven projections a layer, and the table
  assert all((actual[path][...] == 1).all() for path in scales)


@pytest.mark.parametrize("tied", [True, False])
def test_a_fast_copy_in_int8_is_read_as_it_is_stored(tied):
  _, low = make(Quantization(dtype="int8"), tied)
  before = nnx.state(low)
  exact = low(TOKENS)[0].logits
  quantized.hasten(low)
  jax.tree.map(np.testing.assert_array_equal, nnx.state(low), before)
  away = np.abs(low(TOKENS)[0].logits - exact).max()
  assert 0 < away < 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize(
  ("tied", "embedding"), [(True, False), (False, True), (False, False)]
)
@pytest.mark.parametrize("output", [True, False])
def test_tables_are_stored_so_by_choice(tied, output, embedding):
  form = Quantization(dtype="int8", output=output, embedding=embedding)

  def make():
    config = llama_config(**SMALL, tied_embeddings=tied)
    module = Transformer(config, rngs=nnx.Rngs(0))
    quantized.lower(module, form)
    return module

  low = nnx.eval_shape(make)
  is_low = lambda x: isinstance(
    x, quantized.QuantizedLinear | quantized.QuantizedEmbed
  )
  assert is_low(low.embed) == (output if tied else embedding)
  assert tied or is_low(low.lm_head) == output
  for layer in low.layers:
    assert is_low(layer.attention.out)
    assert is_low(layer.mlp.gate)


def test_stacked_layers_are_lowered_to_the_same_and_rows_are_apart():
  form = Quantization(dtype="int8", embedding=True)
  module = new(llama_config(**SMALL))
  low = nnx.merge(*nnx.split(module))
  quantized.lower(low, form)
  params = stacked.lowered(stacked.stack(module), module.config, form)
  shapes = stacked.abstract_params(
    module.config, dtype=jnp.float32, weights=form
  )
  same = jax.tree.map(
    lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), params, shapes
  )
  assert all(jax.tree.leaves(same))
  model = stacked.as_language_model(module.config, weights=form)
  forward = tree_logits(model)
  actual = forward(params, TOKENS)
  model, plain = as_language_model(low)
  expected = tree_logits(model)(plain, TOKENS)
  atol = 2e-5 * np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)
  other = forward(params, np.stack([TOKENS[0], 60 - TOKENS[1]]))
  np.testing.assert_array_equal(other[0], actual[0])
  assert not np.array_equal(other[1], actual[1])


def test_scales_lie_beside_the_weights_that_they_are_of():
  cut = sharding.tensor_parallel(("model",))
  config = llama_config(**SMALL)
  for group, last in ((None, None), (32, "model")):
    form = Quantization(dtype="int8", group=group, embedding=True)
    specs = sharding.param_specs(
      stacked.abstract_params(config, dtype=jnp.float32, weights=form), cut
    )
    layers, frame = specs["layers"]["kind0"], specs["frame"]
    assert layers["attention"]["q"]["weight"].get_value() == P(
      None, "model", None
    )
    assert layers["attention"]["q"]["scales"].get_value() == P(
      None, "model", None
    )
    assert layers["mlp"]["down"]["weight"].get_value() == P(None, None, "model")
    assert layers["mlp"]["down"]["scales"].get_value() == P(None, None, last)
    assert frame["embed"]["scales"].get_value() == P("model", None)
    assert layers["attention_norm"]["scale"].get_value() == P(None)


@pytest.mark.parametrize(
  ("form", "how"),
  [
    (Quantization(dtype="int8"), "pairs"),
    (Quantization(dtype="fp8"), "ragged"),
    (Quantization(dtype="int4", group=32), "ragged"),
    (Quantization(dtype="fp4", group=32), "dense"),
  ],
)
def test_experts_in_few_bits_are_the_dequantised_ones(form, how):
  """Each with scales of its own; one of a group of inputs, or of all."""
  mixture = Mixture(
    num_experts=3, num_chosen=2, embed_dim=32, expert_dim=64, expert_bias=True
  )
  block = MixtureMlp(mixture, jnp.float32, form=how, rngs=nnx.Rngs(0))
  for name in ("gate_bias", "up_bias", "down_bias"):
    bias = getattr(block.experts, name)
    bias[...] = jnp.asarray(RNG.standard_normal(bias.shape), jnp.float32)
  low = nnx.merge(*nnx.split(block))
  quantized.lower(low, form)
  for name in quantized.EXPERTS:
    weight = getattr(block.experts, name)
    values, scales = (
      getattr(low.experts, part)[...] for part in (name, f"{name}_scales")
    )
    assert values.dtype == quantized.KINDS[form.dtype].dtype
    actual = expert_forms.dequantised(values, scales)
    each = [
      quantized.dequantize(*quantized.quantize(w.T, form)).T for w in weight
    ]
    np.testing.assert_array_equal(actual, each)
    weight[...] = actual
  x = jnp.asarray(RNG.standard_normal((2, 3, 32)), jnp.float32)
  run = jit(lambda g, state: nnx.merge(g, state)(x), static_argnums=0)
  actual, expected = (run(*nnx.split(module)) for module in (low, block))
  atol = 1e-5 * np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_what_cannot_be_stored_so_is_refused():
  with pytest.raises(ValueError, match="groups of 64 do not divide the 32 in"):
    quantized.quantize(jnp.ones((2, 32)), Quantization(dtype="int4", group=64))
  with pytest.raises(ValueError, match=r"one of \['fp4', 'fp8', 'int4', 'i"):
    Quantization(dtype="int2")
  with pytest.raises(ValueError, match=r"one of \(32, 64, 128\), got 7"):
    Quantization(dtype="int8", group=7)
  tied = llama_config(**SMALL, tied_embeddings=True)
  form = Quantization(dtype="int8", embedding=True)
  with pytest.raises(ValueError, match="this model's is tied"):
    quantized.check_weights(tied, form, on_mesh=False)
  for kind in ("int8", "fp8"):
    with pytest.raises(ValueError, match=f"are int8.* fewer, got {kind}"):
      quantized.below(Quantization(dtype=kind), form)


def test_a_copy_in_fewer_bits_is_of_what_is_stored():
  kept = Quantization(dtype="int8", embedding=True)
  form = quantized.below(Quantization(dtype="int4", group=32), kept)
  assert form == Quantization(dtype="int4", group=32, embedding=True)
  module = new(llama_config(**SMALL))
  quantized.lower(module, kept)
  stack = stacked.stack(module)
  low = nnx.merge(*nnx.split(module))
  quantized.lower(low, form)
  kinds = {str(x.dtype) for x in jax.tree.leaves(nnx.state(low))}
  assert kinds == {"int4", "float32"}
  was = module.layers[1].mlp.up
  whole = quantized.dequantize(was.weight[...], was.scales[...])
  values, scales = quantized.quantize(whole, form)
  now = low.layers[1].mlp.up
  np.testing.assert_array_equal(now.weight[...], values)
  np.testing.assert_array_equal(now.scales[...], scales)
  assert low.final_norm.scale[...] is module.final_norm.scale[...]
  actual = stacked.lowered(stack, module.config, form)
  jax.tree.map(np.testing.assert_array_equal, actual, stacked.stack(low))


def test_experts_that_are_stored_are_rounded_again_in_turn():
  mixture = Mixture(num_experts=3, num_chosen=2, embed_dim=32, expert_dim=64)
  block = MixtureMlp(mixture, jnp.float32, form="dense", rngs=nnx.Rngs(0))
  quantized.lower(block, Quantization(dtype="int8"))
  whole = expert_forms.dequantised(
    block.experts.down[...], block.experts.down_scales[...]
  )
  form = Quantization(dtype="int4", group=32)
  quantized.lower(block, form)
  each = [quantized.quantize(x.T, form) for x in whole]
  np.testing.assert_array_equal(block.experts.down, [x.T for x, _ in each])
  np.testing.assert_array_equal(
    block.experts.down_scales, [x.T for _, x in each]
  )


def written(form):
  """Bytes that a CPU's program of a product keeps beside its arguments."""
  weight = jnp.ones((512, 512), jnp.float32)
  stored = quantized.quantize(weight, form)
  program = jax.jit(quantized.products).lower(jnp.ones((1, 512)), *stored)
  return program.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_xla_writes_a_copy_of_weights_in_groups_on_a_cpu(kind):
  """Why nothing is gained there (docs/precision.md)."""
  assert written(Quantization(dtype=kind, group=32)) >= 4 * 512**2


def test_xla_writes_no_copy_of_int8_on_a_cpu():
  assert written(Quantization(dtype="int8")) < 512**2


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_products_of_whole_numbers_are_as_exact_as_their_parts(dtype, parts):
  weight = RNG.standard_normal((7, 96)).astype(np.float32)
  stored = quantized.quantize(weight, Quantization(dtype="int8"))
  x = 30 * RNG.standard_normal((2, 3, 96)).astype(np.float32)
  x[0, 1] = 0
  x[1, 2, 5] = 3000  # what is beside it has less
  x = jnp.asarray(x, dtype)
  actual = jit(functools.partial(quantized.integer_products, parts=parts))(
    x, *stored
  )
  assert actual.dtype == dtype
  x, whole = (
    np.asarray(x, np.float64),
    np.asarray(quantized.dequantize(*stored)),
  )
  step = np.abs(x).max(-1, keepdims=True) / (127 * 254 ** (parts - 1))
  expected = x @ whole.T
  most = step / 2 * np.abs(whole).sum(-1)
  most += 2 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
  assert np.all(np.abs(np.asarray(actual, np.float64) - expected) <= most)
  np.testing.assert_array_equal(actual[0, 1], 0)


def test_a_row_that_is_no_number_breaks_its_own_products_alone():
  stored = quantized.quantize(jnp.ones((7, 96)), Quantization(dtype="int8"))
  x = np.ones((4, 96), np.float32)
  x[1, 3], x[2, 3] = np.nan, np.inf
  actual = np.asarray(jit(quantized.products)(x, *stored))
  np.testing.assert_array_equal(
    np.isfinite(actual).all(-1), [True, False, False, True]
  )
  assert not np.isfinite(actual[1:3]).any()
  np.testing.assert_allclose(actual[[0, 3]], 96, rtol=1e-5)
