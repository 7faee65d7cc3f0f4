"""Checkpoints that cannot be read: errors that say why."""

import numpy as np
import pytest
import references
from references import VOCAB

from models.formats import huggingface, weights


def test_all_problems_with_tensors_are_in_one_error(copied):
  path = copied("llama-scaled")

  def edit(tensors):
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 5), np.float32)
    tensors["model.layers.0.mlp.down_proj.bias"] = np.zeros(32, np.int8)
    tensors["model.layers.0.self_attn.surprise"] = np.zeros(7, np.float32)
    tensors["lm_head.weight"] = np.zeros((VOCAB, 32), np.float32)

  references.edit_tensors(path, edit)
  with pytest.raises(weights.CheckpointError) as caught:
    huggingface.load(path)
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
