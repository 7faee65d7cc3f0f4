"""Conversations that a model makes up, and what must not be in them."""

import dataclasses
import json
import shutil
import types

import files
import pytest
from absl.testing import flagsaver

from configs import huggingface
from launch import cli, journal, pair
from launch.evaluation import questions
from launch.tools import self_data as command
from launch.training import data, self_data
from models import chat

pytestmark = pytest.mark.usefixtures("quick_to_compile")
CHATML = (
  "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n"
  "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  folder = tmp_path_factory.mktemp("chatty")
  files.make_checkpoint(folder)
  (folder / "chat_template.jinja").write_text(CHATML)
  return str(folder)


@pytest.fixture
def execute(target):
  def run(*args):
    config = f"configs/huggingface.py:target={target}"
    with flagsaver.flagsaver():
      return cli.execute(
        command.run,
        ["test", f"--config={config}", "--config.num_speculative_tokens=0",
         "--config.max_new_tokens=12", "--rows=4", *args],
      )  # fmt: skip

  return run


def message(text):
  return [{"role": "user", "content": text}]


def test_what_a_test_asks_is_found_in_whatever_case_and_place():
  test = "Name the seven hills of Rome, and say which of them is the highest."
  short, tiny = "Write a haiku about old lighthouses.", "Why not?"
  found = self_data.overlap([test, short, tiny])
  assert found(message(f"Please! {test.upper()} Thanks."))
  assert found(message("name the seven hills of rome and say which of them is"
                       " the best"))  # fmt: skip
  twelve = "the seven hills of Rome, and say which of them is the"
  assert len(twelve.split()) == 12
  assert not found(message(twelve))
  assert found(message("Now write a HAIKU about old lighthouses, will you"))
  assert not found(message("Write a haiku about old bridges."))
  assert found(message("why not"))
  assert not found(message("I know why. Not that it matters"))
  answered = [*message("What is up?"), {"role": "assistant", "content": test}]
  assert found(answered)


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
  """The test set that SmolLM2 is measured with, put into conversations."""
  texts = command.tested_texts([])
  assert len(texts) > 40
  found = self_data.overlap(texts)
  assert all(found(message(f"Hello. {t}")) for t in texts if len(t) > 60)
  kept, counts = self_data.sifted(
    [{"messages": [*message(t), *message("Well.")]} for t in texts], found
  )
  assert not kept
  assert counts["overlapping"] + counts["repeated"] == len(texts)


class OneWord:
  """An engine that says one word, and keeps what it was given."""

  def __init__(self, tokenizer):
    self.asked, self._ids = [], [*tokenizer.encode("x"), 0]

  def run(self, batch):
    """Answers every prompt of a batch."""
    self.asked.extend(batch.prompts)
    done = types.SimpleNamespace(token_ids=self._ids, stop_reason="stop_token")
    return [done] * len(batch.prompts), 0.0


def test_the_user_begins_as_the_template_says(target):
  config = huggingface.get_config(f"target={target}")
  config.num_speculative_tokens = 0
  tokenizer = pair.build(config).tokenizer
  ids = self_data.before_the_user(tokenizer)
  assert tokenizer.decode(list(ids)) == "<|user|>"
  whole = chat.encode(tokenizer, message("x"), add_generation_prompt=False)
  assert tuple(whole[: len(ids)]) == ids


def test_the_system_speaks_before_the_user_and_not_before_the_answer(target):
  config = huggingface.get_config(f"target={target}")
  config.num_speculative_tokens, config.max_new_tokens = 0, 6
  models = pair.build(config)
  ids = self_data.before_the_user(models.tokenizer, "Be brief.")
  text = models.tokenizer.decode(list(ids))
  assert text == "<|system|>Be brief.\n<|user|>"
  decoder = OneWord(models.tokenizer)
  found = self_data.converse(
    decoder, models.tokenizer, range(6), temperatures=(0.5, 1.0),
    max_width=90, systems=("", "Be brief."),
  )  # fmt: skip
  assert len(found) == 6
  texts = {
    turn.stream: models.tokenizer.decode(list(turn.token_ids))
    for turn in decoder.asked
  }
  briefs = [i for i in range(6) if texts[2 * i] == text]
  assert briefs == [2, 3]
  assert not any("brief" in texts[2 * i + 1] for i in range(6))
  with pytest.raises(ValueError, match=f"takes {len(ids)} tokens with its"):
    self_data.converse(
      decoder, models.tokenizer, range(6), temperatures=(1.0,),
      max_width=len(ids) - 1, systems=("Be brief.",),
    )  # fmt: skip


def test_answers_have_temperatures_of_their_own(target):
  config = huggingface.get_config(f"target={target}")
  config.num_speculative_tokens, config.max_new_tokens = 0, 6
  models = pair.build(config)
  decoder = OneWord(models.tokenizer)
  found = self_data.converse(
    decoder, models.tokenizer, range(8), temperatures=(0.5, 1.0),
    answer_temperatures=(0.0, 2.0), max_width=90,
  )  # fmt: skip
  drawn = {turn.stream: turn.settings.temperature for turn in decoder.asked}
  assert [drawn[2 * i] for i in range(8)] == [0.5, 1.0] * 4
  assert [drawn[2 * i + 1] for i in range(8)] == [0, 0, 2, 2, 0, 0, 2, 2]
  told = [(row["temperature"], row["answer_temperature"]) for row in found]
  assert told == [(drawn[2 * i], drawn[2 * i + 1]) for i in range(8)]


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
  config.num_speculative_tokens = 0
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


class KilledError(Exception):
  """What a test kills a run with."""


def test_a_killed_run_goes_on_to_the_same_conversations(
  execute, tmp_path, monkeypatch, capsys
):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  # A random model's words end nowhere: any token may be the last.
  real = pair.assemble

  def ending(config, models, **more):
    return dataclasses.replace(
      real(config, models, **more), stop_tokens=tuple(range(0, 4096, 3))
    )

  monkeypatch.setattr(pair, "assemble", ending)
  asked = ("--count=32", "--temperatures=1.5,2.0")
  assert execute(f"--output={whole}", *asked) == 0
  add, count = journal.Journal.add, [0]

  def die(self, record):
    add(self, record)
    count[0] += 1
    if count[0] == 2:
      raise KilledError

  with monkeypatch.context() as patch:
    patch.setattr(journal.Journal, "add", die)
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
  found = list(data._folder(whole, "train"))
  assert found[0] in [row["messages"] for row in rows]
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
    ("--config.mesh=data:2", "runs on one device"),
  ],
)
def test_mistakes_are_one_line(execute, tmp_path, capsys, flag, message):
  assert execute(f"--output={tmp_path / 'out'}", flag) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
