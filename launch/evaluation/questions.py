"""Questions and plain prompts: reading, selecting and tokenizing them."""

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import pydantic

from launch import prompts as prompts_lib
from launch import results
from models import chat
from models.tokenizers import Tokenizer
from specjax.runtime.requests import Settings

# Our own suite, the default.
OWN = pathlib.Path(__file__).with_name("questions.jsonl")
PROMPTS = "prompts"  # the category of plain prompts

# The tasks of Spec-Bench, by the categories in its file. Any other category is
# its own task, unless its line names one.
TASKS = {
  **dict.fromkeys(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction",
     "stem", "humanities"),
    "multi-turn conversation",
  ),
  "translation": "translation",
  "summarization": "summarization",
  "qa": "question answering",
  "math_reasoning": "mathematical reasoning",
  "rag": "retrieval-augmented generation",
}  # fmt: skip


# Placeholders for third-party texts in SPEED-Bench.
_NOT_FETCHED = ("FULL BENCHMARK DATA SHOULD BE FETCHED", "{article}")


def _text_of(turn: Any) -> Any:
  """The text of a turn, which may be a message."""
  if isinstance(turn, dict) and turn.get("role") == "user":
    turn = turn.get("content")
  if isinstance(turn, str) and any(text in turn for text in _NOT_FETCHED):
    raise ValueError("is a placeholder: run SPEED-Bench's preparation script")
  return turn


_Text = Annotated[str, pydantic.Field(min_length=1)]
_Turn = Annotated[_Text, pydantic.BeforeValidator(_text_of)]


class _Line(pydantic.BaseModel):
  """A line of a file of questions; other keys are ignored."""

  question_id: pydantic.StrictInt | pydantic.StrictStr
  category: _Text
  task: _Text | None = None
  turns: list[_Turn] = pydantic.Field(
    min_length=1, validation_alias=pydantic.AliasChoices("turns", "messages")
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """A question of one or more turns, or a plain prompt.

  Batches have one category; numbers are also summed by task.
  """

  id: int | str
  category: str
  task: str
  turns: tuple[str, ...]
  prompt: prompts_lib.Prompt | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A turn of a question, from 0, as a prompt for the engine.

  Its tokens are the conversation so far; it has no settings.
  """

  question: Question
  turn: int
  token_ids: tuple[int, ...]
  settings: ClassVar[Settings] = Settings()
  stop: ClassVar[tuple[str, ...]] = ()

  @property
  def stream(self) -> int:
    """A plain prompt's stream, else a hash of id and turn."""
    if self.question.prompt is not None:
      return self.question.prompt.stream
    text = json.dumps([self.question.id, self.turn])
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)

  @property
  def input_ids(self) -> tuple[int, ...] | None:
    """The encoder's input tokens of a plain prompt, or None."""
    return self.question.prompt and self.question.prompt.input_ids


def read(path: str | pathlib.Path) -> list[Question]:
  """Reads a file in Spec-Bench's format, or in that of prepared SPEED-Bench.

  A line is `{"question_id": 81, "category": "writing", "turns": ["...",
  "..."]}`, with "task" if it is not one of `TASKS`; other keys are ignored.
  SPEED-Bench has `"messages": [{"role": "user", "content": "..."}]` instead of
  turns, and each of its categories is a task.
  """
  questions: dict[int | str, Question] = {}
  for number, record in results.read_jsonl(path):
    try:
      line = _Line.model_validate(record)
    except pydantic.ValidationError as error:
      field, reason = prompts_lib.reason_of(error)
      raise ValueError(f"{path}:{number}: {field} {reason}") from None
    tasks = TASKS if "turns" in record else {}
    if line.question_id in questions:
      identity = f"question_id {line.question_id!r}"
      raise ValueError(f"{path}:{number}: duplicate {identity}")
    questions[line.question_id] = Question(
      id=line.question_id,
      category=line.category,
      task=line.task or tasks.get(line.category, line.category),
      turns=tuple(line.turns),
    )
  if not questions:
    raise ValueError(f"no questions in {path}")
  return list(questions.values())


def of_prompts(items: Sequence[prompts_lib.Prompt]) -> list[Question]:
  """Makes questions of one turn from plain prompts, each text once.

  Several completions of a prompt would not be independent units.
  """
  return [
    Question(
      id=one.id if type(one.id) in (int, str) else json.dumps(one.id),
      category=PROMPTS,
      task=PROMPTS,
      turns=((one.input or "") + one.text,),
      prompt=one,
    )
    for one in prompts_lib.distinct(items)
  ]


def subset(
  questions: Sequence[Question], count: int, *, seed: int
) -> list[Question]:
  """Draws `count` questions, stratified by category.

  Quotas are rounded by largest remainders. Returns all if there are no more.
  """
  if count >= len(questions):
    return list(questions)
  places: dict[str, list[int]] = {}
  for place, question in enumerate(questions):
    places.setdefault(question.category, []).append(place)
  exact = [count * len(p) / len(questions) for p in places.values()]
  sizes = np.floor(exact).astype(int)
  order = np.argsort(sizes - exact, kind="stable")
  sizes[order[: count - sizes.sum()]] += 1
  rng = np.random.default_rng(seed)
  kept: list[int] = []
  for of_category, size in zip(places.values(), sizes, strict=True):
    kept += rng.permutation(of_category)[:size].tolist()
  return [questions[place] for place in sorted(kept)]


def request(
  tokenizer: Tokenizer,
  question: Question,
  turn: int = 0,
  answers: Sequence[Sequence[int]] = (),
) -> Request:
  """Makes the prompt of a turn, with all earlier turns and their answers.

  With a chat template these are messages of "user" and "assistant"; without
  one, the texts are separated by empty lines.
  """
  if question.prompt is not None:
    ids = question.prompt.token_ids
    return Request(question=question, turn=turn, token_ids=ids)
  texts = [question.turns[0]]
  ids = _encoded(tokenizer, texts)
  for answer, text in zip(answers, question.turns[1 : turn + 1], strict=False):
    texts += [tokenizer.decode(answer, after=ids), text]
    ids = _encoded(tokenizer, texts)
  return Request(question=question, turn=turn, token_ids=tuple(ids))


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
  if tokenizer.chat_template is None:
    return tokenizer.encode("\n\n".join(texts))
  roles = itertools.cycle(["user", "assistant"])
  return chat.encode(
    tokenizer,
    [{"role": r, "content": x} for r, x in zip(roles, texts, strict=False)],
  )
