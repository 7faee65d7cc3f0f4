"""`launch.decode` as its users call it."""

import json
import pathlib
import shutil
import subprocess
import sys
import time

import ggufs
import pytest
import several
from files import read_jsonl, write_jsonl

from launch import decode
from models import tokenizers

SMALL = ("--config.max_new_tokens=12", "--config.drafter=model(tokens=3)")
THREE = "--config.batch_size=3"  # of one size, so of the same programs
TEXTS = ["def f(x):\n", "import os", "class A:\n  x = 1\n\n  def", "x", "for"]
RECORDS = [{"id": f"p{i}", "prompt": t} for i, t in enumerate(TEXTS)]


@pytest.fixture
def run(cli, tmp_path):
  """Decodes records; the rows of the output."""

  def call(records, *flags, code=0, config=None):
    source = write_jsonl(tmp_path / "in.jsonl", records)
    out = tmp_path / "out.jsonl"
    asked = (*SMALL, "--nobaseline", THREE, f"--prompts={source}",
             f"--output={out}", "--overwrite", *flags)  # fmt: skip
    assert cli(decode.run, *asked, config=config) == code
    return read_jsonl(out)

  return call


def test_rows_are_in_input_order_with_the_documented_keys(run, tmp_path, pair):
  summary = tmp_path / "s.json"
  picture = tmp_path / "s.svg"
  files = (f"--summary={summary}", f"--svg={picture}")
  rows = run(RECORDS, *files, "--baseline")
  assert picture.read_text("utf-8").startswith("<svg")
  assert [r["id"] for r in rows] == [r["id"] for r in RECORDS]
  tokenizer = tokenizers.load(pair[0])
  for row in rows:
    assert set(row) == {
      "id", "completion", "token_ids", "stop_reason", "num_target_calls",
      "num_drafted", "num_accepted", "accept_counts",
    }  # fmt: skip
    assert row["completion"] == tokenizer.decode(row["token_ids"])
    assert row["stop_reason"] in ("length", "stop_token")
    assert len(row["token_ids"]) <= 12
    assert sum(row["accept_counts"]) == row["num_target_calls"]
    assert row["num_drafted"] == 3 * row["num_target_calls"]
  numbers = json.loads(summary.read_text())
  for name in (
    "block_efficiency", "acceptance_rate", "expected_acceptance_rate",
    "num_tokens", "tokens_per_second", "baseline_tokens_per_second",
    "speedup",
  ):  # fmt: skip
    assert numbers[name] is not None
  assert numbers["speedup_ci"] is None  # two batches say nothing of a spread
  assert numbers["num_tokens"] == sum(len(r["token_ids"]) for r in rows)
  assert numbers["config"]["max_new_tokens"] == 12
  run(RECORDS, f"--summary={summary}")
  assert json.loads(summary.read_text())["speedup"] is None


def test_gguf_file_decodes_like_its_checkpoint_directory(run, tmp_path, pair):
  path = ggufs.write_directory(tmp_path / "model.gguf", pair[0])
  texts = [
    [row["completion"] for row in run(
      RECORDS, "--config.drafter=ngram",
      config=f"configs/huggingface.py:target={target}",
    )]
    for target in (path, pair[0])
  ]  # fmt: skip
  assert texts[0] == texts[1]
  assert all(texts[0])


# ------------------------------------------------------------- lines' settings

OWN = [
  {"id": "plain", "prompt": "def f(x):\n"},
  {"id": "greedy", "prompt": "def f(x):\n", "temperature": 0},
  {"id": "short", "prompt": "import os", "max_new_tokens": 3, "top_k": 2},
  {"id": "many", "prompt": "x", "num_samples": 3, "top_p": 0.9},
  {"id": "seeded", "prompt": "x", "seed": 11, "num_samples": 2},
]


