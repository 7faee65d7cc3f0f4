"""What commands write to, and what they refuse."""

import json
import os
import stat

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import cli, outputs, provenance
from launch.studies.rules import __main__ as rules


@pytest.fixture
def parsed():
  """Parses a command line, as `main` does."""
  with flagsaver.flagsaver():
    yield lambda *args: cli._parse(rules.run, ["test", *args])


@pytest.fixture(autouse=True)
def no_flags(parsed):
  parsed()


def checks(path, **how):
  outputs.check({"--output": str(path)}, **how)


def test_what_is_not_there_and_what_is_empty_may_be_written(tmp_path):
  checks(tmp_path / "new.json")
  (tmp_path / "empty.json").touch()
  checks(tmp_path / "empty.json")


def test_what_is_no_file_is_refused_by_its_kind(tmp_path):
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "folder").mkdir()
  (tmp_path / "loop").symlink_to(tmp_path / "loop")
  (tmp_path / "gone").symlink_to(tmp_path / "nowhere" / "x")
  for path, words in (
    (tmp_path / "pipe", "is a pipe"),
    (tmp_path / "folder", "is a folder"),
    (tmp_path / "loop", "is a link to itself"),
    ("/dev/full", "is a device"),
    ("/nowhere/x.json", "no such folder"),
    (tmp_path / "gone", "no such folder"),
    ("gs://bucket/x.json", "must be a local path"),
  ):
    with pytest.raises((ValueError, OSError), match=words):
      checks(path)
  assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
  assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_links_are_written_through(tmp_path):
  (tmp_path / "far").mkdir()
  end, link = tmp_path / "far" / "end.json", tmp_path / "link.json"
  link.symlink_to(end)
  checks(link)
  outputs.write_json(str(link), {"a": 1})
  end.chmod(0o640)
  outputs.write_json(str(link), {"a": 2})
  assert link.is_symlink()
  assert json.loads(end.read_text()) == {"a": 2}
  assert stat.S_IMODE(end.stat().st_mode) == 0o640
  assert [path.name for path in end.parent.iterdir()] == ["end.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
  path = tmp_path / "x.json"
  path.write_text("old")

  def full(_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match="No space left"):
    outputs.write_json(str(path), {})
  assert path.read_text() == "old"
  assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_no_input_is_an_output(tmp_path, parsed):
  prompts = tmp_path / "p.jsonl"
  prompts.write_text('{"prompt": "x"}\n')
  hard, soft = tmp_path / "hard", tmp_path / "soft"
  os.link(prompts, hard)
  soft.symlink_to(prompts)
  parsed(f"--prompts={prompts}", "--overwrite")
  for path in (prompts, hard, soft, tmp_path / "x" / ".." / "p.jsonl"):
    (tmp_path / "x").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="--output would replace --prompts"):
      checks(path)
  parsed(f"--prompts={tmp_path}/o.jsonl.partial", "--overwrite")
  with pytest.raises(ValueError, match="--output would replace --prompts"):
    outputs.check({}, grown={"--output": f"{tmp_path}/o.jsonl"})
  with pytest.raises(ValueError, match="--output would replace --laws"):
    checks(soft, inputs={"--laws": str(prompts)})
  assert prompts.read_text() == '{"prompt": "x"}\n'


def test_neither_the_config_nor_the_models_are_outputs(pair, parsed, tmp_path):
  target, draft = pair
  parsed(
    f"--config=configs/huggingface.py:target={target},draft={draft}",
    "--overwrite",
  )
  with pytest.raises(ValueError, match="replace --config"):
    checks("configs/huggingface.py")
  link = tmp_path / "link"
  link.symlink_to(f"{draft}/config.json")
  with pytest.raises(ValueError, match=r"replace config\.draft"):
    checks(link)
  assert len(json.loads((link).read_text())) > 3


def test_two_outputs_are_two_files(tmp_path):
  one = str(tmp_path / "x")
  for other in (one, f"{tmp_path}/./x", f"{one}.journal", f"{one}.partial"):
    with pytest.raises(ValueError, match="would replace"):
      outputs.check({"--summary": other}, grown={"--output": one})
  outputs.check({"--summary": f"{one}.json"}, grown={"--output": one})


def test_where_the_shell_sends_stdout_is_no_output(tmp_path, monkeypatch):
  log = tmp_path / "log"
  with log.open("w") as file:
    there = os.fstat(file.fileno())
    monkeypatch.setattr(os, "fstat", lambda number: there)
    with pytest.raises(ValueError, match="--output is where stdout goes"):
      checks(log)


def test_a_dash_is_stdout_where_a_command_allows_it(capsys):
  outputs.check({"--output": "-"}, stdout=True)
  outputs.show_json("-", {"a": 1})
  assert json.loads(capsys.readouterr().out) == {"a": 1}
  with pytest.raises(ValueError, match="must be a file, not '-'"):
    outputs.check({"--output": "-"})
  with pytest.raises(ValueError, match="stdout holds one result"):
    outputs.check({"--summary": "-"}, grown={"--output": "-"}, stdout=True)
  with pytest.raises(ValueError, match="--plot must be a file"):
    outputs.check({}, drawn={"--plot": "-"}, stdout=True)


def test_only_the_result_of_the_same_command_is_replaced(tmp_path, parsed):
  path = tmp_path / "r.json"
  command = ("--seed=3", f"--output={path}")
  parsed(*command)
  for result in ({"x": 1, **provenance.record()}, [provenance.record()]):
    outputs.write_json(str(path), result)
    for same in (command, ("--seed=3",), ("--output", "x", "--seed", "3")):
      parsed(*same)
      checks(path)
    parsed("--seed=4", f"--output={path}")
    with pytest.raises(
      ValueError, match=r"\(it has --seed=3, this command has --seed=4\)"
    ):
      checks(path)
    parsed("--seed=4", "--overwrite")
    checks(path)
    flags.FLAGS.overwrite = False
    parsed(*command)
  for text in ("mine", '{"x": 1}', "[]", "[" * 10**5, '{"provenance": 3}'):
    path.write_text(text)
    with pytest.raises(ValueError, match="does not say that this command"):
      checks(path)
    assert path.read_text() == text


def test_figures_are_replaced_with_their_result_only(tmp_path, parsed):
  result, figure = tmp_path / "r.json", tmp_path / "r.svg"
  figure.write_text("<svg/>")
  drawn = {"--plot": str(figure)}
  with pytest.raises(ValueError, match=r"--plot: .* is there"):
    checks(result, drawn=drawn)
  outputs.write_json(str(result), provenance.record())
  checks(result, drawn=drawn)
  result.unlink()
  flags.FLAGS.overwrite = True
  checks(result, drawn=drawn)


def test_a_model_is_not_replaced(tmp_path):
  outputs.check_no_model("--export", str(tmp_path))
  outputs.check_no_model("--export", str(tmp_path / "new" / "folder"))
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="--overwrite replaces it"):
    outputs.check_no_model("--export", str(tmp_path))
  with pytest.raises(NotADirectoryError, match="expected a folder"):
    outputs.check_no_model("--export", str(tmp_path / "config.json"))
