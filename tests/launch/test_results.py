"""Files that commands write, and journals of runs that were killed."""

import json
import os
import pathlib

import pytest
from absl import flags
from absl.testing import flagsaver
from files import read_jsonl

from launch import cli, processes, results
from launch.results import Journal

SETTINGS = {"config": {"seed": 0, "tree": (1, 2)}, "jax": "1"}


@pytest.fixture(autouse=True)
def _no_flags():
  with flagsaver.flagsaver():
    flags.FLAGS(["test"])
    yield


def overwrite():
  flags.FLAGS(["test", "--overwrite"])


def test_existing_files_are_rejected_without_overwrite(tmp_path):
  there = tmp_path / "out.json"
  results.check(there, None, "-", tmp_path / "new" / "out.json")
  there.touch()
  results.check(there)  # an empty file, as mktemp makes it
  there.write_text("x")
  with pytest.raises(cli.UserError, match=r"out\.json exists already: --overw"):
    results.check(tmp_path / "other.json", there)
  (tmp_path / "other.json.journal").touch()  # of a killed run, which goes on
  results.check(tmp_path / "other.json", there)
  (tmp_path / "other.json.journal").unlink()
  overwrite()
  results.check(there)


def test_files_are_written_atomically(tmp_path, monkeypatch):
  path, link = tmp_path / "a" / "b.json", tmp_path / "link"
  link.symlink_to(path)
  results.write_json(link, {"a": 1})
  assert link.is_symlink()
  assert json.loads(path.read_text()) == {"a": 1}
  replace = pathlib.Path.replace

  def full(self, *_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(pathlib.Path, "replace", full)
  with pytest.raises(OSError, match="No space"):
    results.write(path, "half")
  monkeypatch.setattr(pathlib.Path, "replace", replace)
  assert json.loads(path.read_text()) == {"a": 1}
  assert os.listdir(path.parent) == ["b.json"]


def test_only_the_chief_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(processes, "is_chief", lambda: False)
  results.write(tmp_path / "x", "x")
  Journal(str(tmp_path / "out"), SETTINGS).add({"batch": 0})
  (tmp_path / "there").mkdir()
  results.check(tmp_path / "there")
  assert [x.name for x in tmp_path.iterdir()] == ["there"]


def test_dash_writes_to_stdout(capsysbinary):
  results.write("-", results.dumps([{"a": "é"}, 2]))
  results.write("-", b"\xff")
  assert capsysbinary.readouterr().out == b'{"a": "\\u00e9"}\n2\n\xff'


@pytest.mark.parametrize(
  ("content", "words"),
  [
    (b'{"a": 1}\n{"a"\n', "in.jsonl:2: not JSON"),
    (b"[1]\n", "in.jsonl:1: expected a JSON object"),
    ('{"a": 1}'.encode("utf-16"), "in.jsonl: not UTF-8"),
  ],
)
def test_invalid_jsonl_lines_are_rejected_with_their_location(
  tmp_path, content, words
):
  path = tmp_path / "in.jsonl"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=words):
    list(results.read_jsonl(path))


def test_journal_resumes_after_a_killed_run(tmp_path, capsys):
  output = str(tmp_path / "out.jsonl")
  path = tmp_path / "out.jsonl.journal"
  first = Journal(output, SETTINGS)
  first.add({"batch": "b", "rows": [1]})
  first.add({"batch": 7, "rows": [2]})
  with path.open("a") as torn:
    torn.write('{"batch": 8, "ro')
  capsys.readouterr()
  again = Journal(output, SETTINGS)
  assert str(path) in capsys.readouterr().err
  assert again.batches == first.batches
  assert list(again.batches) == ["b", 7]
  again.add({"batch": 8, "rows": []})
  assert [x.get("batch") for x in read_jsonl(path)] == [None, "b", 7, 8]
  again.finish()
  assert not path.exists()


def test_journal_with_other_settings_is_rejected_with_a_diff(tmp_path):
  output = str(tmp_path / "out.jsonl")
  Journal(output, {"config": {}})  # of a run that finished no batch
  Journal(output, SETTINGS).add({"batch": 0})
  other = {"config": {"seed": 1, "tree": [1, 2]}, "jax": "1", "traced": True}
  with pytest.raises(cli.UserError) as refused:
    Journal(output, other)
  assert "(config.seed was 0, is 1, traced was None, is True)" in str(
    refused.value
  )
  overwrite()
  assert Journal(output, other).batches == {}
