"""`launch.evaluate` from its flags to its files, on a tiny pair."""

import json
import pathlib
import subprocess
import sys

import files
import numpy as np
import pytest
import several
from absl.testing import flagsaver

from configs import common, embedded
from launch import cli as command_line
from launch import evaluate
from launch.evaluation import costs, measure, systems
from specjax.runtime import compilation

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SMALL = ("--config.max_new_tokens=8", "--config.drafter=model(tokens=2)",
         "--config.max_length=72")  # fmt: skip
QUESTIONS = [
  {"question_id": "a1", "category": "a", "turns": ["def f(x):", "class A:"]},
  {"question_id": "a2", "category": "a", "turns": ["import os"]},
  {"question_id": "a3", "category": "a", "turns": ["for i in range(3):"]},
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


def test_code_of_ones_own_is_among_the_checkpoints(pair, tmp_path, monkeypatch):
  """Of each system: after an edit its groups are measured anew."""
  for name in ("evaluated_a", "evaluated_b"):
    (tmp_path / f"{name}.py").write_text(
      "from launch.assembly import drafting\nfrom specjax import drafters\n"
      f"# {name}\nMINE = drafting.entry(drafters.ngram)\n",
      "utf-8",
    )
  monkeypatch.syspath_prepend(tmp_path)
  config = common.get_config()
  config.target = pair[0]
  entered = systems.parse("evaluated_a:MINE, evaluated_b:MINE", config)
  models = evaluate.checkpoints_of(entered)
  names = {pathlib.Path(one["path"]).name for one in models.values()}
  assert names == {"target", "evaluated_a.py", "evaluated_b.py"}
  assert len({one["sha256"] for one in models.values()}) == 3


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
      assert ids == ["a1", "a1", "a2", "a3", "b1"]
      assert max(len(turn["questions"]) for turn in turns) == batch_size
      for turn in turns:
        if turn["questions"]:
          assert {*turn["systems"]} == {"plain", "ngram", "model", "hf"}
  assert {g["category"] for g in result["groups"]} == {"a", "b"}
  rows = [(r["system"], r["category"]) for r in result["runs"]]
  assert len(rows) == 2 * 2 * 4 * (1 + 2)
  assert {category for _, category in rows} == {"all", "a", "b"}
  tasks = [(r["system"], r["category"]) for r in result["runs_by_task"]]
  assert len(tasks) == 2 * 2 * 4 * 2


def test_programs_are_given_up_before_the_process_can_hold_no_more(
  ran, cli, asked, tmp_path, monkeypatch
):
  """Then every group compiles, and answers as ever."""
  monkeypatch.setattr(compilation, "has_many_maps", lambda: True)
  code = cli(
    evaluate.run, *SMALL, f"--questions={asked}", "--systems=plain,ngram",
    f"--output={tmp_path / 'E.json'}", "--temperatures=0", "--batch_sizes=1",
  )  # fmt: skip
  assert code == 0
  result = json.loads((tmp_path / "E.json").read_text())
  expected = {g["batch"]: g for g in ran[1]["groups"]}
  compiled = [g["compile_seconds"]["ngram"] for g in expected.values()]
  assert min(compiled) == 0
  for group in result["groups"]:
    if any(turn["questions"] for turn in group["turns"]):
      assert min(group["compile_seconds"].values()) > 0
    for turn, other in zip(
      group["turns"], expected[group["batch"]]["turns"], strict=True
    ):
      for name, actual in turn["systems"].items():
        assert actual["tokens"] == other["systems"][name]["tokens"]


def test_systems_take_turns_at_going_first(ran):
  _, result = ran
  orders = [
    tuple(turn["systems"])
    for group in result["groups"]
    for turn in group["turns"]
    if turn["systems"]
  ]
  assert {order[0] for order in orders} == {"plain", "ngram", "model", "hf"}
  assert len(set(orders)) > 6


def test_greedy_answers_are_those_of_plain_decoding_and_transformers(ran):
  _, result = ran
  for actual in result["runs"]:
    greedy = actual["temperature"] == 0
    for other in ("plain", "hf"):
      share = actual[f"identical_to_{other}"]
      if greedy and actual["system"] != other and not (
        (actual["system"], other) == ("plain", "hf")
      ):  # fmt: skip
        assert share == 1
      else:
        assert share is None
  assert result["differences"] == []


def test_prompts_that_do_not_fit_are_listed_and_the_others_are_answered(ran):
  _, result = ran
  first, *second = result["refused"]
  assert (first["question"], first["turn"]) == ("b2", 0)
  assert first["prompt_tokens"] > first["room"] == 72 - 8
  assert {(r["question"], r["turn"]) for r in second} == {("b1", 1)}
  assert len(second) == 4  # once for each setting


def test_rows_that_fill_a_batch_up_are_no_calls_of_transformers(ran):
  """At temperature 1 they may be longer than the one that counts."""
  _, result = ran
  alone = 0
  for turn in turns_of(result, 1, 2):
    if turn["questions"]:
      actual = turn["systems"]["hf"]
      assert actual["calls"] == actual["tokens"]
      alone += len(turn["questions"]) == 1
  assert alone


def test_plain_decoding_alone_is_a_result_too(cli, asked, tmp_path):
  out = tmp_path / "E.json"
  code = cli(
    evaluate.run, *SMALL, f"--questions={asked}", f"--output={out}",
    "--systems=plain", "--categories=b",
  )  # fmt: skip
  assert code == 0
  assert {r["system"] for r in json.loads(out.read_text())["runs"]} == {"plain"}
  # The result is written first: where it is, the rest is made again.
  (tmp_path / "E.svg").unlink()
  (tmp_path / "E.md").unlink()
  code = cli(
    evaluate.run, *SMALL, f"--questions={asked}", f"--output={out}",
    "--systems=plain", "--categories=b",
  )  # fmt: skip
  assert code == 0
  assert (tmp_path / "E.svg").exists()


def test_a_second_turn_holds_the_answer_of_plain_decoding(ran):
  _, result = ran
  (group,) = [
    g for g in result["groups"] if g["batch"].startswith("T=1 B=1 'a1'")
  ]
  first, second = group["turns"]
  answer = first["systems"]["plain"]["tokens"][0]
  between = second["prompt_tokens"][0] - first["prompt_tokens"][0]
  assert between >= answer  # and the second question


def test_the_page_the_figure_and_the_costs_are_there(ran):
  folder, result = ran
  page = (folder / "E.md").read_text()
  assert "![Speed-up and tokens per target call by category](E.svg)" in page
  assert "| `model` | token | chain of 5 | float32 |" in page
  assert "as plain text" in page
  assert "| b2 | 1 |" in page
  figure = (folder / "E.svg").read_text()
  for words in ("temperature 1, batch size 2", "ngram", "all"):
    assert words in figure
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


def test_a_result_says_what_made_it(ran):
  _, result = ran
  assert result["provenance"].keys() == {"commit", "dirty", "command"}
  assert result["reference"]["transformers"]
  assert {*result["compile_seconds"]} == {"plain", "ngram", "model"}


def test_a_ladder_has_no_prediction_and_the_same_answers(cli, asked, tmp_path):
  out = tmp_path / "E.json"
  code = cli(
    evaluate.run, *SMALL, f"--questions={asked}", f"--output={out}",
    "--systems=ladder(ngram, lengths=(0, 2))", "--categories=a",
  )  # fmt: skip
  assert code == 0
  result = json.loads(out.read_text())
  (row,) = (
    r
    for r in result["runs"]
    if r["category"] == "all" and r["system"] != "plain"
  )
  assert row["identical_to_plain"] == 1.0
  assert row["speedup"] > 0
  assert row["predicted_speedup"] is None
  assert result["costs"] == []
  made = sum(
    turn["systems"][row["system"]]["rounds"]
    for group in result["groups"]
    for turn in group["turns"]
  )
  assert {*row["rounds_by_length"]} == {"0", "2"}
  assert sum(row["rounds_by_length"].values()) == made
  shape = result["systems"][row["system"]]["draft_shape"]
  assert shape == "chains of 0, 2"
  page = out.with_suffix(".md").read_text()
  assert f"`{row['system']}` at temperature 0, batch size" in page


def test_a_result_compared_with_itself_changes_nothing(ran, capsys):
  folder, _ = ran
  path = folder / "E.json"
  assert evaluate.compare_files([str(path), str(path)]) == 0
  out = capsys.readouterr().out
  # Of four questions, in two groups, there is no interval.
  assert "| `model` | 1 | 2 | all | 4 | +0.000 | 1.000 |" in out


def execute(*args):
  """Without a config."""
  with flagsaver.flagsaver():
    return command_line.execute(evaluate.run, ["test", *args])


def test_systems_of_one_result_are_compared_with_one_of_them(ran, capsys):
  folder, _ = ran
  path = folder / "E.json"
  assert execute(f"--compare={path}", "--over=model") == 0
  lines = capsys.readouterr().out.splitlines()
  assert {line.split("`")[1] for line in lines[2:]} == {"plain", "ngram", "hf"}
  assert execute(f"--compare={path}", "--over=modal") == 2
  assert "has no system 'modal' beside others, but" in capsys.readouterr().err
  assert execute(f"--compare={path},{path}", "--over=model") == 2
  assert "takes one file with --over, got 2" in capsys.readouterr().err
  assert execute("--over=model") == 2
  assert "--over is of --compare" in capsys.readouterr().err


# ------------------------------------------------------- stopping and going on


def record_of(contest, group):
  """The return value of `measure.measure`, without decoding."""
  part = {
    "seconds": 2.0, "first_seconds": 0.5, "prefill_seconds": 0.1,
    "rounds": 4, "fed": 8,
    "tokens": [4] * len(group.questions), "calls": [4] * len(group.questions),
    "drafted": None, "accepted": None, "accept_counts": None,
    "total_variation": 0.0,
  }  # fmt: skip
  return {
    "batch": group.name, "temperature": group.temperature,
    "batch_size": group.batch_size, "category": group.questions[0].category,
    "task": group.questions[0].task, "compile_seconds": {},
    "reference": None,
    "turns": [{
      "questions": [q.id for q in group.questions],
      "prompt_tokens": [5] * len(group.questions), "refused": [],
      "systems": {s.name: part for s in contest.systems},
    }],
  }  # fmt: skip


def cost_of(contest, system, pair, group, record):
  return {
    "batch": costs.name_of(system, group.batch_size), "system": system.name,
    "batch_size": group.batch_size, "round_cost": 1.0, "draft_cost": 0.0,
    "round_fed": 2.0, "fed_cost": 0.0, "doubts": [],
  }  # fmt: skip


def test_a_stopped_run_goes_on_with_the_group_that_it_was_in(
  cli, asked, tmp_path, monkeypatch, capsys
):
  done, dies_at = [], [3]

  def counted(contest, group):
    if len(done) == dies_at[0]:
      raise KeyboardInterrupt
    done.append(group.name)
    return record_of(contest, group)

  monkeypatch.setattr(measure, "measure", counted)
  timed = []
  monkeypatch.setattr(
    costs,
    "measure_costs",
    lambda *args, **_: timed.append(1) or cost_of(*args),
  )
  out = tmp_path / "E.json"
  flags = (*SMALL, f"--questions={asked}", f"--output={out}",
           "--systems=ngram", "--temperatures=0,1")  # fmt: skip
  with pytest.raises(KeyboardInterrupt):
    cli(evaluate.run, *flags)
  assert not out.exists()
  with (tmp_path / "E.json.journal").open("a") as torn:  # of a crash
    torn.write('{"batch": "T=1 B=1 \'a1')
  first, dies_at[0] = list(done), None
  assert cli(evaluate.run, *flags) == 0
  assert "E.json.journal" in capsys.readouterr().err
  assert done[:3] == first
  assert len(done) == len(set(done)) == 2 * 4  # b2 does not fit
  assert len(json.loads(out.read_text())["groups"]) == 8
  assert len(timed) == 1
  assert cli(evaluate.run, *flags) == 2
  assert "E.json exists already: --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("given", "words"),
  [
    (("--temperatures=-1",), "--temperatures must be"),
    (("--temperatures=warm",), "--temperatures must be"),
    (("--batch_sizes=0",), "batch_sizes"),
    (("--systems=ngrams",), "did you mean 'ngram'"),
    (("--categories=poems",), "no questions of poems"),
    (("--questions=none.jsonl",), "no such file of questions"),
    (("--config.max_length=10",), "no question fits"),
    (("--prompts=x", "--categories=a"), "--prompts are asked in place of"),
    (("--systems=online(model)", "--rounds=2"), "and one round"),
    (("--systems=ladder(ngram)", "--rounds=2"), "give one round"),
    (("--explain", "--timing=none"), "--explain is made of timings"),
  ],
)
def test_mistakes_are_one_line(cli, tmp_path, capsys, given, words):
  assert cli(
    evaluate.run, *SMALL, f"--output={tmp_path / 'E.json'}", *given
  ) == 2  # fmt: skip
  error = capsys.readouterr().err.strip()
  assert words in error
  assert "\n" not in error
  assert not (tmp_path / "E.json").exists()


