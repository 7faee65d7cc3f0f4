"""`launch.evaluate` from its flags to its files, on a tiny pair."""

import json
import subprocess
import sys
import time

import files
import pytest
import several

from launch import evaluate

SMALL = ("--config.max_new_tokens=8", "--config.drafter=model(tokens=2)",
         "--config.max_length=72")  # fmt: skip
QUESTIONS = [
  {"question_id": "a1", "category": "a", "turns": ["def f(x):", "class A:"]},
  {"question_id": "a2", "category": "a", "turns": ["import os"]},
  {"question_id": "c1", "category": "c", "turns": ["for i:"], "task": "a"},
  {"question_id": "b1", "category": "b", "turns": ["x = 1", "y = 2\n" * 30]},
  {"question_id": "b2", "category": "b", "turns": ["z = 3\n" * 30]},
]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
  return files.write_jsonl(
    tmp_path_factory.mktemp("asked") / "q.jsonl", QUESTIONS
  )


@pytest.fixture(scope="module")
def ran(cli, asked, tmp_path_factory):
  """One run of everything: its folder and its result."""
  folder = tmp_path_factory.mktemp("ran")
  code = cli(
    evaluate.run, *SMALL, f"--questions={asked}",
    f"--output={folder / 'E.json'}", "--systems=plain,ngram,model,hf",
    "--temperatures=0,1", "--batch_sizes=1,2",
  )  # fmt: skip
  assert code == 0
  return folder, json.loads((folder / "E.json").read_text())


def turns_of(result, temperature, batch_size):
  return [
    turn
    for group in result["groups"]
    if (group["temperature"], group["batch_size"]) == (temperature, batch_size)
    for turn in group["turns"]
  ]


def test_every_system_answers_every_question_in_every_setting(ran):
  _, result = ran
  for temperature in (0, 1):
    for batch_size in (1, 2):
      turns = turns_of(result, temperature, batch_size)
      ids = sorted(i for turn in turns for i in turn["questions"])
      assert ids == ["a1", "a1", "a2", "b1", "c1"]
      assert max(len(turn["questions"]) for turn in turns) == batch_size
      for turn in turns:
        if turn["questions"]:
          assert {*turn["systems"]} == {"plain", "ngram", "model", "hf"}
  assert {g["category"] for g in result["groups"]} == {"a", "b", "c"}
  rows = [(r["system"], r["category"]) for r in result["runs"]]
  assert len(rows) == 2 * 2 * 4 * (1 + 2 + 3)
  assert {category for _, category in rows} == {"all", "a", "b", "c"}


def test_greedy_answers_of_all_systems_match_plain_decoding(ran):
  _, result = ran
  for row in result["runs"]:
    compared = row["temperature"] == 0 and row["system"] != "plain"
    assert row["identical_to_plain"] == (1 if compared else None)
  assert result["differences"] == []


def test_overlong_prompts_are_listed_as_refused(ran):
  _, result = ran
  first, *second = result["refused"]
  assert (first["question"], first["turn"]) == ("b2", 0)
  assert first["prompt_tokens"] > first["room"] == 72 - 8
  assert {(r["question"], r["turn"]) for r in second} == {("b1", 1)}
  assert len(second) == 4  # once for each setting


def test_evaluation_writes_a_page_and_costs(ran):
  folder, result = ran
  page = (folder / "E.md").read_text()
  assert "| `model` | token | chain of 5 |" in page
  assert "as plain text" in page
  assert "5 prompts were too long" in page
  assert page.count("| `plain` |") == 4 * (1 + 2 + 2) + 1  # not category b
  actual = {(c["system"], c["batch_size"]) for c in result["costs"]}
  assert actual == {(s, b) for s in ("ngram", "model") for b in (1, 2)}
  for one in result["costs"]:
    assert one["round_cost"] > 0
    assert (one["draft_cost"] > 0) == (one["system"] == "model")
  sound = {  # a busy machine leaves doubts
    (c["system"], c["batch_size"]) for c in result["costs"] if not c["doubts"]
  }
  for one in result["runs"]:
    known = one["predicted_speedup"] is not None
    assert known == ((one["system"], one["batch_size"]) in sound)


# ------------------------------------------------------- stopping and going on


def answers_of(result):
  """What was decoded, without seconds."""
  return [
    {name: one["tokens"] for name, one in turn["systems"].items()}
    for group in sorted(result["groups"], key=lambda g: g["batch"])
    for turn in group["turns"]
  ]


def test_killed_run_resumes_with_the_interrupted_group(
  pair, asked, ran, tmp_path
):
  out = tmp_path / "E.json"
  command = [
    sys.executable, "-m", "launch.evaluate",
    f"--config=configs/huggingface.py:target={pair[0]},draft={pair[1]}",
    *SMALL, f"--questions={asked}", f"--output={out}", "--timing=none",
    "--systems=plain,ngram,model", "--temperatures=0,1",
  ]  # fmt: skip
  journal = tmp_path / "E.json.journal"
  # Killed by the test once two groups are on the disk.
  with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
    deadline = time.monotonic() + several.PATIENCE
    while not journal.exists() or len(journal.read_bytes().splitlines()) < 3:
      assert time.monotonic() < deadline
      assert process.poll() is None
      time.sleep(0.05)
    process.kill()
  assert not out.exists()
  with journal.open("a") as torn:
    torn.write('{"batch": "T=1 B=1 \'a1')
  before = journal.read_bytes().splitlines()[1:3]
  done = subprocess.run(
    command, capture_output=True, text=True, check=False,
    timeout=several.PATIENCE,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "resuming from" in done.stderr
  result = json.loads(out.read_text())
  assert [json.loads(line) for line in before] == result["groups"][:2]
  whole = {"groups": [g for g in ran[1]["groups"] if g["batch_size"] == 1]}
  for actual, expected in zip(
    answers_of(result), answers_of(whole), strict=True
  ):
    assert actual == {n: x for n, x in expected.items() if n != "hf"}
  assert not journal.exists()


# --------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
  ("given", "words"),
  [
    (("--questions=none.jsonl",), "none.jsonl"),
    (("--config.max_length=10",), "no question fits"),
    (("--output=-",), "--output must be a file"),
    (("--temperatures=0,-1",), "temperature must be finite and >= 0"),
    (("--prompts=x", "--questions=y"), "--prompts or --questions, not both"),
    (("--systems=online(model)", "--rounds=2"), "and one round"),
    (("--systems=hf_assisted(\"\")", "--config.checkpoints.draft="),
     "needs a draft model"),
  ],
)  # fmt: skip
def test_user_errors_print_one_line_and_write_no_output(
  cli, tmp_path, capsys, given, words
):
  assert cli(
    evaluate.run, *SMALL, f"--output={tmp_path / 'E.json'}", *given
  ) == 2  # fmt: skip
  error = capsys.readouterr().err.strip()
  assert words in error
  assert "\n" not in error
  assert not (tmp_path / "E.json").exists()
