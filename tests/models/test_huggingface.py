"""Checkpoints: the same logits as transformers, and errors that say why."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import huggingface, tokenizers
from models.transformer import (
  RopeScaling,
  Transformer,
  TransformerConfig,
  as_language_model,
)

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 97
LENGTHS = (2, 7, 4)  # of the prompts of a ragged batch
CHUNKS = (1, 3, 1, 1)  # fed after the prompts
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 14))

LLAMA3 = dict(
  rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=16,
)  # fmt: skip
GATED = dict(
  vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
  num_attention_heads=4, max_position_embeddings=64, bos_token_id=None,
  eos_token_id=None,
)  # fmt: skip
GPT2 = dict(
  vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64,
  bos_token_id=None, eos_token_id=None,
)  # fmt: skip

# Each is (family, settings, how many files it is saved in).
MODELS = {
  "gpt2": ("gpt2", GPT2, 1),
  "gpt2-untied": (
    "gpt2",
    GPT2
    | dict(tie_word_embeddings=False, n_inner=40, activation_function="gelu"),
    1,
  ),
  "neox": (
    "gpt_neox",
    GATED | dict(rope_parameters=dict(partial_rotary_factor=0.5)),
    1,
  ),
  "neox-serial": (
    "gpt_neox",
    GATED
    | dict(
      use_parallel_residual=False,
      tie_word_embeddings=True,
      attention_bias=False,
      hidden_act="gelu_fast",
      rope_parameters=dict(partial_rotary_factor=1.0, rope_theta=100.0),
    ),
    3,
  ),
  "llama-grouped": ("llama", GATED | dict(num_key_value_heads=2), 3),
  "llama-scaled": (
    "llama",
    GATED
    | dict(
      tie_word_embeddings=True,
      attention_bias=True,
      mlp_bias=True,
      head_dim=12,
      rope_parameters=dict(LLAMA3, rope_theta=1000.0),
      hidden_act="gelu_pytorch_tanh",
    ),
    1,
  ),
  "mistral-window": (
    "mistral",
    GATED | dict(num_key_value_heads=2, head_dim=16, sliding_window=3),
    1,
  ),
  "mistral-full": (
    "mistral",
    GATED | dict(num_key_value_heads=1, sliding_window=None),
    1,
  ),
  "qwen2": (
    "qwen2",
    GATED
    | dict(num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-3),
    1,
  ),
  "qwen2-mixed": (
    "qwen2",
    GATED
    | dict(
      num_key_value_heads=4,
      use_sliding_window=True,
      sliding_window=4,
      max_window_layers=0,
      layer_types=["sliding_attention", "full_attention"],
    ),
    1,
  ),
  "qwen3": (
    "qwen3",
    GATED | dict(num_key_value_heads=2, head_dim=16, attention_bias=True),
    1,
  ),
  "qwen3-window": (
    "qwen3",
    GATED
    | dict(
      num_key_value_heads=4,
      head_dim=8,
      tie_word_embeddings=True,
      use_sliding_window=True,
      sliding_window=3,
      max_window_layers=1,
    ),
    1,
  ),
}

SMALL = TransformerConfig(
  vocab_size=VOCAB, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=8, mlp_dim=48, max_positions=64,
)  # fmt: skip


def make_config(family, settings):
  return transformers.AutoConfig.for_model(
    family, **json.loads(json.dumps(settings))
  )


def make_reference(family, settings, *, seed=0):
  """A model none of whose parameters could be left out unnoticed."""
  model = transformers.AutoModelForCausalLM.from_config(
    make_config(family, settings), attn_implementation="eager"
  )
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      is_scale = parameter.ndim == 1 and name.endswith("weight")
      parameter.copy_(1 + 0.3 * noise if is_scale else 0.2 * noise)
  return model.eval()


def read_reference(path, **options):
  return transformers.AutoModelForCausalLM.from_pretrained(
    path, attn_implementation="eager", **options
  )


def reference_logits(model, tokens):
  with torch.no_grad():
    return model(torch.tensor(tokens), use_cache=False).logits.float().numpy()


def relative_error(found, expected):
  return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """`name -> (directory, logits)` of the models, made when asked for."""
  made = {}

  def get(name):
    if name not in made:
      family, settings, num_files = MODELS[name]
      model = make_reference(family, settings)
      path = tmp_path_factory.mktemp(name)
      size = sum(p.numel() * 4 for p in model.parameters())
      model.save_pretrained(
        path, max_shard_size="5GB" if num_files == 1 else size // num_files
      )
      assert (len(list(path.glob("*.safetensors"))) > 1) == (num_files > 1)
      made[name] = path, reference_logits(model, TOKENS)
    return made[name]

  return get


@pytest.fixture
def copied(saved, tmp_path):
  """`name -> directory`, a copy that a test may damage."""

  def get(name):
    for file in saved(name)[0].iterdir():
      (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path

  return get


def edit_config(path, **changes):
  config = json.loads((path / "config.json").read_text())
  (path / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(path, edit):
  file = path / "model.safetensors"
  tensors = load_file(file)
  edit(tensors)
  save_file(tensors, file)


def jit(function):
  """Compiles fast rather than well."""
  options = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
  }
  return jax.jit(function, compiler_options=options)


def module_logits(module, tokens=TOKENS):
  """`f32[B, T, V]` of whole sequences, without a cache."""
  graphdef, state = nnx.split(module)
  forward = lambda state, x: nnx.merge(graphdef, state)(x)[0].logits
  return np.asarray(jit(forward)(state, jnp.asarray(tokens)))


# -------------------------------------------------------------------- parity


def decoding_errors(path, expected):
  """Relative errors of a ragged prompt, then of every chunk."""
  model, params = as_language_model(huggingface.load(str(path)))
  apply = jit(model.apply)
  width, at = max(LENGTHS), np.array(LENGTHS)
  inside = np.arange(width) < at[:, None]
  tokens = np.where(inside, TOKENS[:, :width], 1)  # junk beyond the prompts
  cache = model.init_cache(len(LENGTHS), TOKENS.shape[1])
  output, cache = apply(params, jnp.asarray(tokens), cache)
  errors = [relative_error(output.logits[inside], expected[:, :width][inside])]
  cache = cache.replace(length=jnp.asarray(at))
  for chunk in CHUNKS:
    columns = at[:, None] + np.arange(chunk)
    tokens = np.take_along_axis(TOKENS, columns, axis=1)
    output, cache = apply(params, jnp.asarray(tokens), cache)
    wanted = np.take_along_axis(expected, columns[..., None], axis=1)
    errors.append(relative_error(output.logits, wanted))
    at = at + chunk
  np.testing.assert_array_equal(cache.length, at)
  return errors


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_cached_decoding_equal_transformers(saved, name):
  errors = decoding_errors(*saved(name))
  assert max(errors) < 1e-4, errors


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("neox", {"use_parallel_residual": False}),
    ("neox", {"rope_parameters": {"partial_rotary_factor": 0.25}}),
    ("llama-scaled", {"rope_parameters": {"rope_theta": 1000.0}}),
    ("mistral-window", {"sliding_window": 4}),
    ("qwen2-mixed", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("gpt2", {"activation_function": "silu"}),
  ],
)
def test_settings_under_test_change_the_logits(saved, copied, name, changes):
  path = copied(name)
  edit_config(path, **changes)
  found = module_logits(huggingface.load(path))
  assert relative_error(found, saved(name)[1]) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "neox", "llama-scaled"])
def test_names_vary_and_buffers_and_tied_heads_are_ignored(copied, name):
  path = copied(name)
  expected = module_logits(huggingface.load(path))

  def edit(tensors):
    for key in list(tensors):
      bare = key.split(".", 1)[1] if not key.startswith("embed_out") else key
      tensors[bare.replace("embed_out", "lm_head")] = tensors.pop(key)
    mask = np.ones((1, 1, 64, 64), np.uint8)
    tensors["h.0.attn.bias"] = tensors["layers.1.attention.bias"] = mask
    tensors["h.1.attn.masked_bias"] = np.array(-1e4, np.float32)
    tensors["layers.0.attention.masked_bias"] = np.array(-1e9, np.float32)
    for prefix in ("", "layers.0.attention.", "layers.0.self_attn."):
      tensors[prefix + "rotary_emb.inv_freq"] = np.ones(4, np.float16)
    if tied := {"gpt2": "wte", "llama-scaled": "embed_tokens"}.get(name):
      tensors["lm_head.weight"] = tensors[tied + ".weight"].copy()

  edit_tensors(path, edit)
  np.testing.assert_array_equal(module_logits(huggingface.load(path)), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_load_as_float32_and_as_themselves(
  tmp_path, dtype
):
  model = make_reference(*MODELS["llama-grouped"][:2])
  model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
  module = huggingface.load(tmp_path)
  assert {x.dtype for x in jax.tree.leaves(nnx.state(module))} == {
    jnp.dtype("float32")
  }
  model = read_reference(tmp_path, dtype=torch.float32)
  expected = reference_logits(model, TOKENS)
  assert relative_error(module_logits(module), expected) < 1e-4
  same = huggingface.load(tmp_path, dtype=dtype)
  assert {x.dtype for x in jax.tree.leaves(nnx.state(same))} == {
    jnp.dtype(dtype)
  }
  assert same.dtype == dtype
  for a, b in zip(
    jax.tree.leaves(nnx.state(module)),
    jax.tree.leaves(nnx.state(same)),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b.astype(jnp.float32))


def test_neither_torch_nor_transformers_is_imported():
  code = (
    "import sys, models.huggingface; "
    "print({'torch', 'transformers'} & set(sys.modules))"
  )
  root = pathlib.Path(huggingface.__file__).parents[1]
  run = subprocess.run(
    [sys.executable, "-c", code], cwd=root, capture_output=True, text=True
  )
  assert (run.stdout.strip(), run.returncode) == ("set()", 0), run.stderr


# ------------------------------------------------------------- configuration

SIZES = {k: v for k, v in GATED.items() if not k.endswith("token_id")}
GPT2_SIZES = {k: v for k, v in GPT2.items() if not k.endswith("token_id")}


@pytest.mark.parametrize(
  ("family", "settings"),
  [
    ("gpt2", GPT2_SIZES),
    ("gpt_neox", SIZES),
    ("llama", SIZES),
    ("mistral", SIZES | dict(num_attention_heads=16)),
    ("qwen2", SIZES | dict(num_attention_heads=32)),
    ("qwen3", SIZES | dict(num_attention_heads=32)),
    ("qwen2", SIZES | dict(num_key_value_heads=None, use_sliding_window=True)),
    ("qwen3", SIZES | dict(num_key_value_heads=2, use_sliding_window=True,
      max_window_layers=1, sliding_window=8)),
    ("gpt_neox", SIZES | dict(rotary_pct=0.5, rotary_emb_base=5000)),
    ("llama", SIZES | dict(rope_theta=5e5, rope_scaling=None, head_dim=None)),
    ("llama", SIZES | dict(rope_theta=5e5, rope_scaling=LLAMA3)),
    ("llama", SIZES | dict(rope_theta=5e5, rope_scaling={
      k if k != "rope_type" else "type": v for k, v in LLAMA3.items()
      if k != "original_max_position_embeddings"})),
    ("mistral", SIZES | dict(num_key_value_heads=2, rope_theta=1e6)),
    ("qwen3", SIZES | dict(num_key_value_heads=4, rope_theta=1e6)),
  ],
)  # fmt: skip
def test_older_and_shorter_configurations_mean_what_transformers_reads(
  family, settings
):
  newest = make_config(family, settings).to_dict()
  assert "rope_theta" not in newest
  assert huggingface.config_from_json(
    dict(settings, model_type=family)
  ) == huggingface.config_from_json(newest)


def test_llama3_scaling_is_read_in_both_spellings():
  old = dict(SIZES, model_type="llama", rope_theta=5e5, rope_scaling=LLAMA3)
  new = dict(SIZES, model_type="llama")
  new["rope_parameters"] = LLAMA3 | dict(rope_theta=500000)
  for settings in (old, new):
    config = huggingface.config_from_json(settings)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(
      factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
      original_max_positions=16,
    )  # fmt: skip


@pytest.mark.parametrize(
  ("family", "changes", "message"),
  [
    ("bert", {}, "model_type must be one of .*'llama'.*got 'bert'"),
    (None, {}, "model_type must be one of .* got None"),
    (["llama"], {}, "model_type must be one of"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "must be False in a"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights must be True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be"),
    ("gpt2", {"activation_function": "relu"}, "one of .*'gelu_new'.*'relu'"),
    ("gpt2", {"n_embd": None}, "n_embd must be an integer >= 1, got None"),
    ("gpt2", {"n_head": 5}, "n_head must divide n_embd, got 5 and 32"),
    ("gpt_neox", {"rotary_pct": 2.0}, "at most 1, got 2.0"),
    ("gpt_neox", {"hidden_act": "quick_gelu"}, "got 'quick_gelu'"),
    ("gpt_neox", {"attention_bias": "yes"}, "true or false, got 'yes'"),
    ("llama", {"hidden_act": "relu"}, "hidden_act must be one of .*'relu'"),
    ("llama", {"hidden_size": "32"}, "hidden_size must be an integer >= 1"),
    ("llama", {"vocab_size": True}, "vocab_size must be an integer"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
    ("llama", {"num_key_value_heads": 3}, "num_kv_heads must divide"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved must be False"),
    ("llama", {"sliding_window": 8}, "sliding_window must be None"),
    ("llama", {"partial_rotary_factor": 0.5}, "must be 1 in a llama model"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    ("llama", {"rope_scaling": {"factor": 2.0}}, "factor of 2.0"),
    (
      "llama",
      {"rope_scaling": {"type": "linear", "factor": 2.0}},
      "rope_type must be 'default' or 'llama3', got 'linear'",
    ),
    (
      "llama",
      {"rope_parameters": {"rope_type": "default", "mrope_section": [1]}},
      r"got \['mrope_section'\]",
    ),
    (
      "llama",
      {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e5},
      "rope_theta is both 500000.0 and 10000.0",
    ),
    (
      "llama",
      {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
      "low_freq_factor must be a positive number, got None",
    ),
    (
      "llama",
      {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
      "low_freq_factor must be below high_freq_factor",
    ),
    (
      "qwen3",
      {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
      "rope_type must be 'default' or 'llama3', got 'yarn'",
    ),
    ("qwen2", {"use_mrope": True}, "use_mrope must be False"),
    (
      "qwen2",
      {"layer_types": ["sliding_attention"] * 2},
      "entries, each one of .'full_attention'. .the sliding window is None",
    ),
    ("qwen2", {"layer_types": ["full_attention"]}, "must be 2 entries"),
    ("qwen3", {"layer_types": ["chunked", "chunked"]}, "got .'chunked'"),
    (
      "mistral",
      {"layer_types": ["full_attention", "sliding_attention"]},
      "each one of .'sliding_attention'. ",
    ),
  ],
)
def test_settings_that_are_not_supported_are_errors(family, changes, message):
  sizes = GPT2_SIZES if family == "gpt2" else SIZES
  settings = sizes | dict(num_key_value_heads=4) | changes
  with pytest.raises(ValueError, match=message):
    huggingface.config_from_json(dict(settings, model_type=family))


# -------------------------------------------------------------------- errors


def test_all_problems_with_tensors_are_in_one_error(copied):
  path = copied("llama-scaled")

  def edit(tensors):
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 5), np.float32)
    tensors["model.layers.0.mlp.down_proj.bias"] = np.zeros(32, np.int8)
    tensors["model.layers.0.self_attn.surprise"] = np.zeros(7, np.float32)
    tensors["layers.0.mlp.down_proj.weight"] = np.zeros(1, np.float32)
    tensors["lm_head.weight"] = np.zeros((VOCAB, 32), np.float32)

  edit_tensors(path, edit)
  with pytest.raises(huggingface.CheckpointError) as caught:
    huggingface.load(path)
  assert isinstance(caught.value, ValueError)
  first, *problems = str(caught.value).split("\n  ")
  assert str(path) in first
  assert "llama" in first
  assert problems == [
    "missing: layers.1.self_attn.q_proj.bias, of shape (48,)",
    "missing: norm.weight, of shape (32,)",
    "not a copy of the tied embedding: lm_head.weight",
    "twice: layers.0.mlp.down_proj.weight and "
    "model.layers.0.mlp.down_proj.weight",
    "unexpected: model.layers.0.self_attn.surprise, of shape (7,)",
    "wrong shape: layers.0.mlp.down_proj.weight, expected (32, 48), got (1,)",
    "wrong shape: model.layers.0.mlp.up_proj.weight, expected (48, 32), got "
    "(3, 5)",
    "wrong type: model.layers.0.mlp.down_proj.bias, expected one of ('F16', "
    "'BF16', 'F32', 'F64'), got I8",
  ]


@pytest.mark.parametrize(
  ("name", "tensor"),
  [
    ("gpt2", "transformer.h.0.attn.c_attn.weight"),
    ("neox", "gpt_neox.layers.1.attention.query_key_value.bias"),
  ],
)
def test_fused_tensors_of_a_wrong_shape_are_reported_once(copied, name, tensor):
  path = copied(name)
  edit_tensors(path, lambda t: t.update({tensor: np.zeros(5, np.float32)}))
  with pytest.raises(huggingface.CheckpointError) as caught:
    huggingface.load(path)
  assert str(caught.value).count("\n") == 1
  assert f"wrong shape: {tensor}, expected" in str(caught.value)


@pytest.mark.parametrize("name", ["org/model", "no-such-directory"])
def test_a_name_that_is_no_directory_is_not_fetched(name):
  with pytest.raises(
    FileNotFoundError,
    match=f"no directory '{name}': only local .* nothing is fetched from a hub",
  ):
    huggingface.load(name)


@pytest.mark.parametrize(
  ("file", "contents", "error", "message"),
  [
    ("config.json", None, FileNotFoundError, "there is no config.json in"),
    ("config.json", b"{", ValueError, "config.json is not valid JSON"),
    ("config.json", b"\xff", ValueError, "config.json is not valid JSON"),
    ("config.json", b"[1]", ValueError, "must hold a JSON object, got .1"),
    ("config.json", b"{}", ValueError, "cannot use .*config.json: model_type"),
    ("model.safetensors", None, FileNotFoundError, "there are no weights in"),
    ("model.safetensors", b"", ValueError, "cannot read .* as safetensors"),
    ("model.safetensors", b"x" * 99, ValueError, "cannot read .* as safete"),
  ],
)
def test_files_that_are_missing_or_damaged_are_named(
  copied, file, contents, error, message
):
  path = copied("gpt2")
  if contents is None:
    (path / file).unlink()
  else:
    (path / file).write_bytes(contents)
  with pytest.raises(error, match=message) as caught:
    huggingface.load(path)
  assert str(path) in str(caught.value)


@pytest.mark.parametrize("kept", [4, 500, -1])
def test_truncated_weights_are_an_error(copied, kept):
  file = copied("gpt2") / "model.safetensors"
  file.write_bytes(file.read_bytes()[:kept])
  with pytest.raises(ValueError, match=r"cannot read .*model\.safetensors as"):
    huggingface.load(file.parent)


@pytest.mark.parametrize(
  ("index", "error", "message"),
  [
    ({"weight_map": {"a": "x.safetensors"}}, FileNotFoundError, "x.safetens"),
    ({"weight_map": {"a": "../x.safetensors"}}, ValueError, "to file names"),
    ({"weight_map": {"a": 1}}, ValueError, "must map tensors to file names"),
    ({}, ValueError, "must map tensors to file names"),
  ],
)
def test_an_index_that_names_no_files_is_an_error(
  copied, index, error, message
):
  path = copied("llama-grouped")
  (path / "model.safetensors.index.json").write_text(json.dumps(index))
  with pytest.raises(error, match=message):
    huggingface.load(path)


def test_a_missing_file_of_several_is_named(copied):
  path = copied("llama-grouped")
  shard = min(path.glob("*.safetensors"))
  shard.unlink()
  with pytest.raises(FileNotFoundError, match=rf"names .'{shard.name}'., whic"):
    huggingface.load(path)


# ---------------------------------------------------------------------- save


def make_module(**changes):
  """A Llama whose biases and scales are random too."""
  module = Transformer(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))
  rng = np.random.default_rng(1)
  noise = lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(x.dtype)
  nnx.update(module, jax.tree.map(noise, nnx.state(module)))
  return module


def contents(directory):
  return {f.name: f.read_bytes() for f in pathlib.Path(directory).iterdir()}


LLAMAS = {
  "plain": {},
  "all-switches": dict(
    qkv_bias=True, out_bias=True, mlp_bias=True, tied_embeddings=True,
    head_dim=12, num_kv_heads=1, rope_theta=1000.0, norm_eps=1e-3,
    rope_scaling=RopeScaling(
      factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
      original_max_positions=16,
    ),
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_llama_comes_back_as_it_was(tmp_path, name, dtype):
  module = make_module(**LLAMAS[name])
  huggingface.save_llama(module, tmp_path / "new" / "model", dtype=dtype)
  back = huggingface.load(tmp_path / "new" / "model")
  assert back.config == module.config
  (graphdef, state), (graphdef_back, state_back) = map(
    nnx.split, (module, back)
  )
  assert graphdef == graphdef_back
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(
      a.astype(dtype).astype(jnp.float32), b
    ),
    state,
    state_back,
  )


@pytest.mark.parametrize("name", LLAMAS)
def test_transformers_reads_a_saved_llama(tmp_path, name):
  module = make_module(**LLAMAS[name])
  huggingface.save_llama(module, str(tmp_path), dtype=jnp.float32)
  model, report = read_reference(tmp_path, output_loading_info=True)
  assert not any(report.values()), report
  assert type(model) is transformers.LlamaForCausalLM
  assert model.dtype == torch.float32
  expected = reference_logits(model, TOKENS)
  assert relative_error(module_logits(module), expected) < 1e-4


def test_the_default_file_is_bfloat16_for_transformers_too(tmp_path):
  huggingface.save_llama(make_module(), str(tmp_path))
  assert read_reference(tmp_path).dtype == torch.bfloat16
  model = read_reference(tmp_path, dtype=torch.float32)
  found = module_logits(huggingface.load(tmp_path))
  assert relative_error(found, reference_logits(model, TOKENS)) < 1e-4


@pytest.fixture(scope="module")
def tokenizer():
  texts = ["def f(x):\n  return x + 1\n"] * 20
  return tokenizers.train(texts, vocab_size=280)


def test_a_tokenizer_is_saved_with_the_model(tmp_path, tokenizer):
  module = make_module(vocab_size=300)
  huggingface.save_llama(module, str(tmp_path), tokenizer=tokenizer)
  assert sorted(contents(tmp_path)) == [
    "config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
  ]  # fmt: skip
  back = tokenizers.load(str(tmp_path))
  assert back.fingerprint() == tokenizer.fingerprint()
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  ends = {config.eos_token_id, config.bos_token_id, theirs.eos_token_id}
  assert ends == {tokenizer.eos_token_id}
  text = "def g(y):\n  return y"
  assert theirs(text).input_ids == tokenizer.encode(text)


def test_a_tokenizer_that_is_already_there_is_left_alone(tmp_path, tokenizer):
  tokenizers.save(tokenizer, str(tmp_path))
  file = tmp_path / "tokenizer_config.json"
  file.write_text(file.read_text() + "\n")
  before = file.read_bytes()
  module = make_module(vocab_size=300)
  huggingface.save_llama(module, str(tmp_path), tokenizer=tokenizer)
  assert file.read_bytes() == before
  other = tokenizers.train(["x = 1\n"], vocab_size=270)
  huggingface.save_llama(module, str(tmp_path), tokenizer=other)
  back = tokenizers.load(str(tmp_path))
  assert back.fingerprint() == other.fingerprint()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(norm="layer"), "norm='layer' .not 'rms'."),
    (dict(activation="gelu"), "activation='gelu' .not 'silu'."),
    (dict(gated_mlp=False), "gated_mlp=False"),
    (dict(qk_norm=True), "qk_norm=True"),
    (dict(learned_positions=True), "learned_positions=True"),
    (dict(parallel_residual=True), "parallel_residual=True"),
    (dict(windows=(None, 4)), r"windows=\(None, 4\)"),
    (dict(rotary_dim=4), "rotary_dim=4"),
    (dict(qkv_bias=True), "out_bias=False .not True."),
    (dict(num_heads=6), "num_heads=6 .no divisor of 32."),
    (dict(norm="layer", qk_norm=True), "norm='layer'.*, qk_norm=True"),
  ],
)
def test_what_llama_cannot_express_is_not_saved(tmp_path, changes, message):
  path = tmp_path / "model"
  with pytest.raises(ValueError, match=message):
    huggingface.save_llama(make_module(**changes), str(path))
  assert not path.exists()


def test_equivalent_spellings_of_a_llama_are_saved(tmp_path):
  module = make_module(windows=(None, None), rotary_dim=8)
  huggingface.save_llama(module, str(tmp_path))
  assert huggingface.load(tmp_path).config == SMALL


def test_saving_checks_dtype_and_tokenizer(tmp_path, tokenizer):
  with pytest.raises(ValueError, match="bfloat16 or float16, got int8"):
    huggingface.save_llama(make_module(), str(tmp_path), dtype=jnp.int8)
  with pytest.raises(ValueError, match=r"at most 97 tokens, .* got 2"):
    huggingface.save_llama(make_module(), str(tmp_path), tokenizer=tokenizer)
  assert not contents(tmp_path)


def test_a_failed_save_leaves_the_directory_as_it_was(tmp_path, monkeypatch):
  huggingface.save_llama(make_module(), str(tmp_path))
  before = contents(tmp_path)

  def write_half(tensors, file, metadata):
    pathlib.Path(file).write_bytes(b"half")
    raise OSError("disk full")

  monkeypatch.setattr(huggingface.safetensors.numpy, "save_file", write_half)
  with pytest.raises(OSError, match="disk full"):
    huggingface.save_llama(make_module(mlp_dim=40), str(tmp_path))
  assert contents(tmp_path) == before


def test_an_interrupted_replacement_is_no_checkpoint(tmp_path, monkeypatch):
  huggingface.save_llama(make_module(), str(tmp_path))

  def refuse(self, target):
    raise OSError("interrupted")

  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, "replace", refuse)
    with pytest.raises(OSError, match="interrupted"):
      huggingface.save_llama(make_module(), str(tmp_path))
  assert sorted(contents(tmp_path)) == ["model.safetensors"]
  with pytest.raises(FileNotFoundError, match=r"there is no config\.json"):
    huggingface.load(tmp_path)