@pytest.mark.parametrize(
  ("is_ours", "asked", "expected"),
  [(True, (), 64), (True, ("max_new_tokens",), 100), (False, ("rule",), 100)],
)
def test_our_own_questions_are_answered_briefly(is_ours, asked, expected):
  config = embedded.get_config()
  config.max_new_tokens = 100
  actual = evaluate.resolved(config, asked=asked, is_ours=is_ours)
  assert actual.max_new_tokens == expected
  assert config.max_new_tokens == 100


def test_comparing_takes_two_results_and_no_other_flag(tmp_path, capsys):
  path = tmp_path / "x.json"
  path.write_text("{}")
  assert execute(f"--compare={path}") == 2
  assert "--compare takes two files" in capsys.readouterr().err
  assert execute(f"--compare={path},{path}") == 2
  assert "is no result of launch.evaluate" in capsys.readouterr().err
  for torn in ('{"groups": [{}]}', '{"groups": [1]}'):
    path.write_text(torn)
    assert execute(f"--compare={path},{path}") == 2
    assert "is no result of launch.evaluate" in capsys.readouterr().err
    assert execute(f"--compare={path}", "--over=ngram") == 2
    assert "is no result of launch.evaluate" in capsys.readouterr().err
  assert execute(f"--compare={path},{path}", "--subset=3") == 2
  assert "--subset: not read with --compare" in capsys.readouterr().err
  assert execute(f"--compare={path},{path}", "--explain", "--rounds=2") == 2
  told = "--rounds, --explain: not read with --compare"
  assert told in capsys.readouterr().err


