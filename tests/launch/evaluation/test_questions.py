"""Questions: what is read, what is chosen, and the prompts they become."""

import collections
import dataclasses

import pytest
from files import EMBEDDED, write_jsonl

from launch.evaluation import questions
from launch.evaluation.questions import Question
from models import tokenizers

TEMPLATE = (
  "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
  "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def question(number, category, *turns):
  return Question(
    id=number, category=category, task=category, turns=turns or ("x",)
  )


def test_spec_bench_files_are_read_with_their_tasks(tmp_path):
  path = write_jsonl(
    tmp_path / "q.jsonl",
    [
      {"question_id": 81, "category": "writing", "turns": ["a", "b"],
       "reference": ["c"]},
      {"question_id": "x", "category": "qa", "turns": ["d"]},
      {"question_id": 3, "category": "poems", "turns": ["e"]},
      {"question_id": 4, "category": "poems", "task": "art", "turns": ["f"]},
    ],
  )  # fmt: skip
  actual = questions.read(path)
  assert [q.id for q in actual] == [81, "x", 3, 4]
  assert actual[0].turns == ("a", "b")
  assert [q.task for q in actual] == [
    "multi-turn conversation", "question answering", "poems", "art",
  ]  # fmt: skip


def spoken(*texts, role="user"):
  return [{"role": role, "content": text} for text in texts]


def test_speed_bench_user_messages_become_turns(tmp_path):
  line = {"question_id": "a" * 32, "category": "writing", "multiturn": True}
  path = write_jsonl(
    tmp_path / "qualitative.jsonl",
    [line | {"messages": spoken("a", "b"), "source": "x", "src_id": None}],
  )
  (actual,) = questions.read(path)
  assert actual.turns == ("a", "b")
  assert actual.task == actual.category == "writing"


MISSING = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X"


@pytest.mark.parametrize(
  ("turns", "message"),
  [
    ({"turns": ["a", MISSING]}, "turns.1 is a placeholder: run SPEED-Bench"),
    ({"messages": spoken(MISSING)}, "messages.0 is a placeholder"),
    ({"messages": spoken("a", role="system")}, "messages.0 Input should be a"),
    ({}, "turns Field required"),
  ],
)
def test_invalid_turns_are_rejected_with_their_location(
  turns, message, tmp_path
):
  line = {"question_id": 1, "category": "qa"}
  path = write_jsonl(tmp_path / "q.jsonl", [line | turns])
  with pytest.raises(ValueError, match=f"q.jsonl:1: {message}"):
    questions.read(path)


def test_subset_is_stratified_by_category_and_seeded():
  every = [question(i, "a") for i in range(60)]
  every += [question(i, "b") for i in range(60, 90)]
  every += [question(i, "c") for i in range(90, 97)]
  some = questions.subset(every, 20, seed=3)
  assert collections.Counter(q.category for q in some) == {
    "a": 12, "b": 6, "c": 2,  # of 12.4, 6.2 and 1.4
  }  # fmt: skip
  assert some == [q for q in every if q in some]  # in the order of the file
  assert some == questions.subset(every, 20, seed=3)
  assert some != questions.subset(every, 20, seed=4)
  assert questions.subset(every, 97, seed=3) == every


def test_turns_become_chat_messages_or_concatenated_text():
  plain = tokenizers.load(EMBEDDED)
  chatty = dataclasses.replace(plain, chat_template=TEMPLATE)
  one = question(1, "a", "first", "second")
  answers = [plain.encode("answer")]
  text = lambda tokenizer, turn: plain.decode(
    questions.request(tokenizer, one, turn, answers).token_ids
  )
  assert text(plain, 0) == "first"
  assert text(plain, 1) == "first\n\nanswer\n\nsecond"
  assert text(chatty, 0) == "<user>first<assistant>"
  assert text(chatty, 1) == (
    "<user>first<assistant>answer<user>second<assistant>"
  )
