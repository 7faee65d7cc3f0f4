"""Results on disk: refusals, progress that is taken back, one writer."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys

import pytest
import several
from absl import flags
from absl.testing import flagsaver
from files import read_jsonl, write_jsonl

from launch import cli, provenance, results
from launch.studies.rules import __main__ as rules

SETTINGS = {"config": {"seed": 0, "rule": "token"}, "jax": "1.0"}
OTHER = {"config": {"seed": 1, "rule": "token"}, "jax": "1.0"}
# Rows as `launch.decode` has them: numbers, text, and an id that is a list.
IDS = ["a", 2, ["c", 3], "d\u00e9"]
WANTED = {f"key{n}": identity for n, identity in enumerate(IDS)}
_HOLDS = """
import pathlib, sys, time
from launch import results
with results.lock(pathlib.Path(sys.argv[1]), what="W"):
  print("held", flush=True)
  time.sleep(100)
"""


@pytest.fixture
def parsed():
  """Parses a command line, as `main` does."""
  with flagsaver.flagsaver():
    yield lambda *args: cli._parse(rules.run, ["test", *args])


@pytest.fixture(autouse=True)
def no_flags(parsed):
  parsed()


def checks(path, **how):
  results.check({"--output": str(path)}, **how)


def test_what_is_not_there_and_what_is_empty_may_be_written(tmp_path):
  checks(tmp_path / "new.json")
  (tmp_path / "empty.json").touch()
  checks(tmp_path / "empty.json")


def test_ctrl_c_promises_to_go_on_where_progress_is_kept(tmp_path, monkeypatch):
  monkeypatch.setattr(cli, "_kept", {})
  assert cli.interruption() == "interrupted"
  with results.Journal(str(tmp_path / "out"), SETTINGS):
    pass
  assert f"what {tmp_path / 'out'} holds so far is kept" in cli.interruption()


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
  results.write_json(str(link), {"a": 1})
  end.chmod(0o640)
  results.write_json(str(link), {"a": 2})
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
    results.write_json(str(path), {})
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
  parsed(f"--prompts={tmp_path}/o.jsonl.journal", "--overwrite")
  with pytest.raises(ValueError, match="--output would replace --prompts"):
    results.check({}, grown={"--output": f"{tmp_path}/o.jsonl"})
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
  with pytest.raises(ValueError, match="replace the draft"):
    checks(link)
  assert len(json.loads((link).read_text())) > 3


def test_two_outputs_are_two_files(tmp_path):
  one = str(tmp_path / "x")
  for other in (one, f"{tmp_path}/./x", f"{one}.journal", f"{one}.lock"):
    with pytest.raises(ValueError, match="would replace"):
      results.check({"--summary": other}, grown={"--output": one})
  results.check({"--summary": f"{one}.json"}, grown={"--output": one})


def test_where_the_shell_sends_stdout_is_no_output(tmp_path, monkeypatch):
  log = tmp_path / "log"
  with log.open("w") as file:
    status = os.fstat(file.fileno())
    monkeypatch.setattr(os, "fstat", lambda number: status)
    with pytest.raises(ValueError, match="--output is where stdout goes"):
      checks(log)


def test_a_dash_is_stdout_where_a_command_allows_it(capsys):
  results.check({"--output": "-"}, stdout=True)
  results.show_json("-", {"a": 1})
  assert json.loads(capsys.readouterr().out) == {"a": 1}
  with pytest.raises(ValueError, match="must be a file, not '-'"):
    results.check({"--output": "-"})
  with pytest.raises(ValueError, match="stdout holds one result"):
    results.check({"--summary": "-"}, grown={"--output": "-"}, stdout=True)
  with pytest.raises(ValueError, match="--plot must be a file"):
    results.check({}, drawn={"--plot": "-"}, stdout=True)


def test_only_the_result_of_the_same_command_is_replaced(tmp_path, parsed):
  path = tmp_path / "r.json"
  command = ("--seed=3", f"--output={path}")
  parsed(*command)
  for result in ({"x": 1, **provenance.record()}, [provenance.record()]):
    results.write_json(str(path), result)
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
  results.write_json(str(result), provenance.record())
  checks(result, drawn=drawn)
  result.unlink()
  flags.FLAGS.overwrite = True
  checks(result, drawn=drawn)


def test_a_model_is_not_replaced(tmp_path):
  def checks_model(path):
    return results.check_folder("--export", str(path), model=True)

  checks_model(tmp_path)
  assert checks_model(tmp_path / "new" / "folder") == tmp_path / "new/folder"
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="--overwrite replaces it"):
    checks_model(tmp_path)
  with pytest.raises(NotADirectoryError, match="expected a folder"):
    checks_model(tmp_path / "config.json")


def rows_of(record):
  return [
    {"id": IDS[n], "token_ids": [n, 17], "p": 1 / (3 + n)}
    for n in record["numbers"]
  ]


ALL = rows_of({"numbers": range(4)})


def record_of(number):
  return {
    "batch": f"key{number}", "keys": [f"key{number}"], "ids": [IDS[number]],
    "numbers": [number], "unit": {"seconds": 0.5},
  }  # fmt: skip


def growing(path, settings=SETTINGS, wanted=WANTED):
  return results.Journal(str(path), settings, rows_of=rows_of, wanted=wanted)


def run(path, *, settings=SETTINGS, wanted=WANTED, until=4):
  """The numbers of what was missing, up to one: it is made."""
  made = []
  with growing(path, settings, wanted) as journal:
    for number in range(until):
      key = f"key{number}"
      if key not in journal.batches and key in wanted:
        made.append(number)
        journal.add(record_of(number))
    assert [*journal.batches.values()] == [
      record_of(int(name[-1])) for name in journal.batches
    ]
    if until == 4:
      journal.finish(ALL)
  return made


def files(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_stopped_run_goes_on_and_a_finished_one_has_nothing_to_do(tmp_path):
  out = tmp_path / "out.jsonl"
  assert run(out, until=2) == [0, 1]
  assert read_jsonl(out) == ALL[:2]
  assert run(out) == [2, 3]
  assert run(out) == []
  assert read_jsonl(out) == ALL
  assert files(tmp_path).keys() == {"out.jsonl", "out.jsonl.journal"}


@pytest.mark.parametrize(
  ("second", "rest", "words", "made"),
  [
    ('{"batch": "key1", "k', 0, "dropped a half-written last line", [1, 2, 3]),
    ("\0{}\n", 2, ":3: damaged, and done again", [1]),
    ("[1]\n", 2, ":3: damaged, and done again", [1]),
  ],
)
def test_lines_that_are_torn_or_damaged_are_made_again(
  tmp_path, capsys, second, rest, words, made
):
  out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
  run(out)
  header, first, _, *more = journal.read_text().splitlines(keepends=True)
  journal.write_text("".join([header, first, second, *more[:rest]]))
  assert run(out) == made
  assert words in capsys.readouterr().err
  assert read_jsonl(out) == ALL


def test_a_journal_of_something_else_is_refused(tmp_path):
  out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
  for text in ('{"fingerprint": "another"}\n', "[" * 10**5 + "\n", "[1]\n"):
    journal.write_text(text)
    with pytest.raises(ValueError, match="the journal of something else"):
      run(out)
    assert files(tmp_path) == {journal.name: text.encode()}


@pytest.mark.parametrize("until", [2, 4])
def test_other_settings_are_refused_and_named_and_nothing_is_lost(
  tmp_path, until
):
  out = tmp_path / "out.jsonl"
  run(out, until=until)
  before = files(tmp_path)
  with pytest.raises(ValueError, match=r"config\.seed was 0, is 1\)"):
    run(out, settings=OTHER)
  assert files(tmp_path) == before
  flags.FLAGS.overwrite = True
  assert run(out, settings=OTHER, until=1) == [0]
  flags.FLAGS.overwrite = False
  assert run(out, settings=OTHER) == [1, 2, 3]
  out.unlink()  # nothing of that run is left to be lost
  assert run(out) == [0, 1, 2, 3]


def test_a_file_without_a_journal_is_refused(tmp_path):
  out = tmp_path / "out.jsonl"
  out.write_text("mine\n")
  with pytest.raises(ValueError, match=r"no out\.jsonl\.journal tells"):
    run(out)
  assert out.read_text() == "mine\n"
  out.write_text("")  # as mktemp leaves it
  assert run(out) == [0, 1, 2, 3]


def test_rows_that_were_added_are_made_and_no_others(tmp_path):
  out = tmp_path / "out.jsonl"
  few = {key: WANTED[key] for key in ("key3", "key1")}
  assert run(out, wanted=few) == [1, 3]
  write_jsonl(out, [ALL[1], ALL[3]])
  assert run(out) == [0, 2]


@pytest.mark.parametrize(
  ("wanted", "words"),
  [
    ({"key0": "a", "key1": 2}, "none of these prompts"),
    ({**WANTED, "key0": "z", "other": "a"}, "another prompt"),
  ],
)
def test_rows_of_other_prompts_are_not_dropped(tmp_path, wanted, words):
  out = tmp_path / "out.jsonl"
  run(out)
  before = files(tmp_path)
  with pytest.raises(ValueError, match=words):
    run(out, wanted=wanted)
  assert files(tmp_path) == before


def test_rows_that_were_changed_are_not_replaced(tmp_path):
  out = tmp_path / "out.jsonl"
  run(out)
  write_jsonl(out, [*ALL[:2], {**ALL[2], "score": 7}, ALL[3]])
  before = files(tmp_path)
  with pytest.raises(ValueError, match=r":3: .*not as it was\s+written"):
    run(out)
  assert files(tmp_path) == before
  write_jsonl(out, ALL[:2])
  assert run(out) == [2, 3]  # deleted: made again


def test_a_result_that_was_replaced_whole_keeps_its_journal(tmp_path):
  """A journal of a JSON result: `results.check` guards the result itself."""
  out = tmp_path / "r.json"
  out.write_text("{}")
  with results.Journal(str(out), SETTINGS) as first:
    first.add({"batch": 3, "x": [1.5, None]})
  with results.Journal(str(out), SETTINGS) as second:
    assert second.batches == {3: {"batch": 3, "x": [1.5, None]}}
    second.finish()
  assert files(tmp_path) == {"r.json": b"{}"}


def test_a_journal_is_beside_what_a_link_leads_to(tmp_path):
  (tmp_path / "far").mkdir()
  link = tmp_path / "link.jsonl"
  link.symlink_to(tmp_path / "far" / "out.jsonl")
  run(link, until=1)
  assert run(tmp_path / "far" / "out.jsonl") == [1, 2, 3]
  assert link.is_symlink()
  assert read_jsonl(link) == ALL


def test_of_two_writers_the_second_is_refused(tmp_path):
  out = tmp_path / "out.jsonl"
  with growing(out) as first:
    with pytest.raises(ValueError, match=f"by process {os.getpid()} on"):
      growing(out).__enter__()
    first.add(record_of(0))
  assert run(out) == [1, 2, 3]


@pytest.fixture
def lock(tmp_path):
  return lambda: results.lock(tmp_path / "lock", what="W")


def test_a_lock_is_gone_when_it_is_given_back(lock, tmp_path):
  for _ in range(2):
    with contextlib.suppress(KeyError), lock():
      assert (tmp_path / "lock").exists()
      raise KeyError
    assert not (tmp_path / "lock").exists()


def test_the_second_is_told_who_holds_it_until_that_is_killed(
  lock, tmp_path, capsys
):
  holder = subprocess.Popen(
    [sys.executable, "-c", _HOLDS, tmp_path / "lock"], cwd=several.ROOT,
    stdout=subprocess.PIPE, text=True,
  )  # fmt: skip
  name = f"process {holder.pid} on {socket.gethostname()}, started"
  try:
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"W is being written by {name}"):
      lock().__enter__()
  finally:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
  with lock():
    assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()
  said = capsys.readouterr().err
  assert f"took over the lock of W, which was not given back by {name}" in said
  assert "if that runs, end it" not in said


def test_where_nothing_can_be_locked_it_is_said(lock, monkeypatch, capsys):
  def flock(*_):
    raise OSError(results.errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", flock)
  with lock():
    assert "cannot lock W (No locks available)" in capsys.readouterr().err