def test_two_results_are_compared_without_a_config(tmp_path):
  """As it is called from a shell, where a config is asked for otherwise."""
  path = tmp_path / "x.json"
  path.write_text("{}")
  done = subprocess.run(
    [sys.executable, "-m", "launch.evaluate", "--compare", path, path],
    capture_output=True, text=True, check=False, timeout=several.PATIENCE,
  )  # fmt: skip
  assert done.returncode == 2
  assert "is no result of launch.evaluate" in done.stderr


@pytest.mark.heavy
def test_two_processes_take_turns_and_one_writes(cli, pair, asked, tmp_path):
  flags = (*SMALL, f"--questions={asked}", "--systems=ngram",
           "--batch_sizes=1,2", "--temperatures=1")  # fmt: skip
  alone, out = tmp_path / "alone.json", tmp_path / "E.json"
  assert cli(evaluate.run, *flags, f"--output={alone}") == 0
  config = f"--config=configs/huggingface.py:target={pair[0]},draft={pair[1]}"
  command = ["-m", "launch.evaluate", config, *flags, f"--output={out}"]
  for code, _, err in several.finish(several.start([command] * 2)):
    assert code == 0, err
  one, two = (json.loads(path.read_text()) for path in (alone, out))
  tokens = lambda result: {
    (group["batch"], i): turn["systems"]["ngram"]["tokens"]
    for group in result["groups"]
    for i, turn in enumerate(group["turns"])
    if turn["systems"]
  }
  assert tokens(one) == tokens(two)
  assert np.shape(two["costs"]) == (2,)
