"""GGUF files: the same models as transformers has, of every type."""

import functools

import gguf as package
import ggufs
import jax.numpy as jnp
import numpy as np
import pytest
import references
import torch
from gguf import GGMLQuantizationType as Kind
from references import GATED, LLAMA3, MODELS, TOKENS, VOCAB
from transformers.integrations.gguf import dequant

from models import checkpoints
from models.formats import gguf, gguf_file


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
def test_logits_are_those_of_transformers(written, name):
  path, model = written(name)
  if FAMILIES[name][2]:
    model = references.read_gguf(path)
  expected = references.logits(model, TOKENS)
  actual = references.module_logits(gguf.load(str(path)))
  error = references.relative_error(actual, expected)
  # Gemma 4, read of either format, rounds farther apart in float32.
  assert error < (2e-4 if name == "gemma4" else 2e-5)


def test_the_header_is_what_its_own_package_reads(tmp_path):
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


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_format_holds_blocks_as_they_are_in_the_file(kind, tmp_path):
  settings = GATED | dict(num_key_value_heads=2, intermediate_size=64)
  path = ggufs.write(
    tmp_path / "x.gguf",
    references.make("llama", settings),
    kinds=lambda name, shape: Kind[kind] if len(shape) == 2 else Kind.F32,
  )
  source = gguf.source(str(path))
  matrices = [x for x in source.tensors.values() if len(x.shape) == 2]
  assert len(matrices) == 16
  for tensor in matrices:  # queries' and keys' rows in another order too
    one = tensor.quantized
    values, scales = one.values.read(()), one.scales.read(())
    whole = values * np.repeat(scales, 32, axis=1)
    np.testing.assert_array_equal(whole, tensor.read(()))
  load = functools.partial(
    checkpoints.load, str(path), dtype=jnp.float32, mesh=None, sharding=None
  )
  bits = kind[1]
  group = "group=32, " if bits == "8" else ""
  form = f"int{bits}({group}embedding=True)"
  begun = f"{path} is published as {kind} of GGUF: "
  network = load(weights="published")
  assert network.note == f"{begun}held as that, {form}"
  assert load().note == f"{begun}dequantized to float32"
  down = network.params["layers"][1]["mlp"]["down"]
  kept, weight = (
    down["weight"].get_value(),
    source.tensors["layers.1.mlp.down_proj.weight"].quantized,
  )
  np.testing.assert_array_equal(
    np.asarray(kept.values, np.int8), weight.values.read(())
  )
  np.testing.assert_array_equal(kept.scales, weight.scales.read(()))


def test_all_that_ends_a_turn_ends_a_text(tmp_path):
  model = references.make(*FAMILIES["llama"][:2])
  ends = [("add_eos_token_id", 9), ("add_eot_token_id", 7)]
  for metadata, expected in [([], ()), (ends[:1], (9,)), (ends, (7, 9))]:
    path = ggufs.write(tmp_path / "x.gguf", model, metadata=metadata)
    assert checkpoints.eos_token_ids(str(path)) == expected


@pytest.mark.parametrize(
  "end", ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>",
          "<|return|>", "[EOS]", "<|endoftext|>", "<|end_of_text|>"],
)  # fmt: skip
def test_the_end_of_a_turn_is_known_by_its_name(tmp_path, end):
  """Beside the end of its base model, which a chat model's file often has."""
  model = references.make(*FAMILIES["llama"][:2])
  tokens = [f"t{i}" for i in range(10)]
  tokens[5] = end
  metadata = [("add_token_list", tokens), ("add_eos_token_id", 3)]
  path = ggufs.write(tmp_path / "x.gguf", model, metadata=metadata)
  assert checkpoints.eos_token_ids(str(path)) == (3, 5)


@pytest.mark.parametrize("name", ["llama-scaled", "gemma2", "qwen2-moe"])
def test_a_part_of_a_tensor_is_that_part_of_the_whole(written, name):
  source = gguf.source(str(written(name)[0]))
  for tensor in source.tensors.values():
    whole = tensor.read(())
    assert whole.shape == tensor.shape
    for start, stop, step in [(0, 3, 1), (5, None, 1), (4, 21, 3)]:
      index = (slice(start, stop, step), slice(1, stop))[: whole.ndim]
      np.testing.assert_array_equal(tensor.read(index), whole[index])


# --------------------------------------------------------------------- types


@pytest.mark.parametrize("kind", gguf.KINDS)
def test_every_type_is_dequantized_as_others_do_it(tmp_path, kind):
  kind = Kind[kind]
  array = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
  writer = package.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
  raw = ggufs.quantized(array, kind)
  if kind == Kind.F32:
    writer.add_tensor("x", array)
  else:
    writer.add_tensor("x", raw, raw_dtype=kind)
  for step in ("header", "kv_data", "tensors"):
    getattr(writer, f"write_{step}_to_file")()
  writer.close()
  header = gguf_file.read_header(str(tmp_path / "x.gguf"))
  actual = gguf_file.read(header, "x")
  assert actual.shape == (6, 512)
  if kind.value in dequant.GGML_BLOCK and kind not in (Kind.Q5_0, Kind.Q5_1):
    blocks = raw.reshape(-1, package.GGML_QUANT_SIZES[kind][1])
    expected = dequant.dequantize(torch.from_numpy(blocks), kind.value)
    expected = expected.numpy().reshape(actual.shape)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)
  else:  # what was written, but for its last bits
    step = {"F32": 0, "F16": 2**-10, "BF16": 2**-7, "Q5_0": 0.3, "Q5_1": 0.3}
    step["MXFP4"] = 1.0  # between 4 and 6 of the largest numbers
    assert np.abs(actual - array).max() <= step[kind.name]
    assert np.abs(actual).max() > 2
  part = gguf_file.read(header, "x", (slice(1, 5, 2), slice(30, 70)))
  np.testing.assert_array_equal(part, actual[1:5:2, 30:70])


def test_a_file_of_mixed_types_has_the_logits_of_transformers(tmp_path):
  settings = GATED | dict(
    hidden_size=256, intermediate_size=512, num_key_value_heads=2
  )
  model, used = references.make("llama", settings), []
  known = [kind for kind in gguf.KINDS if kind != "MXFP4"]  # of transformers

  def kinds(name, shape):
    if len(shape) == 1:
      return Kind.F32
    used.append(Kind[known[len(used) % len(known)]])
    return used[-1]

  path = tmp_path / "mixed.gguf"
  ggufs.write(path, model, kinds=kinds, metadata=ggufs.names(VOCAB))
  assert {kind.name for kind in used} == {*known}
  expected = references.logits(references.read_gguf(path), TOKENS)
  actual = references.module_logits(gguf.load(str(path)))
  assert references.relative_error(actual, expected) < 1e-4
