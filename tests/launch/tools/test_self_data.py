"""Conversations that a model makes up, and what must not be in them."""

import dataclasses
import json

import files
from commands import execute

from launch.assembly import pair
from launch.tools import self_data
from launch.training import data

CHATML = (
  "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n"
  "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def message(text):
  return [{"role": "user", "content": text}]


def test_overlap_detects_test_text_despite_case_and_position():
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


def test_empty_duplicate_and_test_conversations_are_dropped():
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


def test_generated_conversations_load_as_training_data(tmp_path, monkeypatch):
  target, folder, build = tmp_path / "model", tmp_path / "made", pair.build
  files.make_checkpoint(target, num_layers=1)
  (target / "chat_template.jinja").write_text(CHATML)
  # A random model's words end nowhere: any token may be the last.
  monkeypatch.setattr(pair, "build", lambda config: dataclasses.replace(
    build(config), stop_tokens=tuple(range(0, 4096, 3))
  ))  # fmt: skip
  prompts = tmp_path / "prompts.jsonl"
  files.write_jsonl(prompts, [{"messages": message(x)} for x in ("y", "z")])
  assert execute(
    self_data.run, f"--config=configs/huggingface.py:target={target}",
    "--config.drafter=plain", "--config.max_new_tokens=12", "--num_rows=4",
    f"--output={folder}", f"--prompts={prompts}", "--count=16",
    "--temperatures=1.5,2.0", "--answer_temperatures=0",
  ) == 0  # fmt: skip
  rows = files.read_jsonl(folder / "conversations.jsonl")
  first = [row["messages"][0]["content"] for row in rows if row["number"] < 2]
  assert first == ["y", "z"]
  assert max(row["number"] for row in rows) > 1
  about = json.loads((folder / "about.json").read_text())
  assert about["kept"] == len(rows) <= about["made"] == 16
  texts = data.documents_of(folder / "conversations.jsonl")
  assert list(texts) == [row["messages"] for row in rows]
