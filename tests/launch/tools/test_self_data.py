"""Conversations that a model makes up, and what must not be in them."""

import dataclasses
import json

import files
import pytest
from absl.testing import flagsaver

from launch import cli, results
from launch.assembly import pair
from launch.tools import self_data
from launch.training import data
from models import chat, checkpoints

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
def execute(target, monkeypatch):
  real = pair.build

  def ending(config):
    """A random model's words end nowhere: any token may be the last."""
    stops = tuple(range(0, 4096, 3))
    return dataclasses.replace(real(config), stop_tokens=stops)

  monkeypatch.setattr(pair, "build", ending)

  def run(*args):
    config = f"configs/huggingface.py:target={target}"
    with flagsaver.flagsaver():
      return cli.execute(
        self_data.run,
        ["test", f"--config={config}", "--config.drafter=plain",
         "--config.max_new_tokens=12", "--rows=4", *args],
      )  # fmt: skip

  return run


def message(text):
  return [{"role": "user", "content": text}]


def test_a_tests_text_is_found_in_whatever_case_and_place():
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


def test_empty_repeated_and_tested_conversations_are_dropped():
  talk = lambda q, a="An answer.": {
    "messages": [*message(q), {"role": "assistant", "content": a}]
  }
  rows = [
    talk("One?"), talk("Two?"), talk("ONE ..."), talk("Three?", "!"),
    talk("...", "No question."), talk("Tested?"),
  ]  # fmt: skip
  kept = self_data.sift(
    rows, lambda messages: messages[0]["content"] == "Tested?"
  )
  assert kept == rows[:2]


def test_a_users_turn_begins_as_the_template_says(target, tmp_path):
  tokenizer = checkpoints.load_tokenizer(target)
  ids = self_data.before_user(tokenizer)
  assert tokenizer.decode(list(ids)) == "<|user|>"
  whole = chat.encode(tokenizer, message("x"), add_generation_prompt=False)
  assert tuple(whole[: len(ids)]) == ids
  ids = self_data.before_user(tokenizer, "Be brief.")
  assert tokenizer.decode(list(ids)) == "<|system|>Be brief.\n<|user|>"
  without = dataclasses.replace(
    tokenizer, chat_template="{% for m in messages %}{{ m['content'] }}"
    "{% endfor %}"
  )  # fmt: skip
  with pytest.raises(ValueError, match="before the user's words"):
    self_data.before_user(without)


class KilledError(Exception):
  """Exception by which a test kills a run."""


def test_a_killed_run_goes_on_to_the_same_conversations(
  execute, tmp_path, monkeypatch
):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  asked = ("--count=16", "--temperatures=1.5,2.0")
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
  assert execute(f"--output={killed}", *asked) == 0
  one, other = (
    (folder / "conversations.jsonl").read_text() for folder in (whole, killed)
  )
  assert one == other
  rows = [json.loads(line) for line in one.splitlines()]
  assert len(rows) > 2
  about = json.loads((whole / "about.json").read_text())
  assert about["kept"] == len(rows) <= about["made"] == 16
  # What was written can be trained on.
  texts = data.documents_of(whole / "conversations.jsonl")
  assert list(texts) == [row["messages"] for row in rows]


def test_given_users_are_answered_first(execute, tmp_path):
  prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
  files.write_jsonl(prompts, [{"messages": message(x)} for x in ("y", "z")])
  system = tmp_path / "system.txt"
  system.write_text("Be brief.\n\nBe kind.\n")
  assert execute(
    f"--output={out}", f"--prompts={prompts}", "--count=6",
    f"--system_prompts={system}", "--answer_temperatures=0",
  ) == 0  # fmt: skip
  rows = [*map(json.loads, (out / "conversations.jsonl").open())]
  first = [row["messages"][0]["content"] for row in rows if row["number"] < 2]
  assert first == ["y", "z"]
  assert all(len(row["messages"]) == 2 for row in rows)
  assert max(row["number"] for row in rows) > 1


@pytest.mark.parametrize(
  "flag, expected",
  [
    ("--temperatures=0.5,warm", "could not convert string to float"),
    ("--keep_out=nowhere.jsonl", "nowhere.jsonl"),
    ("--prompts=PROMPTS", "messages must end with a user's"),
  ],
)
def test_mistakes_are_one_line(execute, tmp_path, capsys, flag, expected):
  prompts = tmp_path / "prompts.jsonl"
  files.write_jsonl(prompts, [{"messages": message("x")}, {"text": "x"}])
  flag = flag.replace("PROMPTS", str(prompts))
  assert execute(f"--output={tmp_path / 'out'}", flag) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert expected in line
  assert not (tmp_path / "out").exists()
