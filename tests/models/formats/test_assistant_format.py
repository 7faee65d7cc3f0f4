"""Gemma 4's assistants in the files that transformers writes."""

import json
import shutil

import assistants
import jax.numpy as jnp
import numpy as np
import pytest
import references

from models import checkpoints
from models.formats import head_checkpoints
from models.head_shapes import Target


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("pair")
  return path, assistants.save(path, **assistants.ORDERED)[1]


@pytest.fixture(scope="module")
def about(saved):
  """The target without its arrays, but for an embedding."""
  config = checkpoints.read_config(str(saved[0] / "target"))
  return Target(
    num_layers=config.num_layers, embed_dim=32, vocab_size=96, config=config,
    embedding=jnp.arange(96 * 32.0).reshape(96, 32),
  )  # fmt: skip


@pytest.fixture
def copied(saved, tmp_path):
  return shutil.copytree(saved[0] / "assistant", tmp_path / "assistant")


def edit(path, change, nested=False):
  file = path / "config.json"
  config = json.loads(file.read_text())
  (config["text_config"] if nested else config).update(change)
  file.write_text(json.dumps(config))


def test_unused_tensors_and_other_prefixes_load_equal_weights(copied, about):
  before = head_checkpoints.load(str(copied), about)

  def change(tensors):
    for name in [*tensors]:
      if name.startswith("model."):
        tensors[name.replace("model.", "mtp.", 1)] = tensors.pop(name)
    tensors["mtp.layers.0.self_attn.k_proj.weight"] = np.ones((3, 3), "f4")
    tensors["mtp.layers.1.self_attn.v_norm.weight"] = np.ones(3, "f4")
    tensors["lm_head.weight"] = tensors["mtp.embed_tokens.weight"].copy()

  references.edit_tensors(copied, change)
  after = head_checkpoints.load(str(copied), about)
  for name in ("enter", "lm_head", "centroids"):
    np.testing.assert_array_equal(
      getattr(before.module, name).weight[...],
      getattr(after.module, name).weight[...],
    )


@pytest.mark.parametrize(
  ("change", "nested", "message"),
  [
    ({"backbone_hidden_size": 24}, False, "is 24, but the target's is 32"),
    ({"vocab_size": 92}, True, "is 92, but the target's is 96"),
    ({"enable_moe_block": True}, True, "must be False, got True"),
    (
      {"num_key_value_heads": 3, "per_layer_config": None}, True,
      "3 key/value heads of 8 channels in sliding layers",
    ),
  ],
)  # fmt: skip
def test_incompatible_settings_are_rejected_by_name(
  copied, about, change, nested, message
):
  edit(copied, change, nested=nested)
  with pytest.raises(ValueError, match=message):
    head_checkpoints.describe(str(copied), about)
