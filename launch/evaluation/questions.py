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

# Our own suite: what is asked if no file is given.
OWN = pathlib.Path(__file__).with_name("questions.jsonl")
PROMPTS = "prompts"  # the category of plain ones

# The tasks of Spec-Bench, by the categories in its file. A category that is
# not here is a task by itself, unless its line names one.
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


# What stands in SPEED-Bench's rows for a text that others own.
_NOT_FETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED"


def _said(turn: Any) -> Any:
  """The text of a turn, which may be a user's message."""
  if isinstance(turn, dict) and turn.get("role") == "user":
    turn = turn.get("content")
  if isinstance(turn, str) and _NOT_FETCHED in turn:
    raise ValueError("is no text yet: prepare SPEED-Bench by its script first")
  return turn


_Text = Annotated[str, pydantic.Field(min_length=1)]
_Turn = Annotated[_Text, pydantic.BeforeValidator(_said)]


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
  """A question of one or more turns, or a plain prompt, read as it is.

  Batches are of one category; numbers are summed up by task too.
  """

  id: int | str
  category: str
  task: str
  turns: tuple[str, ...]
  prompt: prompts_lib.Prompt | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """A question's turn, from 0, as a prompt: what the engine decodes.

  Its tokens are those of the conversation so far; it has no settings.
  """

  question: Question
  turn: int
  token_ids: tuple[int, ...]
  settings: ClassVar[Settings] = Settings()
  stop: ClassVar[tuple[str, ...]] = ()

  @property
  def stream(self) -> int:
    """A plain prompt's own, else a hash of id and turn: no place in a file."""
    if self.question.prompt is not None:
      return self.question.prompt.stream
    text = json.dumps([self.question.id, self.turn])
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)

  @property
  def input_ids(self) -> tuple[int, ...] | None:
    """Tokens that the encoder reads, of a plain prompt, or None."""
    return self.question.prompt and self.question.prompt.input_ids


def read(path: str | pathlib.Path) -> list[Question]:
  """Reads lines of Spec-Bench's form, or of SPEED-Bench's as it is prepared.

  That is `{"question_id": 81, "category": "writing", "turns": ["...", "..."]}`,
  and "task" if it is none of `TASKS`; other keys are ignored. SPEED-Bench has
  `"messages": [{"role": "user", "content": "..."}]` for the turns, and each of
  its categories is a task.
  """
  questions: dict[int | str, Question] = {}
  for number, record in results.read_jsonl(path):
    try:
      line = _Line.model_validate(record)
    except pydantic.ValidationError as error:
      field, reason = prompts_lib.reason_of(error)
      raise ValueError(f"{path}:{number}: {field} {reason}") from None
    tasks = {} if "messages" in record else TASKS
    if line.question_id in questions:
      identity = f"question_id {line.question_id!r}"
      raise ValueError(f"{path}:{number}: {identity} is there twice")
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
  """Plain prompts as questions of one turn, each text once.

  Completions of one prompt would be no independent units of an interval.
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
  """So many questions, of every category its share, drawn by a seed.

  Shares are rounded by largest remainders. All, if there are no more.
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


def ask(
  tokenizer: Tokenizer,
  question: Question,
  turn: int,
  answers: Sequence[Sequence[int]],
) -> Asked:
  """A turn as a prompt, after the turns before it and their answers.

  A tokenizer with a chat template gets messages of "user" and "assistant";
  without one, texts stand under each other, an empty line between them.
  """
  if question.prompt is not None:
    ids = question.prompt.token_ids
    return Asked(question=question, turn=turn, token_ids=ids)
  texts = [question.turns[0]]
  ids = _encoded(tokenizer, texts)
  for answer, said in zip(answers, question.turns[1 : turn + 1], strict=False):
    texts += [tokenizer.decode(answer, after=ids), said]
    ids = _encoded(tokenizer, texts)
  return Asked(question=question, turn=turn, token_ids=tuple(ids))


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
  if tokenizer.chat_template is None:
    return tokenizer.encode("\n\n".join(texts))
  roles = itertools.cycle(["user", "assistant"])
  return chat.encode(
    tokenizer,
    [{"role": r, "content": x} for r, x in zip(roles, texts, strict=False)],
  )
