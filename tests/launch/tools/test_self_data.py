"""Conversations that a model makes up, and what must not be in them."""

import dataclasses
import json
import shutil

import files
import pytest
from absl.testing import flagsaver

from configs import huggingface
from launch import cli, results
from launch.assembly import pair
from launch.evaluation import questions
from launch.serving import jobs
from launch.tools import self_data as command
from launch.training import data, self_data
from models import chat
from specjax.state import StopReason

pytestmark = pytest.mark.usefixtures("quick_to_compile")
STOP = StopReason.STOP_TOKEN
CHATML = (
  "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n"
  "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  folder = tmp_path_factory.mktemp("chatty")
  files.make_checkpoint(folder, num_layers=1)
  (folder / "chat_template.jinja").write_text(CHATML)
  return str(folder)


@pytest.fixture
def execute(target):
  def run(*args):
    config = f"configs/huggingface.py:target={target}"
    with flagsaver.flagsaver():
      return cli.execute(
        command.run,
        ["test", f"--config={config}", "--config.drafter=plain",
         "--config.max_new_tokens=12", "--rows=4", *args],
      )  # fmt: skip

  return run


def message(text):
  return [{"role": "user", "content": text}]


def test_what_a_test_asks_is_found_in_whatever_case_and_place():
  test = "Name the seven hills of Rome, and say which of them is the highest."
  short, tiny = "Write a haiku about old lighthouses.", "Why not?"
  actual = self_data.overlap([test, short, tiny])
  assert actual(message(f"Please! {test.upper()} Thanks."))
  assert actual(message("name the seven hills of rome and say which of them is"
                       " the best"))  # fmt: skip
  twelve = "the seven hills of Rome, and say which of them is the"
  assert len(twelve.split()) == 12
  assert not actual(message(twelve))
  assert actual(message("Now write a HAIKU about old lighthouses, will you"))
  assert not actual(message("Write a haiku about old bridges."))
  assert actual(message("why not"))
  assert not actual(message("I know why. Not that it matters"))
  answered = [*message("What is up?"), {"role": "assistant", "content": test}]
  assert actual(answered)


def test_what_is_sifted_out_is_counted():
  talk = lambda q, a="An answer.": {
    "messages": [*message(q), {"role": "assistant", "content": a}]
  }
  rows = [
    talk("One?"), talk("Two?"), talk("ONE ..."), talk("Three?", "!"),
    talk("...", "No question."), talk("Tested?"),
  ]  # fmt: skip
  kept, counts = self_data.sifted(
    rows, lambda messages: messages[0]["content"] == "Tested?"
  )
  assert kept == rows[:2]
  assert counts == dict(generated=6, empty=2, repeated=1, overlapping=1, kept=2)


def test_every_question_of_the_projects_own_is_found():
  """The suite that ships, which is kept out always, put into conversations."""
  texts = command.tested_texts([])
  assert len(texts) > 40
  actual = self_data.overlap(texts)
  assert all(actual(message(f"Hello. {t}")) for t in texts if len(t) > 60)
  kept, counts = self_data.sifted(
    [{"messages": [*message(t), *message("Well.")]} for t in texts], actual
  )
  assert not kept
  assert counts["overlapping"] + counts["repeated"] == len(texts)


@pytest.fixture(scope="module")
def tokenizer(target):
  config = huggingface.get_config(f"target={target}")
  config.drafter = "plain"
  return pair.build(config).tokenizer


def maker(tokenizer, **settings):
  neutral = dict(budget=6, room=90, temperatures=(1.0,))
  return self_data.Maker(tokenizer=tokenizer, **(neutral | settings))


def talked(maker, numbers, reasons=(STOP, STOP)):
  """Conversations of one word a turn, and all that was asked for them."""
  word = (*maker.tokenizer.encode("x"), 0)
  asked, results = [], []
  for number in numbers:
    job = maker.conversation(number)
    try:
      asked.append(next(job))
      for reason in reasons:
        asked.append(job.send(jobs.Completed(token_ids=word, reason=reason)))
    except StopIteration as end:
      results.append(end.value)
  return results, asked


def test_the_user_begins_as_the_template_says(tokenizer):
  ids = self_data.before_the_user(tokenizer)
  assert tokenizer.decode(list(ids)) == "<|user|>"
  whole = chat.encode(tokenizer, message("x"), add_generation_prompt=False)
  assert tuple(whole[: len(ids)]) == ids


def test_the_system_speaks_before_the_user_and_not_before_the_answer(tokenizer):
  ids = self_data.before_the_user(tokenizer, "Be brief.")
  text = tokenizer.decode(list(ids))
  assert text == "<|system|>Be brief.\n<|user|>"
  settings = dict(temperatures=(0.5, 1.0), systems=("", "Be brief."))
  actual, asked = talked(maker(tokenizer, **settings), range(6))
  assert [row["number"] for row in actual] == list(range(6))
  texts = {
    turn.stream: tokenizer.decode(list(turn.token_ids)) for turn in asked
  }
  assert [i for i in range(6) if texts[2 * i] == text] == [2, 3]
  assert {texts[2 * i + 1] for i in range(6)} == {"<|user|>x\n<|assistant|>"}
  short = maker(tokenizer, room=len(ids) - 1, **settings)
  with pytest.raises(ValueError, match=f"takes {len(ids)} tokens with its"):
    short.longest  # noqa: B018


def test_answers_have_temperatures_of_their_own(tokenizer):
  made = maker(
    tokenizer, temperatures=(0.5, 1.0), answer_temperatures=(0.0, 2.0)
  )
  actual, asked = talked(made, range(8))
  drawn = {turn.stream: turn.temperature for turn in asked}
  assert [drawn[2 * i] for i in range(8)] == [0.5, 1.0] * 4
  assert [drawn[2 * i + 1] for i in range(8)] == [0, 0, 2, 2, 0, 0, 2, 2]
  told = [(row["temperature"], row["answer_temperature"]) for row in actual]
  assert told == [(drawn[2 * i], drawn[2 * i + 1]) for i in range(8)]


def test_a_question_that_is_cut_off_is_not_answered(tokenizer):
  actual, asked = talked(maker(tokenizer), range(3), (StopReason.LENGTH,))
  assert actual == [None] * 3
  assert len(asked) == 3


def test_an_answer_that_is_cut_off_is_kept_and_said_to_be(tokenizer):
  ends = (STOP, StopReason.LENGTH)
  (actual,), _ = talked(maker(tokenizer), [0], ends)
  assert not actual["whole"]
  (whole,), _ = talked(maker(tokenizer), [0])
  assert whole["whole"]


def test_every_other_user_asks_on_while_there_is_room(tokenizer):
  made = maker(tokenizer, turns=2, budget=60)
  actual, asked = talked(made, range(4), (STOP,) * 4)
  assert [len(row["messages"]) for row in actual] == [2, 4, 2, 4]
  assert len({turn.stream for turn in asked}) == len(asked) == 12
  last = tokenizer.decode(list(asked[-1].token_ids))
  turn = "<|user|>x\n<|assistant|>x\n"
  assert last == turn + "<|user|>x\n<|assistant|>"
  # The history may be longer than the budget of a turn.
  small = maker(tokenizer, turns=2, budget=3)
  (longer,), _ = talked(small, [1], (STOP,) * 4)
  assert len(longer["messages"]) == 4
  tight = maker(tokenizer, turns=2, budget=60, room=len(tokenizer.encode(turn)))
  (short,), _ = talked(tight, [1], (STOP,) * 4)
  assert len(short["messages"]) == 2
  (cut,), _ = talked(made, [1], (STOP, StopReason.LENGTH))
  assert len(cut["messages"]) == 2
  assert not cut["whole"]


def test_users_that_are_given_are_answered_first(tokenizer):
  said = [*message("y"), {"role": "assistant", "content": "z"}, *message("x")]
  made = maker(
    tokenizer, begun=(message("y"), said), temperatures=(1.0, 1.0),
    answer_temperatures=(0.0, 2.0), turns=2, budget=60,
  )  # fmt: skip
  actual, asked = talked(made, range(4), (STOP,) * 4)
  texts = [[m["content"] for m in row["messages"]] for row in actual]
  assert texts == [list("yx"), list("yzxxxx"), list("xx"), list("xxxx")]
  assert [row["answer_temperature"] for row in actual] == [0, 2, 2, 2]
  prompt = chat.encode(tokenizer, said)
  assert [x.temperature for x in asked if [*x.token_ids] == prompt] == [2]
  assert len({turn.stream for turn in asked}) == len(asked)
  short = maker(tokenizer, begun=(said,), room=len(prompt) - 1)
  assert talked(short, [0]) == ([None], [])


def test_a_question_longer_than_prompts_may_be_is_not_answered(tokenizer):
  room = len(self_data.before_the_user(tokenizer))
  actual, asked = talked(maker(tokenizer, room=room), [0])
  assert actual == [None]
  assert len(asked) == 1


@pytest.mark.parametrize("given", ["", "x", "-1", "1,nan"])
def test_answers_cannot_be_drawn_at_what_is_no_temperature(
  given, execute, tmp_path, capsys
):
  out = tmp_path / "out"
  assert execute(f"--output={out}", f"--answer_temperatures={given}") == 2
  assert "--answer_temperatures must be numbers" in capsys.readouterr().err
  assert not out.exists()


def test_a_template_without_a_place_for_the_system_is_refused(target, tmp_path):
  folder = tmp_path / "T"
  shutil.copytree(target, folder)
  (folder / "chat_template.jinja").write_text(
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>"
    "{{ m['content'] }}{% endif %}{% endfor %}"
  )
  config = huggingface.get_config(f"target={folder}")
  config.drafter = "plain"
  tokenizer = pair.build(config).tokenizer
  assert self_data.before_the_user(tokenizer)
  with pytest.raises(ValueError, match="no place for what the system says"):
    self_data.before_the_user(tokenizer, "Be brief.")


def test_an_empty_file_of_system_prompts_is_refused(execute, tmp_path, capsys):
  nothing = tmp_path / "nothing.txt"
  nothing.write_text("\n")
  for file in (nothing, tmp_path / "none.txt"):
    out = tmp_path / "out"
    assert execute(f"--output={out}", f"--system_prompts={file}") == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_prompt_that_no_user_ends_is_refused(execute, tmp_path, capsys):
  prompts = tmp_path / "prompts.jsonl"
  last = {"role": "assistant", "content": "y"}
  for line in ({"messages": [*message("x"), last]}, {"text": "x"}):
    files.write_jsonl(prompts, [{"messages": message("x")}, line])
    assert execute(f"--output={tmp_path / 'out'}", f"--prompts={prompts}") == 2
    assert "document 2 of" in capsys.readouterr().err


class KilledError(Exception):
  """Exception by which a test kills a run."""


@pytest.fixture
def ending(monkeypatch):
  """A random model's words end nowhere: any token may be the last."""
  real = pair.assemble

  def ending(config, models, **more):
    return dataclasses.replace(
      real(config, models, **more), stop_tokens=tuple(range(0, 4096, 3))
    )

  monkeypatch.setattr(pair, "assemble", ending)


def test_conversations_made_in_groups_are_those_of_slots(
  execute, tmp_path, ending
):
  texts = []
  for way in ("noin_groups", "in_groups"):
    out = tmp_path / way
    asked = (
      "--count=16", "--turns=2", "--temperatures=1.5", f"--{way}",
      "--config.max_new_tokens=40",
    )  # fmt: skip
    assert execute(f"--output={out}", *asked) == 0
    texts.append((out / "conversations.jsonl").read_text())
  assert texts[0] == texts[1]
  rows = [json.loads(line) for line in texts[0].splitlines()]
  assert {len(row["messages"]) for row in rows} == {2, 4}


def test_a_killed_run_goes_on_to_the_same_conversations(
  execute, tmp_path, monkeypatch, capsys, ending
):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  asked = ("--count=32", "--temperatures=1.5,2.0")
  assert execute(f"--output={whole}", *asked) == 0
  add, count = results.Journal.add, [0]

  def die(self, record):
    add(self, record)
    count[0] += 1
    if count[0] == 2:
      raise KilledError

  with monkeypatch.context() as patch:
    patch.setattr(results.Journal, "add", die)
    with pytest.raises(KilledError):
      execute(f"--output={killed}", *asked)
  assert not (killed / "conversations.jsonl").exists()
  assert execute(f"--output={killed}", *asked) == 0
  one, other = (
    (folder / "conversations.jsonl").read_text() for folder in (whole, killed)
  )
  assert one == other
  rows = [json.loads(line) for line in one.splitlines()]
  assert len(rows) > 2
  assert {row["temperature"] for row in rows} == {1.5, 2.0}
  about = json.loads((whole / "about.json").read_text())
  assert about["kept"] == len(rows) <= about["generated"] <= 32
  # More of them begin with those that are there.
  assert execute(f"--output={killed}", "--count=40", *asked[1:]) == 0
  more = (killed / "conversations.jsonl").read_text()
  assert more.startswith(one)
  assert len(more) > len(one)
  # What was written can be trained on.
  actual = list(data._folder(whole, "train"))
  assert actual[0] in [row["messages"] for row in rows]
  # A question of a test that comes up is dropped, and counted.
  test = tmp_path / "test.jsonl"
  files.write_jsonl(
    test,
    [{"question_id": 1, "category": "x",
      "turns": [rows[0]["messages"][0]["content"]]}],
  )  # fmt: skip
  assert questions.read(test)
  capsys.readouterr()
  assert execute(f"--output={killed}", f"--keep_out={test}", *asked) == 0
  assert "1 overlapping" in capsys.readouterr().out
  left = (killed / "conversations.jsonl").read_text()
  assert left == "".join(line + "\n" for line in one.splitlines()[1:])


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--temperatures=0.5,warm", "--temperatures must be positive numbers"),
    ("--temperatures=0", "--temperatures must be positive numbers"),
    ("--keep_out=nowhere.jsonl", "no such file of questions"),
    ("--prompts=nowhere.jsonl", "No such file"),
    ("--config.mesh=data:2", "runs on one device"),
  ],
)
def test_mistakes_are_one_line(execute, tmp_path, capsys, flag, message):
  assert execute(f"--output={tmp_path / 'out'}", flag) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
