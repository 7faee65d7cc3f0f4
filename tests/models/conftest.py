"""Checkpoints that transformers saved."""

import pytest
import references
from references import MODELS, TOKENS


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
  """`name -> (directory, logits)` of the models, made when asked for."""
  made = {}

  def get(name):
    if name not in made:
      family, settings, num_files = MODELS[name]
      model = references.make(family, settings)
      path = tmp_path_factory.mktemp(name)
      size = sum(p.numel() * 4 for p in model.parameters())
      model.save_pretrained(
        path, max_shard_size="5GB" if num_files == 1 else size // num_files
      )
      assert (len(list(path.glob("*.safetensors"))) > 1) == (num_files > 1)
      made[name] = path, references.logits(model, TOKENS)
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
