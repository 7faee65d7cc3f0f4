"""Questions and plain prompts: reading, selecting and tokenizing them."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from launch import prompts as prompts_lib
from launch import results
from models import chat
from models.tokenizers import Tokenizer
from specjax.runtime.requests import Settings

# Our own suite: what is asked if no file is given.
OWN = pathlib.Path(__file__).with_name("questions.jsonl")
# The category of plain prompts.
PROMPTS = "prompts"

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """A question of one or more turns, or a plain prompt.

  Attributes:
    id: whatever the file calls it.
    category: what kind of question it is; batches are of one category.
    task: what numbers are summed up by, beside categories.
    turns: what is said to the model, one text a turn.
    prompt: a plain prompt, which is read as it is and has one turn, or None.
  """

  id: int | str
  category: str
  task: str
  turns: tuple[str, ...]
  prompt: prompts_lib.Prompt | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """A question's turn as a prompt: what `specjax.runtime.engine` decodes.

  Attributes:
    question: the question.
    turn: which of its turns, from 0.
    token_ids: of the conversation so far.
    stream: what its draws come from: a plain prompt's own, else a hash of id
      and turn, so that neither the question's place in the file nor the other
      questions change it.
    input_ids: tokens that the encoder reads, of a plain prompt, or None.
    settings, stop: nothing of its own: all questions are asked alike.
  """

  question: Question
  turn: int
  token_ids: tuple[int, ...]
  settings: ClassVar[Settings] = Settings()
  stop: ClassVar[tuple[str, ...]] = ()

  @property
  def stream(self) -> int:
    """See `specjax.runtime.requests.Request`."""
    if self.question.prompt is not None:
      return self.question.prompt.stream
    text = json.dumps([self.question.id, self.turn])
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)

  @property
  def input_ids(self) -> tuple[int, ...] | None:
    """See `specjax.runtime.requests.Request`."""
    return self.question.prompt and self.question.prompt.input_ids


def read(path: str | pathlib.Path) -> list[Question]:
  """Reads lines of Spec-Bench's form.

  That is `{"question_id": 81, "category": "writing", "turns": ["...", "..."]}`,
  and "task" if it is none of `TASKS`; other keys are not looked at.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: for a line that is no question, naming it; or if there is none.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(f"no such file of questions: {path}")
  questions: dict[int | str, Question] = {}
  for number, record in results.read_jsonl(file):
    try:
      question = _parsed(record)
      if question.id in questions:
        raise ValueError(f"question_id {question.id!r} is there twice")
    except ValueError as error:
      raise ValueError(f"{path}:{number}: {error}") from None
    questions[question.id] = question
  if not questions:
    raise ValueError(f"no questions in {path}")
  return list(questions.values())


def _parsed(record: Any) -> Question:
  """The question of a line; ValueError if it is none."""
  if not isinstance(record, dict):
    raise ValueError("expected an object with question_id, category and turns")
  identity, turns = record.get("question_id"), record.get("turns")
  if type(identity) not in (int, str):
    raise ValueError("question_id must be an integer or a string")
  category = record.get("category")
  if not isinstance(category, str) or not category:
    raise ValueError("category must be a string that is not empty")
  if not isinstance(turns, list) or not turns:
    raise ValueError("turns must be a list of one or more strings")
  if not all(isinstance(turn, str) and turn.strip() for turn in turns):
    raise ValueError("turns must be strings that are not empty")
  task = record.get("task", TASKS.get(category, category))
  if not isinstance(task, str) or not task:
    raise ValueError("task must be a string that is not empty")
  if "all" in (category, task):
    raise ValueError("'all' is what all questions together are called")
  for text in (str(identity), category, task, *turns):
    try:
      text.encode()
    except UnicodeEncodeError:
      raise ValueError("it holds half a character (a lone surrogate)") from None
  return Question(id=identity, category=category, task=task, turns=tuple(turns))


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


def of_categories(
  questions: Sequence[Question], names: Sequence[str]
) -> list[Question]:
  """Questions of some categories or tasks; ValueError for unknown ones."""
  known = {name for q in questions for name in (q.category, q.task)}
  if missing := sorted(set(names) - known):
    raise ValueError(
      f"no questions of {', '.join(missing)}; there are {sorted(known)}"
    )
  return [q for q in questions if {q.category, q.task} & set(names)]


def subset(
  questions: Sequence[Question], count: int, *, seed: int
) -> list[Question]:
  """So many questions, of every category its share, drawn by a seed.

  Shares are rounded by largest remainders, and earlier categories first among
  equal ones. All questions, if there are no more.
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

  Args:
    tokenizer: the target's.
    question: the question.
    turn: which turn, from 0.
    answers: tokens of the answer to each turn before.

  Raises:
    ValueError: for what the chat template refuses.
  """
  if question.prompt is not None:
    ids = question.prompt.token_ids
    return Asked(question=question, turn=turn, token_ids=ids)
  told: list[str] = []
  for answer in answers[:turn]:
    before = _encoded(tokenizer, question, told)
    told.append(tokenizer.decode(answer, after=before))
  token_ids = tuple(_encoded(tokenizer, question, told))
  return Asked(question=question, turn=turn, token_ids=token_ids)


def _encoded(
  tokenizer: Tokenizer, question: Question, told: Sequence[str]
) -> list[int]:
  """Ids of the turn after so many answers."""
  turn = len(told)
  if tokenizer.chat_template is None:
    texts = [question.turns[0]]
    for answer, said in zip(told, question.turns[1 : turn + 1], strict=True):
      texts += [answer, said]
    return tokenizer.encode("\n\n".join(texts))
  messages: list[Mapping[str, str]] = []
  for said, answer in zip(question.turns, told, strict=False):
    messages.append({"role": "user", "content": said})
    messages.append({"role": "assistant", "content": answer})
  messages.append({"role": "user", "content": question.turns[turn]})
  try:
    return chat.encode(tokenizer, messages)
  except ValueError as error:
    raise ValueError(
      f"question {question.id!r}, turn {turn + 1}: {error}"
    ) from None
