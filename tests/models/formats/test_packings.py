"""Weights in few bits as others publish them, by their formats' definitions."""

import contextlib
import functools
import json

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import packing
import pytest
import references
import torch
from flax import nnx
from jax.sharding import AxisType
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from launch.build import precision
from models import checkpoints, sharding
from models.formats import held, huggingface, weights
from models.formats.packings import awq, block_fp8, gptq
from models.networks import expert_forms, lowbits, stacked
from models.networks.lowbits import Format

bind = functools.partial


def gptq_config(bits=4, group=32, **more):
  return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


def compressed(form, **way):
  """A configuration of compressed-tensors, as llm-compressor writes it."""
  usual = dict(
    num_bits=8, type="int", symmetric=True, strategy="channel", group_size=None,
    dynamic=False, observer="minmax", observer_kwargs={}, actorder=None,
    block_structure=None,
  )  # fmt: skip
  group = {
    "weights": usual | way, "targets": ["Linear"], "input_activations": None,
    "output_activations": None,
  }  # fmt: skip
  return {
    "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
    "quantization_status": "compressed", "kv_cache_scheme": None,
    "global_compression_ratio": None, "config_groups": {"group_0": group},
  }  # fmt: skip


def fp8_config(**more):
  return {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"],
  } | more  # fmt: skip


AWQ = dict(
  quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm",
  modules_to_not_convert=None,
)  # fmt: skip
_GROUPS = dict(num_bits=4, strategy="group", group_size=32)
# What packs a weight, the configuration, and the format that holds it.
PUBLISHED = {
  "gptq": (packing.gptq, gptq_config(), "int4(output=False)"),
  "gptq-eight-bits": (
    bind(packing.gptq, bits=8, group=None),
    gptq_config(bits=8, group=-1, checkpoint_format="gptq"),
    "int8(output=False)",
  ),
  # As some files are that call themselves gptq.
  "gptq-symmetric-as-v2": (
    bind(packing.gptq, v2=True),
    gptq_config(sym=True, desc_act=False),
    "int4(output=False)",
  ),
  "gptq-zero-points": (
    bind(packing.gptq, sym=False),
    gptq_config(sym=False),
    "int8(group=32, output=False)",
  ),
  "gptq-v2": (
    bind(packing.gptq, sym=False, v2=True),
    gptq_config(sym=False, checkpoint_format="gptq_v2"),
    "int8(group=32, output=False)",
  ),
  "gptq-by-activations": (
    bind(packing.gptq, order=True),
    gptq_config(desc_act=True),
    None,
  ),
  "awq": (packing.awq, AWQ, "int8(group=32, output=False)"),
  "packed": (
    packing.pack_quantized,
    compressed("pack-quantized", **_GROUPS),
    "int4(output=False)",
  ),
  "packed-zero-points": (
    bind(packing.pack_quantized, sym=False),
    compressed("pack-quantized", **_GROUPS, symmetric=False),
    "int8(group=32, output=False)",
  ),
  "packed-eight-bits": (
    bind(packing.pack_quantized, bits=8, group=None),
    compressed("pack-quantized"),
    "int8(output=False)",
  ),
  "packed-eight-bits-zero-points": (
    bind(packing.pack_quantized, bits=8, sym=False),
    compressed(
      "pack-quantized", strategy="group", group_size=32, symmetric=False
    ),
    None,
  ),
  "int": (
    packing.int_quantized, compressed("int-quantized"), "int8(output=False)",
  ),
  "int-one-scale": (
    bind(packing.int_quantized, one=True),
    compressed("int-quantized", strategy="tensor"),
    "int8(output=False)",
  ),
  "float": (
    packing.float_quantized, compressed("float-quantized", type="float"), "fp8",
  ),
  "float-one-scale": (
    bind(packing.float_quantized, one=True),
    compressed("float-quantized", type="float", strategy="tensor"),
    "fp8",
  ),
  "float-blocks": (
    bind(packing.blocks, name="weight_scale", kind=np.float32),
    compressed(
      "float-quantized", type="float", strategy="block",
      block_structure=[32, 32],
    ),
    "fp8(group=32)",
  ),
  "fp8": (packing.blocks, fp8_config(), "fp8(group=32)"),
  "fp8-exponents": (
    bind(packing.blocks, kind=np.uint8),
    fp8_config(scale_fmt="ue8m0"),
    "fp8(group=32)",
  ),
  "fp8-edges": (  # no format has a last group of another size
    bind(packing.blocks, size=40),
    fp8_config(weight_block_size=[40, 40]),
    None,
  ),
  "fp8-one-scale": (
    bind(packing.float_quantized, one=True),
    fp8_config(weight_block_size=None, activation_scheme="static"),
    "fp8",
  ),
}  # fmt: skip
# Those whose output projection is packed too.
_WITH_HEAD = ("float", "fp8")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Writes a checkpoint once: its folder, weights, and format that holds it."""

  @functools.cache
  def write(name):
    pack, how, form = PUBLISHED[name]
    path = tmp_path_factory.mktemp(name)
    head = name.startswith(_WITH_HEAD)
    return path, packing.write(path, pack, how, head=head), form

  return write


def linears(module):
  """Every projection, by the checkpoint's name of its weight."""
  results = {}
  for path, child in nnx.iter_modules(module):
    if isinstance(child, lowbits.LowLinear | lowbits.Linear):
      name = weights.locate((*path, "weight"), "llama")[0]
      results[name if name.startswith("lm_head") else f"model.{name}"] = child
  assert len(results) == 15
  return results


