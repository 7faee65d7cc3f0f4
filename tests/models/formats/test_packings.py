"""Quantized weights as others publish them, by their formats' definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packing
import pytest
import references
import torch
from flax import nnx
from jax.sharding import AxisType
from packing import (
  AWQ,
  PUBLISHED,
  WITH_HEAD,
  compressed,
  fp8_config,
  gptq_config,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from launch.assembly import registry
from models import checkpoints, sharding
from models.formats import huggingface, loading, published, weights
from models.formats.families import FAMILIES
from models.formats.packings import packing as packing_lib
from models.networks import quantized, stacked
from models.networks.linear import Linear
from models.networks.quantized import Quantization
from models.networks.quantized_tensor import DTYPES, is_quantized


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Writes a checkpoint once: its folder, weights, and format that holds it."""

  @functools.cache
  def write(name):
    pack, how, form = PUBLISHED[name]
    path = tmp_path_factory.mktemp(name)
    head = name.startswith(WITH_HEAD)
    return path, packing.write(path, pack, how, head=head), form

  return write


def linears(module):
  """Every projection, by the checkpoint's name of its weight."""
  results = {}
  for path, child in nnx.iter_modules(module):
    if isinstance(child, Linear):
      name = weights.locate((*path, "weight"), FAMILIES["llama"])[0]
      results[name if name.startswith("lm_head") else f"model.{name}"] = child
  assert len(results) == 15
  return results


def held(source):
  """How a checkpoint's weights are held as they are published."""
  kept = published.keep(source)
  return published.summary(source, kept)


def check_values(path, expected):
  module = loading.load(huggingface.source(str(path)))
  for name, child in linears(module).items():
    np.testing.assert_array_equal(child.weight[...], expected[name], name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_dequantized_weights_match_definition_bit_for_bit(name, written):
  path, expected, _ = written(name)
  check_values(path, expected)
  source = huggingface.source(str(path))
  tensor = source.tensors["layers.0.mlp.down_proj.weight"]
  some = (slice(19, 41), slice(7, 60))
  whole = expected["model.layers.0.mlp.down_proj.weight"]
  np.testing.assert_array_equal(tensor.read(some), whole[some])


def test_zero_points_apply_only_to_their_config_group(tmp_path):
  """Groups of a configuration may differ in their symmetry alone."""
  way = dict(num_bits=4, strategy="group", group_size=32)
  how = compressed("pack-quantized", **way)
  other = compressed("pack-quantized", **way, symmetric=False)
  how["config_groups"]["group_1"] = other["config_groups"]["group_0"]
  pack = functools.partial(packing.pack_quantized, sym=False)
  check_values(tmp_path, packing.write(tmp_path, pack, how))


@pytest.mark.parametrize("packed", [True, False])
def test_projection_outside_layers_may_be_unquantized(packed, copied):
  """Of Gemma 4's embeddings by layer."""
  path = copied("gemma4")
  pack, how, _ = PUBLISHED["float"]
  names = ["_proj.weight", "per_layer_input_gate", "per_layer_projection."]
  names += ["per_layer_model_projection"] * packed
  packing.rewrite(path, pack, how, names=names)
  note = checkpoints.load(str(path), weights="published").note
  rest = ", but for 1 weights, such as per_layer_model_projection.weight"
  assert note.endswith("" if packed else rest)


def test_fp8_blocks_match_transformers():
  rng = np.random.default_rng(0)
  numbers = packing.floats(rng, (64, 96))
  scales = rng.uniform(1e-3, 2e-3, (2, 3)).astype(np.float32)
  tensor = lambda x, kind: weights.Tensor(
    name="", shape=x.shape, kind=kind, read=lambda index: x[index]
  )
  actual = packing_lib.in_blocks(
    numbers.shape, [32, 32], tensor(scales, "F32"), numbers.__getitem__, "fp8"
  )
  theirs = Fp8Dequantize(None)._dequantize_one(
    torch.tensor(numbers.view(np.uint8)).view(torch.float8_e4m3fn),
    torch.tensor(scales),
  )
  np.testing.assert_array_equal(actual.read(()), theirs.numpy())


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, state, tokens):
  return nnx.merge(graphdef, state)(tokens)[0].logits


def greedy(module):
  """Six tokens behind four of two texts, and the logits of all."""
  graphdef, state = nnx.split(module)
  text = np.zeros((2, 10), int)
  text[:, :4] = references.TOKENS[:2, :4]
  for at in range(4, 10):
    logits = np.asarray(_logits(graphdef, state, text))
    text[:, at] = logits[:, at - 1].argmax(-1)
  return text, logits


def kept_as(path, form):
  """The model in a folder, whose weights are held as published in a form."""
  source = huggingface.source(str(path))
  return loading.load(source, form=form, kept=published.keep(source, form))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights_are_kept_without_requantizing(name, written):
  path, expected, form = written(name)
  source = huggingface.source(str(path))
  actual, words = held(source)
  if form is None:
    assert actual is None or "but for" in words
    return
  assert words == str(actual) == form
  for name, child in linears(kept_as(path, actual)).items():
    whole = child.weight[...]
    if is_quantized(whole):
      values, scales = whole.values, whole.scales
      stored = DTYPES[actual.dtype].dtype  # on a CPU four bits take eight
      assert values.dtype == (jnp.int8 if stored == jnp.int4 else stored)
      whole = np.asarray(values, np.float32) * np.repeat(
        scales, values.shape[1] // scales.shape[1], axis=1
      )
    else:
      assert name == "lm_head.weight"
    np.testing.assert_array_equal(whole, expected[name], name)


