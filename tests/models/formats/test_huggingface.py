"""Checkpoints: the same logits as transformers, or errors that say why."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import torch
from flax import nnx
from references import MODELS, TOKENS, VOCAB

from models.formats import huggingface, loading, weights
from models.networks.transformer import as_language_model

LENGTHS = (2, 7, 4)  # of the prompts of a ragged batch
CHUNKS = (3, 1, 1, 1)  # fed after the prompts


def decoding_errors(path):
  """Relative errors of a ragged prompt, then of every chunk, in float64.

  Passes of several tokens are as wide as the prompt, junk at their end: of two
  widths, so two programs.
  """
  reference = references.read(path, dtype=torch.float64)
  expected = references.logits(reference, TOKENS)
  module = loading.load(huggingface.source(str(path)), dtype=jnp.float64)
  model, params = as_language_model(module)
  assert module.embed.embedding.get_value().dtype == jnp.float64
  apply = jax.jit(model.apply)
  width, at = max(LENGTHS), np.array(LENGTHS)
  inside = np.arange(width) < at[:, None]
  tokens = np.where(inside, TOKENS[:, :width], 1)  # junk beyond the prompts
  cache = model.init_cache(len(LENGTHS), TOKENS.shape[1])
  output, cache = apply(params, jnp.asarray(tokens), cache)
  errors = [
    references.relative_error(
      output.logits[inside], expected[:, :width][inside]
    )
  ]
  cache = cache.replace(length=jnp.asarray(at))
  for chunk in CHUNKS:
    columns = at[:, None] + np.arange(chunk)
    tokens = np.take_along_axis(TOKENS, columns, axis=1)
    if chunk > 1:
      junk = ((0, 0), (0, width - chunk))
      tokens = np.pad(tokens, junk, constant_values=1)
    output, cache = apply(params, jnp.asarray(tokens), cache)
    wanted = np.take_along_axis(expected, columns[..., None], axis=1)
    actual = output.logits[:, :chunk]
    errors.append(references.relative_error(actual, wanted))
    at = at + chunk
    cache = cache.replace(length=jnp.asarray(at))
  return errors


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_cached_decoding_match_transformers(saved, name):
  """Up to float32, in which transformers takes norms and rotations."""
  with jax.enable_x64(True):
    errors = decoding_errors(saved(name)[0])
  assert max(errors) < 2e-5, errors


@pytest.mark.parametrize("name", ["gpt2", "neox", "llama-scaled"])
def test_renamed_tensors_buffers_and_tied_copies_are_accepted(copied, name):
  path = copied(name)
  expected = references.module_logits(loading.load(huggingface.source(path)))

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

  references.edit_tensors(path, edit)
  np.testing.assert_array_equal(
    references.module_logits(loading.load(huggingface.source(path))), expected
  )


@pytest.mark.parametrize("rooted", [True, False])
def test_gpt2_attention_scaling_follows_config(tmp_path, rooted):
  settings = dict(
    scale_attn_by_inverse_layer_idx=True, scale_attn_weights=rooted
  )
  model = references.make("gpt2", references.GPT2 | settings)
  model.save_pretrained(tmp_path)
  actual = references.module_logits(loading.load(huggingface.source(tmp_path)))
  expected = references.logits(model, TOKENS)
  assert references.relative_error(actual, expected) < 1e-4
  references.edit_config(tmp_path, scale_attn_by_inverse_layer_idx=False)
  other = references.module_logits(loading.load(huggingface.source(tmp_path)))
  assert references.relative_error(other, expected) > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_load_as_float32_or_unchanged(tmp_path, dtype):
  model = references.make(*MODELS["llama-grouped"][:2])
  model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
  module = loading.load(huggingface.source(tmp_path))
  assert {x.dtype for x in jax.tree.leaves(nnx.state(module))} == {
    jnp.dtype("float32")
  }
  model = references.read(tmp_path, dtype=torch.float32)
  expected = references.logits(model, TOKENS)
  actual = references.module_logits(module)
  assert references.relative_error(actual, expected) < 1e-4
  same = loading.load(huggingface.source(tmp_path), dtype=dtype)
  assert same.dtype == dtype
  rounded = jax.tree.map(lambda x: x.astype(dtype), nnx.state(module))
  jax.tree.map(np.testing.assert_array_equal, nnx.state(same), rounded)


def test_neither_torch_nor_transformers_is_imported():
  code = (
    "import sys, models.formats.huggingface; "
    "print({'torch', 'transformers'} & set(sys.modules))"
  )
  root = pathlib.Path(huggingface.__file__).parents[2]
  run = subprocess.run(
    [sys.executable, "-c", code], cwd=root, capture_output=True, text=True
  )
  assert (run.stdout.strip(), run.returncode) == ("set()", 0), run.stderr


def test_all_tensor_problems_are_reported_in_one_error(copied):
  path = copied("llama-scaled")

  def edit(tensors):
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 5), np.float32)
    tensors["model.layers.0.mlp.down_proj.bias"] = np.zeros(32, np.int8)
    tensors["model.layers.0.self_attn.surprise"] = np.zeros(7, np.float32)
    tensors["lm_head.weight"] = np.zeros((VOCAB, 32), np.float32)

  references.edit_tensors(path, edit)
  with pytest.raises(weights.CheckpointError) as caught:
    loading.load(huggingface.source(path))
  _, *problems = str(caught.value).split("\n  ")
  assert [problem.split(": ")[0] for problem in problems] == [
    "missing", "not a copy of the tied embedding", "unexpected",
    "wrong shape", "wrong type",
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("file", "contents", "error", "message"),
  [
    ("config.json", None, FileNotFoundError, "there is no config.json in"),
    ("config.json", b"{", ValueError, "config.json is not valid JSON"),
    ("config.json", b"{}", ValueError, "cannot use .*config.json: model_type"),
    ("model.safetensors", None, FileNotFoundError, "there are no weights in"),
    ("model.safetensors", b"x" * 99, ValueError, "cannot read .* as safete"),
  ],
)
def test_missing_or_damaged_files_are_named(
  copied, file, contents, error, message
):
  path = copied("gpt2")
  if contents is None:
    (path / file).unlink()
  else:
    (path / file).write_bytes(contents)
  with pytest.raises(error, match=message) as caught:
    loading.load(huggingface.source(path))
  assert str(path) in str(caught.value)
