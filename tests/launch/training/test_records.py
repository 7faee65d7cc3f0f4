"""Records of a training run, and those taken back when it goes on."""

import json
import types

import files

from launch.training import records
from launch.training.records import Clock, Records


def make(folder, done):
  return Records(folder, done=done, tokens_per_step=10)


def test_lines_have_their_step_and_tokens(tmp_path, capsys):
  made = make(tmp_path, 0)
  made.metrics(3, {"loss": 1.5})
  made.sample(3, "a", "b")
  expected = {"step": 3, "tokens": 30, "loss": 1.5}
  assert files.read_jsonl(tmp_path / "metrics.jsonl") == [expected]
  assert json.loads(capsys.readouterr().err) == expected
  (line,) = files.read_jsonl(tmp_path / "samples.jsonl")
  assert line == {"step": 3, "prompt": "a", "completion": "b"}


def test_lines_after_the_checkpoint_are_taken_back(tmp_path):
  made = make(tmp_path, 0)
  for step in (1, 2, 3):
    made.metrics(step, {"loss": float(step)})
    made.sample(step, "a", "b")
  with (tmp_path / "metrics.jsonl").open("a") as out:
    out.write('{"step": 4, "lo')  # a line in the middle of which it was killed
  made = make(tmp_path, 2)
  made.metrics(3, {"loss": 7.0})
  rows = files.read_jsonl(tmp_path / "metrics.jsonl")
  assert [row["loss"] for row in rows] == [1.0, 2.0, 7.0]
  rows = files.read_jsonl(tmp_path / "samples.jsonl")
  assert [row["step"] for row in rows] == [1, 2]
  make(tmp_path, 0)
  assert not (tmp_path / "metrics.jsonl").read_text()


def test_a_process_without_a_folder_writes_nothing(tmp_path, capsys):
  made = make(None, 0)
  made.metrics(1, {"loss": 1.0})
  made.sample(1, "a", "b")
  assert not list(tmp_path.iterdir())
  assert capsys.readouterr().err == ""


def test_a_clock_counts_steps_since_it_was_asked(monkeypatch):
  now = [7.0]
  monkeypatch.setattr(
    records, "time", types.SimpleNamespace(perf_counter=lambda: now[0])
  )
  clock = Clock(1)
  assert clock.steps_per_second(1) is None
  for passed, done, expected in ((4, 3, 0.5), (2, 3, None), (1, 7, 4.0)):
    now[0] += passed
    assert clock.steps_per_second(done) == expected
  now[0] += 9
  clock.restart(8)
  now[0] += 1
  assert clock.steps_per_second(10) == 2
