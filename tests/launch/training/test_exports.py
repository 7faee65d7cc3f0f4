"""A run's export replaces no model but its own."""

import json

import ml_collections
import pytest
from absl import flags
from absl.testing import flagsaver

from launch import cli
from launch.training import exports


@pytest.fixture
def check(tmp_path):
  """Checks that a run in tmp_path/w may export to a folder."""
  (tmp_path / "w").mkdir()

  def call(folder, *arguments, **config):
    with flagsaver.flagsaver():
      flags.FLAGS(["test", *arguments])
      exports.check(
        ml_collections.ConfigDict(config),
        f"{tmp_path}/w",
        folder and str(folder),
      )

  return call


def write(folder, weights):
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text("{}")
  (folder / "model.safetensors").write_text(weights)


def test_only_the_runs_own_export_is_replaced(check, tmp_path):
  folder = tmp_path / "model"
  check(folder)
  with exports.noted(f"{tmp_path}/w", str(folder)):
    write(folder, "first")
  check(folder)
  (tmp_path / "link").symlink_to(folder)
  check(tmp_path / "link")
  write(folder, "somebody else's")
  with pytest.raises(ValueError, match="--overwrite replaces it"):
    check(folder)
  check(folder, "--overwrite")


def test_an_export_that_was_cut_short_is_replaced(check, tmp_path):
  def killed():
    with exports.noted(f"{tmp_path}/w", f"{tmp_path}/model"):
      write(tmp_path / "model", "half")
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    killed()
  check(tmp_path / "model")


@pytest.mark.parametrize("text", ["{", "[3]", '{"x": 3}'])
def test_notes_that_are_damaged_tell_nothing(check, tmp_path, text):
  (tmp_path / "w" / "exports.json").write_text(text)
  write(tmp_path / "model", "mine")
  with pytest.raises(ValueError, match="is there already"):
    check(tmp_path / "model")
  with exports.noted(f"{tmp_path}/w", f"{tmp_path}/model"):
    pass
  check(tmp_path / "model")
  record = json.loads((tmp_path / "w" / "exports.json").read_text())
  assert f"{tmp_path}/model" in record


def test_what_the_run_reads_is_not_replaced(check, tmp_path):
  write(tmp_path / "model", "teacher")
  for name in ("teacher", "init_from", "dataset"):
    with pytest.raises(ValueError, match=f"--export is also config.{name}"):
      check(tmp_path / "model", "--overwrite", **{name: f"{tmp_path}/model"})
  with pytest.raises(ValueError, match="--export is also --workdir"):
    check(tmp_path / "w")


def test_the_models_of_the_runs_pair_are_not_replaced(check, tmp_path):
  write(tmp_path / "model", "draft")
  own = {"target": "T", "checkpoints": {"draft": f"{tmp_path}/model"}}
  for pair, role in (
    ({**own, "drafter": "model"}, "draft"),
    ({**own, "drafter": f'eagle3("{tmp_path}/model")'}, "draft"),
    ({**own, "drafter": "ngram", "target": f"{tmp_path}/model"}, "target"),
  ):
    with pytest.raises(ValueError, match=f"is also config.pair's {role}"):
      check(tmp_path / "model", "--overwrite", pair=pair)
  check(tmp_path / "model", "--overwrite", pair={**own, "drafter": "ngram"})


def test_without_an_export_there_is_nothing_to_overwrite(check, tmp_path):
  check(None)
  with pytest.raises(cli.UserError, match="--overwrite: not read with a run"):
    check(None, "--overwrite")
