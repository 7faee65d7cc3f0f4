"""Exact matches and chrF of answers."""

import json

import pytest
from absl.testing import flagsaver
from files import write_jsonl

from launch import cli
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
  found = json.loads(out.read_text())["scores"][answers]
  assert found["all"]["exact_match"] == pytest.approx(2 / 3)
  assert found["all"]["tokens_per_target_call"] == pytest.approx(16 / 6)
  assert found["b"] == {
    "count": 1, "exact_match": 1.0, "chrf": 100.0, "tokens_per_target_call": 4.0
  }  # fmt: skip
  assert 30 < found["a"]["chrf"] < 95
  assert "exact match" in capsys.readouterr().out


def test_answers_of_another_test_are_refused(tmp_path):
  test = write_jsonl(tmp_path / "test.jsonl", TEST)
  answers = write_jsonl(tmp_path / "a.jsonl", [row(7, "", 1, 1)])
  with pytest.raises(ValueError, match="the id 7, for which"):
    score_answers.scores(test, answers)
