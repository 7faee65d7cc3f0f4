"""Checkpoints that cannot be read: errors that say why."""

import json

import numpy as np
import pytest
import references
from references import VOCAB

from models.formats import huggingface


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

  references.edit_tensors(path, edit)
  with pytest.raises(huggingface.CheckpointError) as caught:
    huggingface.load(path)
  assert isinstance(caught.value, ValueError)
  first, *problems = str(caught.value).split("\n  ")
  assert str(path) in first
  assert "llama" in first
  assert problems == [
    "missing: layers.1.self_attn.q_proj.bias, of shape (48,)",
    "missing: norm.weight, of shape (32,)",
    "not a copy of the tied embedding: lm_head.weight (with "
    "tie_word_embeddings false it is read as it is)",
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
  references.edit_tensors(
    path, lambda t: t.update({tensor: np.zeros(5, np.float32)})
  )
  with pytest.raises(huggingface.CheckpointError) as caught:
    huggingface.load(path)
  assert str(caught.value).count("\n") == 1
  assert f"wrong shape: {tensor}, expected" in str(caught.value)


def test_a_directory_that_is_not_there_is_named():
  with pytest.raises(FileNotFoundError, match="no directory 'no-such"):
    huggingface.load("no-such-directory")


@pytest.mark.parametrize(
  ("file", "contents", "error", "message"),
  [
    ("config.json", None, FileNotFoundError, "there is no config.json in"),
    ("config.json", b"{", ValueError, "config.json is not valid JSON"),
    ("config.json", b"\xff", ValueError, "config.json is not valid JSON"),
    ("config.json", b"[" * 99_999, ValueError, "is not valid JSON: maximum"),
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


def edit_config(path, **changes):
  file = path / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
  ("layers", "message"),
  [
    (2**20, r"is of 1048576 layers, and the tensors beside it are of 2$"),
    (3, r"is of 3 layers, and the tensors beside it are of 2$"),
    (2**40, "n_layer must be at most 1048576"),
  ],
)
def test_more_layers_than_the_files_have_are_refused_at_once(
  copied, layers, message
):
  path = copied("gpt2")
  edit_config(path, n_layer=layers)
  with pytest.raises(ValueError, match=message):
    huggingface.load(path)


@pytest.mark.parametrize("ends", [2**31, [1, -(2**31) - 1], "2", 1.0])
def test_ends_of_text_that_are_no_ids_are_refused(copied, ends):
  path = copied("gpt2")
  edit_config(path, eos_token_id=ends)
  with pytest.raises(ValueError, match=r"eos_token_id in .* must be 32-bit"):
    huggingface.eos_token_ids(path)


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
