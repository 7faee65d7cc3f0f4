"""`launch.decode`: what it writes, and how it goes on with it."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
import several
from files import read_jsonl, write_jsonl

from configs import common
from launch import decode, provenance
from specjax.runtime import engine
from specjax.runtime.engine import Completion

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SMALL = ("--config.max_new_tokens=12", "--config.drafter=model(tokens=3)")
TEXTS = ["def f(x):\n", "import os", "class A:\n  x = 1\n\n  def", "x", "for"]


@pytest.fixture
def prompts(tmp_path):
  records = [{"id": f"p{i}", "prompt": t} for i, t in enumerate(TEXTS)]
  return write_jsonl(tmp_path / "in.jsonl", records)


def test_a_stopped_run_resumes_without_losing_or_repeating_a_row(
  cli, tmp_path, prompts, monkeypatch, capsys
):
  flags = (*SMALL, "--nobaseline", "--config.temperature=1.0",
           f"--prompts={prompts}")  # fmt: skip
  whole = tmp_path / "whole.jsonl"
  assert cli(decode.run, *flags, f"--output={whole}") == 0

  out, done = tmp_path / "out.jsonl", []
  real = decode.decode_batch

  def dies_after_two(number, batch, *engines):
    if len(done) == 2:
      raise KeyboardInterrupt
    done.append(batch.prompts[0].id)
    return real(number, batch, *engines)

  monkeypatch.setattr(decode, "decode_batch", dies_after_two)
  with pytest.raises(KeyboardInterrupt):
    cli(decode.run, *flags, f"--output={out}")
  assert [r["id"] for r in read_jsonl(out)] == ["p3", "p4"]  # short ones first
  journal = tmp_path / "out.jsonl.journal"
  for file in (out, journal):
    with file.open("a") as torn:  # as a crash in mid-write leaves it
      torn.write('{"batch": 2, "unit": {"num_to')
  again = []
  monkeypatch.setattr(
    decode, "decode_batch",
    lambda number, batch, *engines: (
      again.append(batch.prompts[0].id), real(number, batch, *engines)
    )[1],
  )  # fmt: skip
  capsys.readouterr()
  assert cli(decode.run, *flags, f"--output={out}") == 0
  err = capsys.readouterr().err
  assert f"{out}: dropped a half-written last line" in err
  assert f"{out}: 2 rows are there already" in err
  assert not set(again) & set(done)
  assert len(again) + len(done) == len(TEXTS)
  assert out.read_text() == whole.read_text()


def test_a_killed_process_resumes_by_id(cli, tmp_path, pair, monkeypatch):
  """SIGKILL in the middle of a file, then the same command."""
  prompts = write_jsonl(
    tmp_path / "in.jsonl",
    [{"id": f"p{i}", "prompt": TEXTS[i % 5]} for i in range(200)],
  )
  flags = (*SMALL, "--nobaseline", f"--prompts={prompts}")
  out = tmp_path / "out.jsonl"
  process = subprocess.Popen(
    [sys.executable, "-m", "launch.decode",
     f"--config=configs/huggingface.py:target={pair[0]},draft={pair[1]}",
     *flags, f"--output={out}"],
    cwd=pathlib.Path(__file__).resolve().parents[2],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  with several.limited([process]):
    while not (out.exists() and out.read_text().count("\n") > 2):
      assert process.poll() is None
      time.sleep(0.01)
  process.wait()
  written = [json.loads(x)["id"] for x in out.read_text().split("\n")[:-1]]
  assert 2 < len(written) < 200
  with out.open("a") as torn:
    torn.write('{"id": "p')
  again = []
  real = decode.decode_batch
  monkeypatch.setattr(
    decode, "decode_batch",
    lambda number, batch, *rest: (
      again.extend(p.id for p in batch.prompts), real(number, batch, *rest)
    )[1],
  )  # fmt: skip
  assert cli(decode.run, *flags, f"--output={out}") == 0
  assert not set(again) & set(written)
  assert len(again) + len(written) == 200
  rows = read_jsonl(out)
  assert [row["id"] for row in rows] == [f"p{i}" for i in range(200)]
  whole = tmp_path / "whole.jsonl"
  few = write_jsonl(
    tmp_path / "few.jsonl",
    [{"id": f"p{i}", "prompt": TEXTS[i]} for i in range(5)],
  )
  assert cli(
    decode.run, *SMALL, "--nobaseline", f"--prompts={few}", f"--output={whole}"
  ) == 0  # fmt: skip
  for i, row in enumerate(rows):
    assert row["token_ids"] == read_jsonl(whole)[i % 5]["token_ids"]


@pytest.fixture
def decoded(monkeypatch):
  """Ids in the order they are decoded, without decoding."""
  ids = []

  def decode_batch(number, batch, *engines):
    ids.extend(p.id for p in batch.prompts)
    done = [
      Completion(
        token_ids=[p.stream % 4096], origins=[1], stop_reason="length",
        num_target_calls=1, num_fed=4, num_drafted=3, num_accepted=0,
        expected_accepted=0.5, total_variation=0.0, accept_counts=[1, 0],
      )
      for p in batch.prompts
    ]  # fmt: skip
    return decode.record_of(batch, done, engine.unit_of(done, 0.5, None))

  monkeypatch.setattr(decode, "decode_batch", decode_batch)
  return ids


def test_a_finished_run_decodes_only_what_was_deleted(
  cli, tmp_path, prompts, decoded, capsys
):
  out, summary = tmp_path / "out.jsonl", tmp_path / "s.json"
  flags = (*SMALL, "--nobaseline", f"--prompts={prompts}", f"--output={out}",
           f"--summary={summary}")  # fmt: skip
  assert cli(decode.run, *flags) == 0
  whole, numbers = out.read_text(), summary.read_text()
  decoded.clear()
  # A machine that was preempted comes back with new copies of the files.
  os.utime(pathlib.Path(prompts))
  assert cli(decode.run, *flags) == 0
  assert decoded == []
  assert (out.read_text(), summary.read_text()) == (whole, numbers)

  lines = whole.splitlines(keepends=True)
  out.write_text("".join(lines[:1] + lines[2:]))
  assert cli(decode.run, *flags) == 0
  assert decoded == ["p1"]
  assert out.read_text() == whole

  # Other settings are another run.
  decoded.clear()
  other = (*flags, "--config.max_new_tokens=11")
  for given in (other, [f for f in other if not f.startswith("--summary")]):
    capsys.readouterr()
    assert cli(decode.run, *given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "max_new_tokens" in line
    assert "--overwrite" in line
  assert (out.read_text(), summary.read_text()) == (whole, numbers)
  assert decoded == []
  assert cli(decode.run, *other, "--overwrite") == 0
  assert len(decoded) == len(TEXTS)


def test_a_dash_is_stdout(cli, tmp_path, prompts, decoded, capsys):
  summary = tmp_path / "s.json"
  flags = (*SMALL, "--nobaseline", f"--prompts={prompts}")
  assert cli(decode.run, *flags, "--output=-", f"--summary={summary}") == 0
  said = capsys.readouterr()
  rows = [json.loads(line) for line in said.out.splitlines()]
  assert [row["id"] for row in rows] == [f"p{i}" for i in range(len(TEXTS))]
  assert "block efficiency" in said.err
  assert cli(decode.run, *flags, "--summary=-") == 0
  printed = json.loads(capsys.readouterr().out)
  written = json.loads(summary.read_text())
  assert printed.keys() == written.keys()
  assert printed["block_efficiency"] == written["block_efficiency"]


def test_an_output_that_is_the_input_is_one_line(
  cli, tmp_path, prompts, decoded, capsys
):
  source = pathlib.Path(prompts)
  before = source.read_bytes()
  flags = (*SMALL, f"--prompts={prompts}", f"--output={prompts}")
  assert cli(decode.run, *flags, "--overwrite") == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: --output would replace --prompts")
  assert source.read_bytes() == before
  assert list(tmp_path.iterdir()) == [source]
  assert not decoded


def test_a_summary_says_what_made_it(cli, tmp_path, prompts, pair, decoded):
  summary = tmp_path / "s.json"
  assert cli(
    decode.run, *SMALL, f"--prompts={prompts}", f"--summary={summary}"
  ) == 0  # fmt: skip
  record = json.loads(summary.read_text())
  made = record["provenance"]
  assert made["prompts"]["path"] == prompts
  assert {n: x["path"] for n, x in made["checkpoints"].items()} == {
    "target": pair[0], "draft": pair[1]
  }  # fmt: skip
  assert f"--summary={summary}" in made["command"]
  assert made["specjax"].keys() >= {"version", "commit", "dirty"}
  assert record["machine"]["jax"] == record["jax"]


def test_settings_know_weights_but_neither_dates_nor_places(tmp_path, pair):
  def settings(target):
    config = common.get_config()
    config.target, config.checkpoints.draft = str(target), pair[1]
    return provenance.settings(config, provenance.checkpoints(config))

  before = settings(pair[0])
  copy = tmp_path / "target"
  shutil.copytree(pair[0], copy)
  for file in copy.iterdir():
    os.utime(file, (0, 0))
  assert settings(copy) == before
  weights = copy / "model.safetensors"
  data = bytearray(weights.read_bytes())
  data[len(data) // 3] ^= 1
  weights.write_bytes(data)
  assert settings(copy) != before


def test_a_partial_file_of_another_run_is_not_continued(
  cli, tmp_path, prompts, capsys
):
  out = tmp_path / "out.jsonl"
  journal = tmp_path / "out.jsonl.journal"
  journal.write_text('{"fingerprint": "another"}\n')
  assert cli(decode.run, *SMALL, f"--prompts={prompts}", f"--output={out}") == 2
  assert "the journal of something else" in capsys.readouterr().err
  assert journal.read_text() == '{"fingerprint": "another"}\n'
