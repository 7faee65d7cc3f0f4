"""GGUF files: the same models as transformers has, of every type."""

import gguf as package
import ggufs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import torch
from gguf import GGMLQuantizationType as Kind
from jax.sharding import AxisType
from references import GATED, LLAMA3, MODELS, TOKENS, VOCAB
from transformers.integrations.gguf import dequant

from models import checkpoints, sharding
from models.formats import gguf, gguf_file, published
from models.formats.weights import Tensor
from models.networks.quantized_tensor import QuantizedTensor, is_quantized


def like(name, *without, read=False, **changes):
  """A model of `references.MODELS` but for settings that files lack or round.

  Args:
    name: of the model.
    *without: settings that are left at their defaults.
    read: whether transformers reads the file as what it is.
    **changes: other values.
  """
  family, settings, _ = MODELS[name]
  settings = {k: v for k, v in settings.items() if k not in without}
  return family, settings | changes, read


def yarn(**more):
  return dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=16,
    rope_theta=512.0, **more,
  )  # fmt: skip


def plain(theta):
  return dict(rope_type="default", rope_theta=theta)


# family, settings, and whether transformers reads the file as what it is.
FAMILIES = {
  "llama": like("llama-grouped", read=True),
  "llama-scaled": like(
    "llama-scaled", "hidden_act",
    rope_parameters=dict(
      LLAMA3, rope_theta=1000.0, original_max_position_embeddings=64
    ),
  ),
  "mistral": like("mistral-window"),
  "qwen2": like("qwen2", read=True),
  "gemma2": like(
    "gemma2", "attention_bias", "hidden_activation", "rms_norm_eps",
    "rope_parameters", query_pre_attn_scalar=12,
  ),
  "gemma3": like(
    "gemma3", "layer_types", "attn_logit_softcapping", "tie_word_embeddings",
    num_hidden_layers=6, query_pre_attn_scalar=16,
    rope_parameters=dict(
      full_attention=dict(rope_type="linear", factor=4.0, rope_theta=3000.0),
      sliding_attention=plain(128.0),
    ),
  ),
  "gemma4": like(
    "gemma4", "attention_bias",
    rope_parameters=dict(
      full_attention=dict(
        rope_type="proportional", partial_rotary_factor=0.5, rope_theta=768.0
      ),
      sliding_attention=plain(96.0),
    ),
  ),
  # The norm's number is of the router too, and in files a float32.
  "gemma4-moe": like(
    "gemma4-moe", "hidden_activation", rms_norm_eps=2.0**-20
  ),
  "mixtral": like(
    "mixtral", "head_dim", "hidden_act", num_local_experts=4,
    rope_parameters=dict(rope_theta=768.0),
  ),
  "qwen2-moe": like(
    "qwen2-moe", "hidden_act", "rms_norm_eps", num_hidden_layers=2,
    shared_expert_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
  ),
  "gpt-oss": like(
    "gpt-oss", "swiglu_limit", "swiglu_alpha", num_hidden_layers=2,
    num_local_experts=4, num_experts_per_tok=2,
    rope_parameters=yarn(beta_fast=32.0, beta_slow=1.0, truncate=False),
  ),
  "qwen3-moe": like(
    "qwen3-moe", "attention_bias", "hidden_act", num_hidden_layers=2,
    num_experts=4,
    num_experts_per_tok=2,
  ),
  "olmoe": like(
    "olmoe", "num_key_value_heads", "clip_qkv", "attention_bias",
    "tie_word_embeddings", num_experts=5,
  ),
  "qwen3": like("qwen3", "attention_bias", read=True, head_dim=128),
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """`name -> (path, model of transformers)`, made when asked for."""
  folder, made = tmp_path_factory.mktemp("gguf"), {}

  def get(name):
    if name not in made:
      model = references.make(*FAMILIES[name][:2])
      path = folder / f"{name}.gguf"
      ggufs.write(path, model, metadata=ggufs.names(VOCAB))
      made[name] = path, model
    return made[name]

  return get


# ------------------------------------------------------------------ families


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_transformers(written, name):
  path, model = written(name)
  if FAMILIES[name][2]:
    model = references.read_gguf(path)
  expected = references.logits(model, TOKENS)
  actual = references.module_logits(checkpoints.load_module(str(path)))
  error = references.relative_error(actual, expected)
  # Gemma 4, read of either format, rounds farther apart in float32.
  assert error < (2e-4 if name == "gemma4" else 2e-5)


def test_header_matches_the_gguf_package(tmp_path):
  model = references.make(*FAMILIES["qwen2"][:2])
  metadata = [
    ("add_tags", ["", "ä", "x y"]),
    ("add_array", "a.numbers", [1, -2, 3]),
    ("add_array", "a.floats", [0.5, 1.0]),
    ("add_bool", "a.bool", True),
    ("add_int64", "a.int", -(2**40)),
    ("add_float64", "a.float", 0.1),
    ("add_custom_alignment", 4096),
  ]
  path = str(ggufs.write(tmp_path / "x.gguf", model, metadata=metadata))
  header, reader = gguf_file.read_header(path), package.GGUFReader(path)
  fields = {
    k: f.contents() for k, f in reader.fields.items() if "GGUF" not in k
  }
  plain = lambda x: x.tolist() if isinstance(x, np.ndarray) else x
  assert {k: plain(v) for k, v in header.metadata.items()} == fields
  assert header.metadata["a.int"] == -(2**40)
  assert [t.name for t in reader.tensors] == [*header.tensors]
  for tensor in reader.tensors:
    np.testing.assert_array_equal(
      gguf_file.read(header, tensor.name), tensor.data
    )


@pytest.mark.parametrize("on_mesh", [False, True])
def test_mixed_quantization_types_are_kept_as_published(tmp_path, on_mesh):
  """Stacked layers share a form that holds the types of all of them."""
  settings = GATED | dict(
    hidden_size=256, intermediate_size=512, num_key_value_heads=2
  )
  used = []

  def kinds(name, shape):
    if len(shape) == 1:
      return Kind.F32
    used.append(Kind[[*gguf_file.BLOCKS][len(used) % len(gguf_file.BLOCKS)]])
    return used[-1]

  path = ggufs.write(
    tmp_path / "x.gguf", references.make("llama", settings), kinds=kinds
  )
  mesh = jax.make_mesh(
    (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  where = dict(mesh=mesh, sharding=sharding.Sharding()) if on_mesh else {}
  network = checkpoints.load(str(path), weights="published", **where)
  types = ", ".join(sorted({kind.name for kind in used}))
  assert network.note == (
    f"{path} is published as {types} of GGUF: kept as is, int8 in groups of "
    "16 and 32"
  )
  whole = checkpoints.load(str(path), **where)
  weights = [
    x for x in jax.tree.leaves(network.params, is_leaf=is_quantized)
    if is_quantized(x)
  ]  # fmt: skip
  assert len(weights) == (2 + 7 if on_mesh else 2 + 7 * 2)
  assert {x.values.dtype for x in weights} == {jnp.dtype("int8")}
  actual, expected = map(logits, (network, whole))
  assert references.relative_error(actual, expected) < 1e-5


def test_finer_group_scales_read_whole_and_sliced():
  """Whole, as a mesh asks whose devices are more than a model's heads."""
  of = lambda x: Tensor(
    name="x", shape=x.shape, kind="F32", read=lambda i: x[i]
  )
  weight = QuantizedTensor(
    values=of(np.zeros((3, 64), np.int8)),
    scales=of(np.arange(6.0).reshape(3, 2)),
  )
  finer = published._in_form(weight, "I8", 16, minima=True)
  scales = np.repeat(np.arange(6.0).reshape(3, 2), 2, axis=1)
  assert finer.scales.shape == (3, 4)
  np.testing.assert_array_equal(finer.scales.read(()), scales)
  part = slice(1, 3), slice(1, 4)
  np.testing.assert_array_equal(finer.scales.read(part), scales[part])
  np.testing.assert_array_equal(finer.minima.read(()), 0 * scales)


def logits(network):
  """Of `TOKENS` by themselves."""
  model = network.model()
  run = lambda params: model.apply(
    params, TOKENS, model.init_cache(*TOKENS.shape)
  )[0]
  return np.asarray(jax.jit(run)(network.params).logits)


ENDS = [("add_eos_token_id", 3), ("add_eot_token_id", 1)]
NAMED = ("add_token_list", ["a", "b", "c", "d", "<end_of_turn>", "<|im_end|>"])


@pytest.mark.parametrize(
  ("metadata", "expected"),
  [([], ()), (ENDS[:1], (3,)), (ENDS, (1, 3)), ([NAMED, ENDS[0]], (3, 4, 5))],
)
def test_all_end_of_turn_tokens_become_eos_ids(
  written, tmp_path, metadata, expected
):
  """By its name too: a chat model's file often has its base model's end."""
  path = ggufs.write(tmp_path / "x", written("llama")[1], metadata=metadata)
  assert checkpoints.eos_token_ids(str(path)) == expected


@pytest.mark.parametrize(
  ("metadata", "expected"),
  [
    (("add_string", "llama.rope.scaling.type", "yarn"), "must be 'none'"),
    (("add_float32", "llama.logit_scale", 2.0), "logit_scale is not suppo"),
    (("add_array", "llama.rope.scaling.factor", [1, 2]), "must be 1.0 or left"),
    (("add_uint32", "llama.attention.value_length", 16), "must be 8 or left"),
    (("add_uint16", "split.count", 2), "one part of a split model.*--merge"),
  ],
)
def test_unsupported_metadata_is_rejected(
  written, tmp_path, metadata, expected
):
  model = written("llama")[1]
  path = ggufs.write(tmp_path / "x.gguf", model, metadata=[metadata])
  with pytest.raises(ValueError, match=expected):
    checkpoints.load_module(str(path))


def test_truncated_file_error_names_the_file(written, tmp_path):
  torn = tmp_path / "torn.gguf"
  torn.write_bytes(written("llama")[0].read_bytes()[:400])
  with pytest.raises(ValueError, match=r"torn\.gguf as GGUF: .*\Z"):
    checkpoints.load_module(str(torn))


@pytest.mark.parametrize("name", ["llama-scaled", "gemma2", "qwen2-moe"])
def test_tensor_slices_match_the_whole_tensor(written, name):
  source = gguf.source(str(written(name)[0]))
  for tensor in source.tensors.values():
    whole = tensor.read(())
    assert whole.shape == tensor.shape
    for start, stop, step in [(0, 3, 1), (5, None, 1), (4, 21, 3)]:
      index = (slice(start, stop, step), slice(1, stop))[: whole.ndim]
      np.testing.assert_array_equal(tensor.read(index), whole[index])


# --------------------------------------------------------------------- types


@pytest.mark.parametrize("kind", gguf.KINDS)
def test_every_type_dequantizes_to_reference_values(tmp_path, kind):
  kind = Kind[kind]
  array = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
  writer = package.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
  raw = ggufs.quantized(array, kind)
  writer.add_tensor("x", raw, raw_dtype=None if kind == Kind.F32 else kind)
  for step in ("header", "kv_data", "tensors"):
    getattr(writer, f"write_{step}_to_file")()
  writer.close()
  header = gguf_file.read_header(str(tmp_path / "x.gguf"))
  actual = gguf_file.read(header, "x")
  assert actual.shape == (6, 512)
  most = 2e-7 * np.abs(actual).max()
  # What was written, but for its last bits; MXFP4's between 4 and 6 times s.
  steps = {"F32": 0, "F16": 2**-10, "BF16": 2**-7, "MXFP4": 1.0}
  if kind.name in steps:
    assert np.abs(actual - array).max() <= steps[kind.name]
    assert np.abs(actual).max() > 2
  elif kind not in (Kind.Q5_0, Kind.Q5_1):
    blocks = raw.reshape(-1, package.GGML_QUANT_SIZES[kind][1])
    expected = dequant.dequantize(torch.from_numpy(blocks), kind.value)
    expected = expected.numpy().reshape(actual.shape)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)
  some = (slice(1, 5, 2), slice(30, 70))
  part = gguf_file.read(header, "x", some)
  np.testing.assert_array_equal(part, actual[some])
  if kind.name not in gguf_file.BLOCKS:
    return  # the package reads the others
  expected = package.quants.dequantize(raw, kind)
  np.testing.assert_allclose(actual, expected, rtol=0, atol=most)
  blocks = gguf_file.BLOCKS[kind.name]
  numbers = gguf_file.numbers(header, "x", slice(None))
  if blocks.bits == 4:
    assert {*numbers.ravel()} <= {*range(-8, 8)}
  scales, minima = (
    0 if x is None else np.repeat(x, blocks.group, axis=-1)
    for x in gguf_file.scales(header, "x", slice(None))
  )
  np.testing.assert_allclose(
    numbers * scales + minima, actual, rtol=0, atol=most
  )
