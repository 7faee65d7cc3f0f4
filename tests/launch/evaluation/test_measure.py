"""Groups of questions and their turns, without decoding."""

import dataclasses

import pytest
from files import EMBEDDED

from configs import common
from launch.evaluation import measure, questions, systems
from launch.evaluation.questions import Question
from models import tokenizers


def question(number, *turns, category="a"):
  return Question(id=number, category=category, task="t", turns=turns)


@pytest.fixture
def comparison():
  config = common.get_config()
  config.target = "models/pretrained/target"
  return measure.Comparison(
    systems=tuple(systems.parse("ngram,hf,hf_prompt_lookup", config)),
    pairs={}, engines={0.0: {}, 1.0: {}}, reference=None,
    tokenizer=tokenizers.load(EMBEDDED), room=40, seed=0, next_logits=None,
  )  # fmt: skip


@pytest.fixture
def decoded(comparison, monkeypatch):
  """The prompts of systems, each of which gives another answer."""
  asked = []

  def fake(_, system, group, turn, batch):
    asked.append((system.name, turn, batch))
    tokens = [
      comparison.tokenizer.encode(f"{system.name} {turn}")
      for _ in batch.prompts
    ]
    return {"tokens": [len(ids) for ids in tokens]}, tokens

  monkeypatch.setattr(measure, "_decoded", fake)
  return asked


def group(*questions, temperature=0.0, batch_size=1):
  return measure.Group(
    temperature=temperature, batch_size=batch_size, questions=questions
  )


def test_later_turns_use_plain_decoding_answers_for_all_systems(
  comparison, decoded
):
  record = measure.measure(comparison, group(question(1, "x", "y", "z")))
  texts = {
    (name, turn): comparison.tokenizer.decode(batch.prompts[0].token_ids)
    for name, turn, batch in decoded
  }
  for name in ("plain", "ngram", "hf", "hf_prompt_lookup"):
    assert texts[name, 1] == "x\n\nplain 0\n\ny"
    assert texts[name, 2] == "x\n\nplain 0\n\ny\n\nplain 1\n\nz"
  assert len(record["turns"]) == 3


def test_turn_results_follow_the_length_sorted_row_order(
  comparison, decoded, monkeypatch
):
  """Answers change the lengths, by which a batch is sorted."""
  longer = {1: "a b c d e f g", 2: "a"}
  inner = measure._decoded

  def answering(comparison, system, group, turn, batch):
    actual, _ = inner(comparison, system, group, turn, batch)
    tokens = [
      comparison.tokenizer.encode(longer[p.question.id]) for p in batch.prompts
    ]
    return actual | {"who": [p.question.id for p in batch.prompts]}, tokens

  monkeypatch.setattr(measure, "_decoded", answering)
  record = measure.measure(
    comparison, group(question(1, "x", "y", "z"), question(2, "x x", "y", "z"),
                   batch_size=2, temperature=1.0)
  )  # fmt: skip
  assert [turn["questions"] for turn in record["turns"]] == [
    [1, 2], [2, 1], [2, 1],
  ]  # fmt: skip
  for turn in record["turns"]:
    assert turn["systems"]["ngram"]["who"] == turn["questions"]
    assert turn["prompt_tokens"] == sorted(turn["prompt_tokens"])
  last = decoded[-1][2].prompts[-1]  # of question 1: its own answers, twice
  text = comparison.tokenizer.decode(last.token_ids)
  assert text == "\n\n".join(["x", longer[1], "y", longer[1], "z"])


def test_seconds_average_over_rounds_with_shuffled_system_order(
  comparison, decoded, monkeypatch
):
  inner, ticks = measure._decoded, iter(range(1, 99))

  def timed(*args):
    actual, tokens = inner(*args)
    return actual | {"seconds": next(ticks), "prefill_seconds": None}, tokens

  monkeypatch.setattr(measure, "_decoded", timed)
  twelve = dataclasses.replace(comparison, rounds=12)
  (turn,) = measure.measure(twelve, group(question(1, "x")))["turns"]
  names = [name for name, *_ in decoded]
  assert len({tuple(names[i : i + 4]) for i in range(0, 48, 4)}) > 6
  mine = [i + 1 for i, name in enumerate(names) if name == "ngram"]
  assert turn["systems"]["ngram"]["seconds"] == pytest.approx(sum(mine) / 12)
  assert turn["systems"]["hf"]["prefill_seconds"] is None


def asked(comparison, every):
  return [questions.request(comparison.tokenizer, q, 0, []) for q in every]


def test_groups_share_a_category_and_have_similar_lengths(comparison):
  every = [question(i, "x " * (9 - i % 9), category="ab"[i % 2])
           for i in range(7)]  # fmt: skip
  fit, refused = measure.fitting(asked(comparison, every), 40)
  assert refused == []
  groups = measure.groups_of(fit, [1.0], [3], room=40)
  assert [[q.id for q in g.questions] for g in groups] == [
    [6, 4, 2], [0], [5, 3, 1],
  ]  # fmt: skip
  assert len({g.name for g in groups}) == 3
