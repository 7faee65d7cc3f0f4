"""Provenance of results."""

import hashlib
import json
import pathlib
import subprocess

import pytest
from absl import flags
from absl.testing import flagsaver

import specjax
from configs import common
from launch import cli, provenance
from launch.studies.rules import __main__ as rules
from models.formats.checksums import hash_file


@pytest.fixture
def code(monkeypatch):
  """`provenance.code` of another checkout."""

  def of(root):
    monkeypatch.setattr(provenance, "_ROOT", pathlib.Path(root).resolve())
    monkeypatch.setattr(specjax, "__file__", f"{root}/specjax/__init__.py")
    provenance.code.cache_clear()
    return provenance.code()

  yield of
  provenance.code.cache_clear()


def git(folder, *arguments):
  identity = ("-c", "user.name=a", "-c", "user.email=a@b")
  done = subprocess.run(
    ["git", "-C", folder, *identity, *arguments],
    check=True, capture_output=True, text=True,
  )  # fmt: skip
  return done.stdout.strip()


def test_the_commit_is_named_and_whether_the_code_differs(code, tmp_path):
  git(tmp_path, "init", "-q")
  (tmp_path / "launch").mkdir()
  (tmp_path / "launch" / "a.py").write_text("1")
  git(tmp_path, "add", ".")
  git(tmp_path, "commit", "-q", "-m", "first")
  commit = git(tmp_path, "rev-parse", "HEAD")
  clean = {"version": specjax.__version__, "commit": commit, "dirty": False}
  (tmp_path / "result.json").write_text("{}")  # no code
  assert code(tmp_path) == clean
  (tmp_path / "launch" / "b.py").write_text("2")
  assert code(tmp_path) == clean | {"dirty": True}


def test_what_cannot_be_known_is_null_with_a_reason(
  code, tmp_path, monkeypatch
):
  unknown = {"version": specjax.__version__, "commit": None, "dirty": None}
  actual = code(tmp_path)
  assert actual.pop("note")
  assert actual == unknown
  git(tmp_path, "init", "-q")
  (tmp_path / "copy").mkdir()  # inside somebody else's repository
  assert code(tmp_path / "copy") == unknown | {"note": "no git checkout"}
  monkeypatch.setenv("PATH", "")
  assert code(tmp_path) == unknown | {"note": "git is not installed"}
  monkeypatch.setattr(specjax, "__file__", "/elsewhere/specjax/__init__.py")
  provenance.code.cache_clear()
  assert "apart from the commands" in provenance.code()["note"]


def test_an_archive_knows_its_commit(code, tmp_path):
  """As `git archive` makes one, for TPU workers."""
  root = pathlib.Path(provenance.__file__).parents[1]
  attributes = (root / ".gitattributes").read_text()
  assert "launch/provenance.py export-subst" in attributes.splitlines()
  assert "$Format:%H$" in pathlib.Path(provenance.__file__).read_text()
  provenance._ARCHIVED, before = "a" * 40, provenance._ARCHIVED
  try:
    assert code(tmp_path)["commit"] == "a" * 40
  finally:
    provenance._ARCHIVED = before


def test_a_checkpoints_hash_is_what_sha256sum_says(tmp_path, pair):
  names = sorted(path.name for path in pathlib.Path(pair[0]).iterdir())
  said = subprocess.run(
    f"sha256sum {' '.join(names)} | sha256sum", shell=True, cwd=pair[0],
    capture_output=True, text=True, check=True,
  ).stdout.split()[0]  # fmt: skip
  config = common.get_config()
  config.target, config.checkpoints.draft = pair
  actual = provenance.checkpoints(config)
  assert actual["target"] == {"path": pair[0], "sha256": said}
  assert actual["draft"]["sha256"] != said
  config.drafter = "ngram"
  assert set(provenance.checkpoints(config)) == {"target"}


def test_a_drafter_and_a_rule_of_ones_own_are_hashed(tmp_path, monkeypatch):
  (tmp_path / "of_mine.py").write_text(
    "from launch.assembly import drafting\nfrom specjax import drafters\n"
    "NONE = drafting.entry(drafters.plain)\n",
    "utf-8",
  )
  monkeypatch.syspath_prepend(tmp_path)
  config = common.get_config()
  config.drafter, config.rule = "of_mine:NONE", "token"
  actual = provenance.checkpoints(config)
  assert actual["drafter"]["path"] == str(tmp_path / "of_mine.py")
  assert actual["drafter"]["sha256"] == hash_file(tmp_path / "of_mine.py")
  assert "rule" not in actual
  config.drafter, config.rule = "ngram", "of_mine:RULE"
  assert set(provenance.checkpoints(config)) == {"rule"}
  (tmp_path / "of_mine_too.py").write_text("RULE = None\n")
  both = "with_rule(of_mine:NONE, of_mine_too:RULE)"
  assert provenance.modules("drafter", both) == {
    "drafter": str(tmp_path / "of_mine.py"),
    "drafter (of_mine_too)": str(tmp_path / "of_mine_too.py"),
  }


def test_settings_have_hashes_in_place_of_paths():
  config = common.get_config()
  config.target, config.drafter = "A", 'model("B", tokens=3)'
  config.train = {"teacher": "A", "batch_size": 2}

  def settings(target, draft):
    return provenance.settings(
      config,
      {"target": {"path": "A", "sha256": target},
       'draft of model("B")': {"path": "B", "sha256": draft}},
      rounds=3,
    )  # fmt: skip

  actual = settings("1", "2")
  assert "A" not in json.dumps(actual)
  assert "B" not in json.dumps(actual)
  assert actual["config"]["train"] == {"batch_size": 2}
  assert actual["config"]["drafter"] == 'model("2", tokens=3)'
  assert (actual["rounds"], actual["specjax"]) == (3, specjax.__version__)
  assert settings("0", "2") != actual != settings("1", "0")


def test_a_record_has_everything(tmp_path):
  prompts = tmp_path / "p.jsonl"
  prompts.write_text("x\n")
  with flagsaver.flagsaver():
    arguments = ["--seed=3", f"--prompts={prompts}", "--rule=a b"]
    cli._parse(rules.run, ["test", *arguments])
    made = provenance.record(prompts=str(prompts), files={"--laws": None})
  assert json.loads(json.dumps(made)) == made
  actual = made["provenance"]
  assert actual["command"].endswith(
    f"--seed=3 --prompts={prompts} '--rule=a b'"
  )
  assert actual["specjax"]["version"] == specjax.__version__
  assert actual["prompts"] == {
    "path": str(prompts),
    "sha256": hashlib.sha256(b"x\n").hexdigest(),
  }
  assert actual["files"] == {}
  assert made["machine"]["jax"]
  other = provenance.record(texts=["x\n"])["provenance"]["prompts"]
  assert other["path"] is None
  assert len(other["sha256"]) == 64
  assert flags.FLAGS.is_parsed()