def check_values(path, expected):
  for name, child in linears(huggingface.load(str(path))).items():
    np.testing.assert_array_equal(child.weight[...], expected[name], name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_those_of_the_definition_to_the_last_bit(name, written):
  path, expected, _ = written(name)
  check_values(path, expected)
  with contextlib.ExitStack() as stack:
    source = huggingface.source(str(path), stack)
    tensor = source.tensors["layers.0.mlp.down_proj.weight"]
    some = (slice(19, 41), slice(7, 60))
    whole = expected["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(tensor.read(some), whole[some])


def test_blocks_of_eight_bits_are_those_of_transformers():
  rng = np.random.default_rng(0)
  numbers = packing.floats(rng, (64, 96))
  scales = rng.uniform(1e-3, 2e-3, (2, 3)).astype(np.float32)
  tensor = lambda x, kind: weights.Tensor(
    name="", shape=x.shape, kind=kind, read=lambda index: x[index]
  )
  actual = block_fp8.in_blocks(
    tensor(numbers, "F8_E4M3"), tensor(scales, "F32"), [32, 32]
  )
  theirs = Fp8Dequantize(None)._dequantize_one(
    torch.tensor(numbers.view(np.uint8)).view(torch.float8_e4m3fn),
    torch.tensor(scales),
  )
  np.testing.assert_array_equal(actual.read(()), theirs.numpy())


@functools.partial(compiling.jit, static_argnums=0)
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_format_holds_the_numbers_as_they_are_published(name, written):
  path, expected, form = written(name)
  with contextlib.ExitStack() as stack:
    source = huggingface.source(str(path), stack)
    actual, why = held.published(source, on_mesh=False)
  assert str(actual) == str(form)
  assert bool(why) == (form is None)
  if form is None:
    return
  module = huggingface.load(str(path), form=actual)
  for name, child in linears(module).items():
    if isinstance(child, lowbits.LowLinear):
      values, scales = child.weight[...], child.scales[...]
      assert values.dtype == actual.dtype
      whole = np.asarray(values, np.float32) * np.repeat(
        scales, values.shape[1] // scales.shape[1], axis=1
      )
    else:
      assert name == "lm_head.weight"
      whole = child.weight[...]
    np.testing.assert_array_equal(whole, expected[name], name)


@pytest.mark.parametrize("name", ["packed", "awq", "fp8", "float"])
def test_what_is_held_says_what_the_dequantised_model_says(name, written):
  path, _, form = written(name)
  text, logits = greedy(huggingface.load(str(path)))
  kept = huggingface.load(str(path), form=precision.weights(form))
  actual, other = greedy(kept)
  np.testing.assert_array_equal(actual, text)
  assert references.relative_error(other, logits) < 1e-5


@pytest.mark.parametrize("name", ["packed", "fp8"])
def test_a_mesh_holds_the_same_numbers(name, written):
  path, _, form = written(name)
  mesh = jax.make_mesh(
    (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  network = checkpoints.load(
    str(path), dtype=jnp.float32, mesh=mesh,
    sharding=sharding.tensor_parallel(), weights="published",
  )  # fmt: skip
  assert network.note.endswith(f"held as that, {form}")
  module = huggingface.load(str(path), form=precision.weights(form))
  expected = stacked.stack(module)
  jax.tree.map(np.testing.assert_array_equal, network.params, expected)


def test_a_note_says_what_becomes_of_the_published_numbers(written):
  path, expected, form = written("packed")
  load = functools.partial(
    checkpoints.load, dtype=jnp.bfloat16, mesh=None, sharding=None
  )
  says = "compressed-tensors, int of 4 bits, groups of 32"
  begun = f"{path} is published as {says}: "
  kept = load(str(path), weights="published")
  assert kept.note == f"{begun}held as that, {form}"
  # The same numbers are no others in eight bits.
  wider = load(str(path), weights=Format(kind="int8", group=32, output=False))
  assert wider.note == f"{begun}held as that, int8(group=32, output=False)"
  one, other = (x.params["layers"][0]["mlp"]["down"] for x in (kept, wider))
  np.testing.assert_array_equal(
    np.asarray(one["weight"][...], int), other["weight"][...]
  )
  assert load(str(path)).note == f"{begun}dequantised to bfloat16"
  again = load(str(path), weights=Format(kind="fp8"))
  assert again.note == (
    f"{begun}dequantised to bfloat16 and rounded again, to fp8; {form} would "
    "hold it as it is"
  )
  dequantised = load(str(path), weights=None).params
  np.testing.assert_array_equal(
    dequantised["layers"][1]["attention"]["q"]["weight"][...],
    expected["model.layers.1.self_attn.q_proj.weight"].astype(jnp.bfloat16),
  )
  path, _, _ = written("gptq-by-activations")
  none = load(str(path), weights="published")
  assert "dequantised to bfloat16, since layers.0." in none.note
  with pytest.raises(ValueError, match=r"config\.weights=whole asks"):
    kept.lowered(Format(kind="int8"))


@pytest.mark.parametrize("name", ["packed-zero-points", "fp8"])
def test_experts_are_held_as_they_are_published(name, tmp_path):
  pack, how, _ = PUBLISHED[name]
  expected = packing.write(tmp_path, pack, how, experts=True)
  kind = "fp8" if name == "fp8" else "int8"
  form = Format(kind=kind, group=32, output=False)
  load = functools.partial(huggingface.load, str(tmp_path))
  kept, whole = load(form=form), load()
  for i in range(2):
    ours, others = (x.layers[i].mlp.experts for x in (kept, whole))
    for name in lowbits.EXPERTS:
      stem = f"model.layers.{i}.mlp.experts"
      each = [expected[f"{stem}.{e}.{name}_proj.weight"].T for e in range(4)]
      np.testing.assert_array_equal(getattr(others, name)[...], each)
      values = getattr(ours, name)[...]
      assert values.dtype == form.dtype
      actual = expert_forms.dequantised(
        values, getattr(ours, f"{name}_scales")[...]
      )
      np.testing.assert_array_equal(actual, each)
  (actual, other), (text, logits) = greedy(kept), greedy(whole)
  np.testing.assert_array_equal(actual, text)
  assert references.relative_error(other, logits) < 1e-5
  mesh = jax.make_mesh(
    (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  network = checkpoints.load(
    str(tmp_path), dtype=jnp.float32, mesh=mesh,
    sharding=sharding.tensor_parallel(), weights="published",
  )  # fmt: skip
  assert network.note.endswith(f"held as that, {form}")
  stack = stacked.stack(kept)
  jax.tree.map(np.testing.assert_array_equal, network.params, stack)


def test_a_head_reads_the_tables_that_its_target_holds(written, tmp_path):
  path, _, _ = written("float")
  random = np.random.default_rng(1).standard_normal
  shapes = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96), "post_attention_layernorm": (64,),
  }  # fmt: skip
  tensors = {
    f"layers.0.{name}.weight": random(shape).astype(np.float32)
    for name, shape in shapes.items()
  }
  tensors["fc.weight"] = random((64, 128)).astype(np.float32)
  packing.save(tensors, tmp_path / "model.safetensors")
  settings = packing.SETTINGS | dict(
    model_type="llama", num_hidden_layers=1, bias=False, rms_norm_eps=1e-5,
    hidden_act="silu",
  )  # fmt: skip
  (tmp_path / "config.json").write_text(json.dumps(settings))
  load = functools.partial(
    checkpoints.load, str(path), dtype=jnp.float32, mesh=None, sharding=None
  )
  target = load(weights="published")
  heads = [
    checkpoints.load_head(str(tmp_path), network, dtype=jnp.float32).module
    for network in (target, load())
  ]
  head, table = heads[0], target.params["lm_head"]
  assert head.lm_head.weight[...] is table["weight"][...]
  assert head.lm_head.scales[...] is table["scales"][...]
  embedding = target.params["embed"]["embedding"][...]
  assert head.embed.embedding[...] is embedding  # which is not in few bits
  x = jnp.asarray(random((3, 64)), jnp.float32)
  actual, expected = (head.lm_head(x) for head in heads)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_misread_word_zero_point_or_grid_is_seen(written, monkeypatch):
  """Interleaving left out, the one of v1 not added, scales transposed."""
  identity = lambda numbers: numbers
  transposed = lambda scales: floats(scales).T
  floats = block_fp8.floats
  for name, module, part, mutant in (
    ("awq", awq, "_in_order", identity),
    ("gptq-zero-points", gptq, "_ADDED", {"gptq": 0, "gptq_v2": 0}),
    ("fp8", block_fp8, "floats", transposed),
  ):
    path, expected, _ = written(name)
    with monkeypatch.context() as patch:
      patch.setattr(module, part, mutant)
      with pytest.raises(AssertionError, match="not equal"):
        check_values(path, expected)
    check_values(path, expected)


@pytest.mark.parametrize(
  ("how", "message"),
  [
    (dict(quant_method="bitsandbytes", load_in_4bit=True), "got 'bitsandbytes"),
    (dict(quant_method="mxfp4"), "got 'mxfp4'"),
    (dict(bits=4), "quant_method of quantization_config must be one of"),
    ("int8", "quantization_config must be an object"),
    (gptq_config(bits=3), r"bits of .* must be one of \(4, 8\), got 3"),
    (gptq_config(dynamic={"-:lm_head": {}}), "dynamic of .* must be {}"),
    (gptq_config(checkpoint_format="marlin"), "the format of gptq must be one"),
    (gptq_config(rotation="hadamard"), "rotation of .* must be left out"),
    (gptq_config(zeros=1, sizes=2), "not known for gptq: sizes, zeros"),
    (AWQ | dict(version="gemv"), "the version of awq must be 'gemm', got 'gem"),
    (AWQ | dict(zero_point=False), "zero_point of .* must be True"),
    (AWQ | dict(bits=8), "bits of .* must be one of"),
    (fp8_config(fmt="e5m2"), "fmt of .* must be 'e4m3' for fp8"),
    (fp8_config(weight_block_size=[128]), "weight_block_size must be two si"),
    (fp8_config(expert_dtype="fp4"), "expert_dtype of .* must be 'fp8'"),
    (compressed("nvfp4-pack-quantized"), "got 'nvfp4-pack-quantized'"),
    (compressed("pack-quantized", num_bits=3), "must be int of 4 or 8 bits"),
    (compressed("int-quantized", dynamic=True), "must be int of 4 or 8 bits"),
    (compressed("int-quantized", rounding=1), "that are not known: rounding"),
    (compressed("int-quantized") | dict(kv_cache_scheme={"num_bits": 8}),
     "kv_cache_scheme of .* must be left out"),
    (compressed("int-quantized") | dict(transform_config={"config_groups": {}}),
     "transform_config of .* must be {}"),
    (dict(quant_method="compressed-tensors", format="int-quantized"),
     "'config_groups' is missing or malformed"),
  ],
)  # fmt: skip
def test_a_setting_that_is_not_known_is_refused_by_name(how, message):
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
    ("gptq", lambda p: p.update(qzeros=0 * p["qzeros"]), "stand for 8, where"),
    ("gptq-zero-points", lambda p: p.update(qzeros=0 * p["qzeros"] - 1),
     "some kernels read 16 and some 0"),
    ("gptq-by-activations", lambda p: p.update(g_idx=p["g_idx"] + 1),
     r"g_idx must be in 0\.\."),
    ("gptq", lambda p: p.update(scales=p["scales"][:1].T), "scales must be"),
    ("awq", lambda p: p.update(qzeros=None), "'qzeros' is missing"),
    ("awq", lambda p: p.update(bits=np.ones(1, np.int32)), "unexpected: "),
    ("packed", lambda p: p.update(weight_scale=p["weight_scale"][:3]),
     "none of config_groups has I32"),
    ("fp8", lambda p: p.update(weight_scale_inv=None), "expected one of"),
    ("fp8", lambda p: p.update(weight_scale_inv=p["weight_scale_inv"][:1]),
     "scales must be"),
  ],
)  # fmt: skip
def test_parts_that_do_not_go_together_are_refused(
  name, edit, message, tmp_path
):
  pack, how, _ = PUBLISHED[name]
  path = broken(tmp_path, pack, how, edit)
  with pytest.raises(ValueError, match=message):
    huggingface.load(path)
