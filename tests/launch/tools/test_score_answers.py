"""Exact matches and chrF of answers."""

import json

import pytest
from absl.testing import flagsaver
from files import write_jsonl

from launch import cli, tables
from launch.tools import score_answers

TEST = [
  {"id": 0, "task": "a", "input": "x", "output": "forty-two"},
  {"id": "q", "task": "a", "input": "y", "output": "one"},
  {"id": 2, "task": "b", "input": "z", "output": "2026-11-22"},
]


def row(identity, text, tokens, calls):
  return {
    "id": identity, "completion": text, "token_ids": [1] * tokens,
    "num_target_calls": calls,
  }  # fmt: skip


def test_scores_are_of_all_and_of_each_task(tmp_path, capsys):
  test = write_jsonl(tmp_path / "test.jsonl", TEST)
  # In another order, as a file of answers may be.
  answers = write_jsonl(
    tmp_path / "a.jsonl",
    [row(2, "2026-11-22", 8, 2), row(0, "forty-two", 6, 3),
     row("q", "two", 2, 1)],
  )  # fmt: skip
  out = tmp_path / "s.json"
  with flagsaver.flagsaver():
    code = cli.execute(
      score_answers.run,
      ["test", f"--prompts={test}", f"--answers={answers}",
       f"--output={out}"],
    )  # fmt: skip
  assert code == 0
  record = json.loads(out.read_text())["scores"][answers]
  assert record["all"]["exact_match"] == pytest.approx(2 / 3)
  assert record["all"]["block_efficiency"] == pytest.approx(16 / 6)
  assert record["b"] == {
    "count": 1, "exact_match": 1.0, "chrf": 100.0, "block_efficiency": 4.0
  }  # fmt: skip
  assert 30 < record["a"]["chrf"] < 95
  assert "exact match" in capsys.readouterr().out


def test_a_table_says_how_answers_were_made(tmp_path, capsys):
  test = write_jsonl(tmp_path / "test.jsonl", TEST)
  answers, summaries = [], []
  for name, drafted in (("plain", 0), ("block", 7)):
    rows = [row(0, "forty-two", 6, 6 if not drafted else 2)]
    answers.append(write_jsonl(tmp_path / f"{name}.jsonl", rows))
    summary = dict(
      drafter="specdec(tokens=7)" if drafted else "plain",
      config=dict(temperature=1.0), rule="top_beta(beta=5, tau=3.0)",
      num_accepted=drafted,
      num_target_calls=2, block_efficiency_ci=[2.5, 3.5] if drafted else None,
      total_variation=0.125,
    )  # fmt: skip
    summaries.append(str(tmp_path / f"{name}.json"))
    (tmp_path / f"{name}.json").write_text(json.dumps(summary))
  out = tmp_path / "s.json"
  flags = [f"--prompts={test}", f"--answers={','.join(answers)}"]
  run = lambda *more: cli.execute(score_answers.run, ["test", *flags, *more])
  with flagsaver.flagsaver():
    both = f"--summaries={','.join(summaries)}"
    assert run(both, f"--output={out}") == 0
  capsys.readouterr()
  assert tables.main(["tables", "answers", str(out)]) == 0
  *_, plain, drafted = capsys.readouterr().out.strip().splitlines()
  assert plain == ("| `plain` | – | 1 | 0.00 | 1.00 | 1.000 | 100.0 | 0.125 |")
  assert drafted == (
    "| `specdec(tokens=7)` | `top_beta(beta=5, tau=3.0)` | 1 | 3.50 | "
    "3.00 (2.50–3.50) | 1.000 | 100.0 | 0.125 |"
  )
  with flagsaver.flagsaver():
    assert run(f"--summaries={summaries[0]}") == 2
  (tmp_path / "plain.json").write_text("{}")
  with flagsaver.flagsaver():
    assert run(both) == 2
  assert "is not a summary of launch.decode" in capsys.readouterr().err


def test_answers_of_another_test_are_refused(tmp_path):
  test = write_jsonl(tmp_path / "test.jsonl", TEST)
  answers = write_jsonl(tmp_path / "a.jsonl", [row(7, "", 1, 1)])
  with pytest.raises(ValueError, match="the id 7, for which"):
    score_answers.scores(test, answers)