def test_per_row_settings_are_independent_of_batch_composition(run, tmp_path):
  summary = tmp_path / "s.json"
  flags = ("--config.temperature=1.0", f"--summary={summary}")
  rows = run(OWN, *flags, "--config.batch_size=8")
  assert [(r["id"], r.get("sample")) for r in rows] == [
    ("plain", None), ("greedy", None), ("short", None), ("many", 0),
    ("many", 1), ("many", 2), ("seeded", 0), ("seeded", 1),
  ]  # fmt: skip
  assert [len(r["token_ids"]) for r in rows[:3]] == [12, 12, 3]
  assert len({tuple(r["token_ids"]) for r in rows[3:]}) == 5
  assert rows[0]["token_ids"] != rows[1]["token_ids"]
  whole = rows[0]["completion"]
  stop = whole[len(whole) // 2 :][:3]  # most likely across tokens
  changed = [*OWN[:0:-1], OWN[0] | {"stop": ["never there", stop]}]
  by_row = {(r["id"], r.get("sample")): r for r in run(changed, *flags)}
  stopped, *others = (by_row[r["id"], r.get("sample")] for r in rows)
  assert others == rows[1:]
  assert json.loads(summary.read_text())["num_prompts"] == 3
  assert stopped["stop_reason"] == "stop_string"
  assert stopped["completion"] == whole[: whole.index(stop)]
  ids = stopped["token_ids"]
  assert ids == rows[0]["token_ids"][: len(ids)]


# ------------------------------------------------------------------- going on


def test_killed_run_resumes_with_the_same_command(cli, tmp_path, pair):
  """SIGKILL in the middle of a file."""
  records = [{"id": i, "prompt": TEXTS[i % 5]} for i in range(100)]
  prompts = write_jsonl(tmp_path / "in.jsonl", records)
  out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
  flags = (*SMALL, "--nobaseline", "--config.temperature=1",
           f"--prompts={prompts}")  # fmt: skip
  process = subprocess.Popen(
    [sys.executable, "-m", "launch.decode",
     f"--config=configs/huggingface.py:target={pair[0]},draft={pair[1]}",
     *flags, f"--output={out}"],
    cwd=pathlib.Path(__file__).resolve().parents[2],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  with several.limited([process]):
    while not (journal.exists() and journal.read_text().count("\n") > 3):
      assert process.poll() is None
      time.sleep(0.01)
  process.wait()
  assert not out.exists()
  *kept, _ = journal.read_text().split("\n")
  assert 3 < len(kept) < 50
  with journal.open("a") as torn:
    torn.write('{"batch": "')
  assert cli(decode.run, *flags, f"--output={out}") == 0
  assert not journal.exists()
  rows = read_jsonl(out)
  assert [row["id"] for row in rows] == list(range(100))
  whole = tmp_path / "whole.jsonl"
  assert cli(decode.run, *flags, f"--output={whole}") == 0
  assert whole.read_text() == out.read_text()


# ------------------------------------------------------------------- bad input


def test_invalid_lines_are_reported_and_the_rest_decoded(cli, tmp_path, capsys):
  source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  source.write_text(
    '{"id": 1, "prompt": "def f"}\n{"id": 2, "prompt": "def\n\n'
    '{"id": 3, "prompt": ""}\n{"id": 4}\n[5]\n'
    f'{{"id": 6, "prompt": "{"x = 1; " * 300}"}}\n{{"id": 8, "prompt": "a"}}\n'
  )
  code = cli(
    decode.run, *SMALL, THREE, "--nobaseline", f"--prompts={source}",
    f"--output={out}",
  )  # fmt: skip
  assert code == 2
  assert [r["id"] for r in read_jsonl(out)] == [1, 8]
  err = capsys.readouterr().err
  for number in (2, 4, 5, 6, 7):
    assert f"error: {source}:{number}: " in err
  assert "tokens, but only" in err
  assert "Traceback" not in err


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (("--config.drafter=model(tokens=-1)",), "must be >= 1, got -1"),
    (("--config.max_new_tokens=256",), "leaves no room for a prompt"),
    (("--config.top_p=0.0",), "top_p must be in (0, 1]"),
    (("--prompts=/nowhere/in.jsonl",), "/nowhere/in.jsonl"),
    (("--summary=/dev/null/s.json",), "not a writable folder"),
    (("--config.drafter=layer_skip('no.json')",), "no such file of layers"),
    (("--config.drafter=layer_skip",), "needs a checkpoint: layer_skip("),
    (("--config.target=TORN",), "model.safetensors"),
    (("--config.checkpoints.draft=OTHER",), "must share a tokenizer"),
  ],
)  # fmt: skip
def test_invalid_settings_print_one_line_and_exit_with_2(
  cli, capsys, tmp_path, pair, flags, message
):
  for name, source in (("TORN", pair[0]), ("OTHER", pair[1])):
    shutil.copytree(source, tmp_path / name)
  weights = tmp_path / "TORN" / "model.safetensors"
  weights.write_bytes(weights.read_bytes()[:-1000])
  file = tmp_path / "OTHER" / "tokenizer.json"
  tokenizer = json.loads(file.read_text())
  vocab = tokenizer["model"]["vocab"]
  one, two = list(vocab)[300:302]
  vocab[one], vocab[two] = vocab[two], vocab[one]
  file.write_text(json.dumps(tokenizer))
  for name in ("TORN", "OTHER"):
    flags = tuple(x.replace(f"={name}", f"={tmp_path / name}") for x in flags)
  before = {*tmp_path.iterdir()}
  assert cli(decode.run, *flags) == 2
  assert {*tmp_path.iterdir()} == before  # nothing half-written
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
  assert line.startswith("error: ")
