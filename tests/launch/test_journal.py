"""What a journal takes back from disk, and what not."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver
from files import read_jsonl

from launch import journal

SETTINGS = {"config": {"seed": 0, "rule": "token"}, "jax": "1.0"}
# Rows as `launch.decode` has them: numbers, text, and an id that is a list.
IDS = ["a", 2, ["c", 3], "d\u00e9"]
WANTED = {f"key{n}": identity for n, identity in enumerate(IDS)}


@pytest.fixture(autouse=True)
def parsed_flags(monkeypatch):
  monkeypatch.setattr(journal.outputs.os, "fsync", lambda file: None)
  with flagsaver.flagsaver():
    flags.FLAGS(["test"])
    yield


def row_of(number):
  return {"id": IDS[number], "token_ids": [number, 17], "p": 1 / (3 + number)}


def record_of(number):
  return {
    "keys": [f"key{number}"], "ids": [IDS[number]], "unit": {"seconds": 0.5},
    "rows": [{"token_ids": [number, 17], "expected": 1 / 3}],
  }  # fmt: skip


def run(path, *, settings=SETTINGS, wanted=WANTED, until=4):
  """Makes what is missing, up to a number; what was made, and all records."""
  made = []
  with journal.Results(str(path), settings, wanted) as results:
    done = {key for record in results.records for key in record["keys"]}
    for number in range(until):
      if f"key{number}" not in done and f"key{number}" in wanted:
        made.append(number)
        results.add(record_of(number), [row_of(number)])
    if until == 4:
      results.finish([row_of(n) for n in range(len(IDS))])
    return made, results.records


def test_a_stopped_run_goes_on_and_a_finished_one_has_nothing_to_do(tmp_path):
  out = tmp_path / "out.jsonl"
  assert run(out, until=2)[0] == [0, 1]
  assert read_jsonl(out) == [row_of(0), row_of(1)]
  assert run(out)[0] == [2, 3]
  assert run(out)[0] == []
  assert read_jsonl(out) == [row_of(n) for n in range(4)]
  assert {path.name for path in tmp_path.iterdir()} == {
    "out.jsonl", "out.jsonl.journal"
  }  # fmt: skip


@pytest.mark.parametrize("finished", [False, True])
def test_no_flipped_bit_is_a_traceback_or_an_altered_record(
  tmp_path, finished, capsys
):
  """Of the journal: what is damaged is made again, and said."""
  out = tmp_path / "out.jsonl"
  path = tmp_path / f"out.jsonl.{'journal' if finished else 'partial'}"
  run(out, until=4 if finished else 3)
  data, rows = path.read_bytes(), out.read_bytes()
  missing, records = run_again(out, path, data, rows)
  sound = {record["keys"][0]: record for record in records}
  header = data.index(b"\n")
  for bit in range(0, 8 * len(data), 41):
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    capsys.readouterr()
    made, records = run_again(out, path, bytes(damaged), rows)
    said = capsys.readouterr().err
    assert "damaged" in said or "half-written" in said
    assert (made == missing) == (bit // 8 < header)
    assert {record["keys"][0]: record for record in records} == sound
    assert read_jsonl(out) == [row_of(n) for n in range(4)]


def run_again(out, path, data, rows):
  """A run over files as they were, one perhaps damaged."""
  for file in out.parent.iterdir():
    file.unlink()
  path.write_bytes(data)
  out.write_bytes(rows)
  return run(out)


def test_a_journal_of_which_nothing_is_sound_is_refused(tmp_path):
  out = tmp_path / "out.jsonl"
  for text in ('{"fingerprint": "another"}\n', "[" * 10**5 + "\n", "[1]\n"):
    partial = tmp_path / "out.jsonl.partial"
    partial.write_text(text)
    with pytest.raises(ValueError, match="the journal of something else"):
      run(out)
    assert partial.read_text() == text


@pytest.mark.parametrize("until", [2, 4])
def test_other_settings_are_refused_and_named_and_nothing_is_lost(
  tmp_path, until
):
  out = tmp_path / "out.jsonl"
  run(out, until=until)
  before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  other = {"config": {"seed": 1, "rule": "token"}, "jax": "1.0"}
  with pytest.raises(ValueError, match=r"config\.seed was 0, is 1\)"):
    run(out, settings=other)
  assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  flags.FLAGS.overwrite = True
  assert run(out, settings=other, until=1)[0] == [0]
  flags.FLAGS.overwrite = False
  assert run(out, settings=other)[0] == [1, 2, 3]


def test_a_file_without_a_journal_is_refused(tmp_path):
  out = tmp_path / "out.jsonl"
  out.write_text("mine\n")
  with pytest.raises(ValueError, match=r"no out\.jsonl\.journal tells"):
    run(out)
  assert out.read_text() == "mine\n"
  out.write_text("")  # as mktemp leaves it
  assert len(run(out)[0]) == 4


def test_rows_that_were_added_are_made_and_no_others(tmp_path):
  out = tmp_path / "out.jsonl"
  few = {key: WANTED[key] for key in ("key3", "key1")}
  assert run(out, wanted=few)[0] == [1, 3]
  out.write_text("".join(json.dumps(row_of(n)) + "\n" for n in (1, 3)))
  assert run(out)[0] == [0, 2]


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
  before = out.read_bytes()
  with pytest.raises(ValueError, match=words):
    run(out, wanted=wanted)
  assert out.read_bytes() == before


def test_rows_that_were_changed_are_not_replaced(tmp_path):
  out = tmp_path / "out.jsonl"
  run(out)
  rows = [row_of(n) for n in range(4)]
  rows[2]["score"] = 7
  out.write_text("".join(json.dumps(row) + "\n" for row in rows))
  with pytest.raises(ValueError, match=r":3: .*not as it was\s+written"):
    run(out)
  assert read_jsonl(out) == rows
  out.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
  assert run(out)[0] == [2, 3]  # deleted: made again


def test_a_result_that_was_replaced_whole_keeps_its_partial(tmp_path):
  """A journal of a JSON result: `outputs.check` guards the result itself."""
  out = tmp_path / "r.json"
  out.write_text("{}")
  with journal.Journal(str(out), SETTINGS) as first:
    first.add({"batch": 3, "x": [1.5, None]})
  with journal.Journal(str(out), SETTINGS) as second:
    assert second.batches == {3: {"batch": 3, "x": [1.5, None]}}
    second.finish()
  assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_journal_is_beside_what_a_link_leads_to(tmp_path):
  (tmp_path / "far").mkdir()
  link = tmp_path / "link.jsonl"
  link.symlink_to(tmp_path / "far" / "out.jsonl")
  run(link, until=1)
  assert run(tmp_path / "far" / "out.jsonl")[0] == [1, 2, 3]
  assert link.is_symlink()
  assert len(read_jsonl(link)) == 4


def test_of_two_writers_the_second_is_refused(tmp_path):
  out = str(tmp_path / "out.jsonl")
  with journal.Results(out, SETTINGS, WANTED) as first:
    with pytest.raises(ValueError, match="is being written by process"):
      journal.Results(out, SETTINGS, WANTED).__enter__()
    first.add(record_of(0), [row_of(0)])
  assert run(tmp_path / "out.jsonl")[0] == [1, 2, 3]
