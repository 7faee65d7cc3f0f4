"""`launch.decode` with lines that ask for settings of their own."""

import json

import pytest
from files import read_jsonl, write_jsonl

from launch import decode

pytestmark = pytest.mark.usefixtures("quick_to_compile")
SMALL = ("--config.max_new_tokens=12", "--config.drafter=model(tokens=3)",
         "--config.temperature=1.0", "--nobaseline")  # fmt: skip
RECORDS = [
  {"id": "plain", "prompt": "def f(x):\n"},
  {"id": "greedy", "prompt": "def f(x):\n", "temperature": 0},
  {"id": "short", "prompt": "import os", "max_new_tokens": 3, "top_k": 2},
  {"id": "many", "prompt": "x", "num_samples": 3, "top_p": 0.9},
  {"id": "seeded", "prompt": "x", "seed": 11, "num_samples": 2},
]


@pytest.fixture(scope="module")
def decoded(cli, tmp_path_factory):
  """Decodes records; the rows of the output."""

  def of(records, *flags):
    folder = tmp_path_factory.mktemp("rows")
    source = write_jsonl(folder / "in.jsonl", records)
    out = folder / "out.jsonl"
    code = cli(decode.run, *SMALL, *flags, f"--prompts={source}",
               f"--output={out}", f"--summary={folder / 's.json'}")  # fmt: skip
    assert code == 0
    of.summary = json.loads((folder / "s.json").read_text())
    return read_jsonl(out)

  return of


@pytest.fixture(scope="module")
def rows(decoded):
  return decoded(RECORDS, "--config.batch_size=8")


def test_rows_of_one_batch_have_what_they_asked_for(rows):
  assert [(r["id"], r.get("sample")) for r in rows] == [
    ("plain", None), ("greedy", None), ("short", None), ("many", 0),
    ("many", 1), ("many", 2), ("seeded", 0), ("seeded", 1),
  ]  # fmt: skip
  assert [len(r["token_ids"]) for r in rows[:3]] == [12, 12, 3]
  assert len({tuple(r["token_ids"]) for r in rows[3:]}) == 5
  assert rows[0]["token_ids"] != rows[1]["token_ids"]


def test_rows_are_the_same_whatever_they_stand_beside(rows, decoded):
  again = decoded(RECORDS[::-1], "--config.batch_size=3")
  by_row = {(r["id"], r.get("sample")): r for r in again}
  assert [by_row[r["id"], r.get("sample")] for r in rows] == rows
  # Five rows of "x" and "import os" fill two batches, "def f" is the third.
  assert decoded.summary["num_prompts"] == 3
  assert decoded.summary["num_units"] == 2
  (renamed, _) = decoded([{**RECORDS[-1], "id": "other"}])
  assert renamed["token_ids"] == rows[-2]["token_ids"]


def test_a_completion_ends_before_its_stop_string(rows, decoded):
  whole = rows[0]["completion"]
  at = len(whole) // 2
  stop = whole[at : at + 3]  # most likely across tokens
  again = decoded(
    [{**RECORDS[0], "stop": ["never there", stop]}, *RECORDS[1:]],
    "--config.batch_size=8",
  )
  assert again[0]["stop_reason"] == "stop_string"
  assert again[0]["completion"] == whole[: whole.index(stop)]
  ids = again[0]["token_ids"]
  assert ids == rows[0]["token_ids"][: len(ids)]
  assert len(ids) < 12
  assert again[1:] == rows[1:]


def test_a_run_goes_on_with_samples_and_settings_that_were_added(
  cli, tmp_path, capsys
):
  out, source = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
  flags = (*SMALL, f"--prompts={source}", f"--output={out}")
  first = [{"id": 0, "prompt": "x", "num_samples": 2}]
  write_jsonl(source, first)
  assert cli(decode.run, *flags) == 0
  before = read_jsonl(out)
  write_jsonl(source, [{**first[0], "num_samples": 3}])
  assert cli(decode.run, *flags) == 0
  assert "2 rows are there already" in capsys.readouterr().err
  assert read_jsonl(out)[:2] == before
  assert [r["sample"] for r in read_jsonl(out)] == [0, 1, 2]
  write_jsonl(source, [{**first[0], "temperature": 0.5}])
  assert cli(decode.run, *flags) == 2
  assert "is of another prompt" in capsys.readouterr().err