@pytest.mark.parametrize("name", ["packed", "awq", "fp8", "float"])
def test_kept_weights_match_dequantized_model_outputs(name, written):
  path, _, form = written(name)
  text, logits = greedy(loading.load(huggingface.source(str(path))))
  actual, other = greedy(kept_as(path, registry.weights(form)))
  np.testing.assert_array_equal(actual, text)
  assert references.relative_error(other, logits) < 1e-5


@pytest.mark.parametrize("name", ["packed-zero-points", "fp8"])
def test_experts_are_kept_as_published(name, tmp_path):
  pack, how, _ = PUBLISHED[name]
  expected = packing.write(tmp_path, pack, how, family="qwen3_moe")
  kind = "fp8" if name == "fp8" else "int8"
  form = Quantization(dtype=kind, group=32, output=False)
  kept = kept_as(tmp_path, form)
  whole = loading.load(huggingface.source(str(tmp_path)))
  for i in range(2):
    ours, others = (x.layers[i].mlp.experts for x in (kept, whole))
    for name in quantized.EXPERTS:
      stem = f"model.layers.{i}.mlp.experts"
      each = [expected[f"{stem}.{e}.{name}_proj.weight"].T for e in range(4)]
      np.testing.assert_array_equal(getattr(others, name)[...], each)
      weight = getattr(ours, name)[...]
      assert weight.values.dtype == DTYPES[form.dtype].dtype
      np.testing.assert_array_equal(weight.dequantized(), each)
  (actual, other), (text, logits) = greedy(kept), greedy(whole)
  np.testing.assert_array_equal(actual, text)
  assert references.relative_error(other, logits) < 1e-5
  mesh = jax.make_mesh(
    (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  network = checkpoints.load(
    str(tmp_path), dtype=jnp.float32, mesh=mesh,
    sharding=sharding.Sharding(), weights="published",
  )  # fmt: skip
  assert network.note.endswith(f"kept as is, {form}")
  stack = stacked.stack(kept)
  jax.tree.map(np.testing.assert_array_equal, network.params, stack)


@pytest.mark.parametrize("kept", [(), ("down_proj",)])
def test_biases_and_unquantized_projections_load_unchanged(kept, tmp_path):
  pack, how, form = PUBLISHED["gptq"]
  expected = packing.write(tmp_path, pack, how, family="qwen2", kept=kept)
  check_values(tmp_path, expected)
  network = checkpoints.load(str(tmp_path), weights="published")
  rest = ", but for 2 weights, such as layers.0.mlp.down_proj.weight"
  assert network.note.endswith(f"kept as is, {form}{rest * bool(kept)}")
  module = network.module
  bias = module.layers[1].attention.q.bias[...]
  assert np.any(bias)
  name = "model.layers.1.self_attn.q_proj.bias"
  np.testing.assert_array_equal(bias, expected[name])


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
  ("how", "message"),
  [
    (dict(quant_method="bitsandbytes", load_in_4bit=True), "got 'bitsandbytes"),
    (dict(bits=4), "quant_method of quantization_config must be one of"),
    (gptq_config(bits=3), "bits of .* must be 4 or 8 for gptq, got 3"),
    (gptq_config(dynamic={"-:lm_head": {}}), "dynamic of .* must be {}"),
    (gptq_config(rotation="hadamard"), "rotation of .* must be left out"),
    (gptq_config(zeros=1, sizes=2), "of gptq: sizes, zeros"),
    (AWQ | dict(version="gemv"), "the version of awq must be 'gemm', got 'gem"),
    (AWQ | dict(zero_point=False), "zero_point of .* must be True"),
    (fp8_config(fmt="e5m2"), "fmt of .* must be 'e4m3' for fp8"),
    (compressed("nvfp4-pack-quantized"), "got 'nvfp4-pack-quantized'"),
    (compressed("pack-quantized", num_bits=3), "are unsupported"),
    (compressed("int-quantized") | dict(kv_cache_scheme={"num_bits": 8}),
     "kv_cache_scheme of .* must be left out"),
    (compressed("int-quantized") | dict(transform_config={"config_groups": {}}),
     "transform_config of .* must be {}"),
  ],
)  # fmt: skip
def test_unsupported_quantization_settings_are_rejected_by_name(how, message):
  settings = packing.model().config.to_dict() | {"quantization_config": how}
  with pytest.raises(ValueError, match=message):
    huggingface.translate(settings)


def broken(tmp_path, pack, how, edit):
  """A checkpoint of which some parts are others."""

  def packed(rng, shape):
    parts, whole = pack(rng, shape)
    edit(parts)
    return {name: x for name, x in parts.items() if x is not None}, whole

  packing.write(tmp_path, packed, how)
  return str(tmp_path)


@pytest.mark.parametrize(
  ("name", "edit", "message"),
  [
    ("gptq", lambda p: p.update(scales=p["scales"][:1].T), "scales must be"),
    ("awq", lambda p: p.update(bits=np.ones(1, np.int32)), "unexpected: "),
    ("packed", lambda p: p.update(weight_scale=p["weight_scale"][:3]),
     "none of config_groups matches"),
    ("packed-zero-points",
     lambda p: p.update(weight_zero_point=p["weight_zero_point"][:3]),
     "weight_zero_point must be"),
    ("fp8", lambda p: p.update(weight_scale_inv=None), "expected one of"),
  ],
)  # fmt: skip
def test_inconsistent_quantized_tensors_are_rejected(
  name, edit, message, tmp_path
):
  pack, how, _ = PUBLISHED[name]
  path = broken(tmp_path, pack, how, edit)
  with pytest.raises(ValueError, match=message):
    loading.load(huggingface.source(path))
