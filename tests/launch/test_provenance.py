"""Provenance of results."""

import json
import pathlib
import subprocess

import jax
import pytest

import specjax
from configs import common
from launch import provenance


@pytest.fixture
def code(monkeypatch):
  """Commit and state of another checkout."""

  def of(root):
    monkeypatch.setattr(provenance, "_ROOT", root)
    provenance._code.cache_clear()
    return provenance.record()["provenance"]

  yield of
  provenance._code.cache_clear()


def git(folder, *arguments):
  identity = ("-c", "user.name=a", "-c", "user.email=a@b")
  done = subprocess.run(
    ["git", "-C", folder, *identity, *arguments],
    check=True, capture_output=True, text=True,
  )  # fmt: skip
  return done.stdout.strip()


def test_provenance_records_the_commit_and_dirty_state(code, tmp_path):
  assert code(tmp_path)["commit"] is None
  git(tmp_path, "init", "-q")
  (tmp_path / "a.py").write_text("1")
  git(tmp_path, "add", ".")
  git(tmp_path, "commit", "-q", "-m", "first")
  commit = git(tmp_path, "rev-parse", "HEAD")
  (tmp_path / "result.json").write_text("{}")  # no code
  made = code(tmp_path)
  assert (made["commit"], made["dirty"]) == (commit, False)
  (tmp_path / "a.py").write_text("2")
  assert code(tmp_path)["dirty"] is True


def test_git_archive_records_its_commit(code, tmp_path, monkeypatch):
  """As `git archive` makes one, for TPU workers."""
  root = pathlib.Path(provenance.__file__).parents[1]
  attributes = (root / ".gitattributes").read_text()
  assert "launch/provenance.py export-subst" in attributes.splitlines()
  assert provenance._ARCHIVED == "$Format:%H$"
  monkeypatch.setattr(provenance, "_ARCHIVED", "a" * 40)
  assert code(tmp_path)["commit"] == "a" * 40


def test_record_contains_command_config_versions_and_devices(monkeypatch):
  config = common.get_config()
  monkeypatch.setattr("sys.argv", ["decode.py", "--prompts=a b"])
  made = provenance.record(config)
  assert json.loads(json.dumps(made)) == made
  assert made["provenance"]["command"].endswith(" '--prompts=a b'")
  assert made["config"]["rule"] == config.rule
  assert made["machine"]["specjax"] == specjax.__version__
  assert made["machine"]["devices"] == [d.device_kind for d in jax.devices()]
