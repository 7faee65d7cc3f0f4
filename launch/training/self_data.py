"""Conversations that a chat model makes up by itself (Magpie, Xu et al. 2024).

A chat template begins a user's turn with the same tokens in every conversation.
A model that is given those and nothing else says what a user might, and then
answers. The result is training text of the very law that a draft has to learn,
made of nothing but the model; what a test asks must not be in it, and is looked
for word by word.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from models import chat
from models.tokenizers import Tokenizer
from specjax import engine
from specjax.engine import Engine
from specjax.requests import Settings

_MARK = "\ufdd1"  # a character that no text has
_WORD = re.compile(r"\w+")
_LEAST = 6  # a shorter text stands in others by chance: it must be all of one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
  """A turn that is asked of the engine.

  Attributes:
    token_ids: what stands before it.
    stream: what its draws come from.
    settings: its temperature.
    stop: nothing but the model's own stop tokens.
  """

  token_ids: tuple[int, ...]
  stream: int
  settings: Settings
  stop: tuple[str, ...] = ()


def before_the_user(tokenizer: Tokenizer, system: str = "") -> tuple[int, ...]:
  """The tokens with which a template begins what a user says.

  Args:
    tokenizer: with a chat template.
    system: what the system says before; "" for what the template has there.

  Raises:
    ValueError: if there is no template, or it begins with the user's words, or
      it leaves out what the system says.
  """
  messages = [{"role": "user", "content": _MARK}]
  if system:
    messages.insert(0, {"role": "system", "content": system})
  text = chat.render(tokenizer, messages, add_generation_prompt=False)
  if system not in text:
    raise ValueError("the chat template has no place for what the system says")
  before, found, _ = text.partition(_MARK)
  if not found or not before:
    raise ValueError(
      "the chat template puts nothing before what a user says: a model cannot "
      "be asked to say it"
    )
  return tuple(chat.encode_rendered(tokenizer, before))


def converse(
  decoder: Engine,
  tokenizer: Tokenizer,
  numbers: Sequence[int],
  *,
  temperatures: Sequence[float],
  max_width: int,
  answer_temperatures: Sequence[float] | None = None,
  systems: Sequence[str] = ("",),
) -> list[dict[str, Any]]:
  """Makes one batch of conversations.

  Args:
    decoder: the engine; its budget is that of either turn.
    tokenizer: with a chat template.
    numbers: of the conversations: they decide all draws. Conversation i is
      drawn at the temperature `i % len(temperatures)`.
    temperatures: of the user's turn.
    max_width: most tokens before an answer.
    answer_temperatures: of the answer, the next one each time all users' turns
      have had all temperatures and all that a system says; None for that of the
      user's turn.
    systems: what the system says while the user's turn is made up, "" for the
      template's own words; conversation i has the place
      `i // len(temperatures)`, from the beginning again after the last. The
      answer is given without it.

  Returns:
    For each `{"number", "temperature", "answer_temperature", "messages",
    "whole"}`: whether both turns ended by themselves. None of a user's turn
    that did not, was empty, or was too long.

  Raises:
    ValueError: if what a system says is longer than `max_width`.
  """
  begins = [before_the_user(tokenizer, text) for text in systems]
  longest = max(map(len, begins))
  if longest > max_width:
    raise ValueError(
      f"what the system says takes {longest} tokens with its template, and "
      f"there is room for {max_width} before an answer"
    )
  warmth = {i: temperatures[i % len(temperatures)] for i in numbers}
  answered = warmth
  if answer_temperatures is not None:
    all_users = len(temperatures) * len(systems)
    answered = {
      i: answer_temperatures[i // all_users % len(answer_temperatures)]
      for i in numbers
    }
  begin = {i: begins[i // len(temperatures) % len(begins)] for i in numbers}

  def said(turns: dict[int, tuple[int, ...]], which: int):
    asked = [
      Turn(
        token_ids=ids,
        stream=(2 * i + which) % 2**32,
        settings=Settings(temperature=(warmth, answered)[which][i]),
      )
      for i, ids in turns.items()
    ]
    if not asked:
      return
    batches = engine.make_batches(
      asked, batch_size=len(numbers), max_width=max_width, among=len(numbers)
    )
    for batch in batches:
      done, _ = decoder.run(batch)
      for turn, completion in zip(batch.prompts, done, strict=True):
        ids = completion.token_ids
        whole = completion.stop_reason == "stop_token"
        text = tokenizer.decode(ids[:-1] if whole else ids).strip()
        yield turn.stream // 2, text, whole

  questions = {
    i: text for i, text, whole in said(begin, 0)
    if whole and text
  }  # fmt: skip
  prompts = {
    i: tuple(chat.encode(tokenizer, [{"role": "user", "content": text}]))
    for i, text in sorted(questions.items())
  }
  prompts = {i: ids for i, ids in prompts.items() if len(ids) <= max_width}
  found = {}
  for i, text, whole in said(prompts, 1):
    found[i] = {
      "number": i,
      "temperature": warmth[i],
      "answer_temperature": answered[i],
      "messages": [
        {"role": "user", "content": questions[i]},
        {"role": "assistant", "content": text},
      ],
      "whole": whole,
    }
  return [found[i] for i in sorted(found)]


# ------------------------------------------------------------- what is kept


def sifted(
  conversations: Iterable[Mapping[str, Any]],
  is_tested: Callable[[Sequence[Mapping[str, str]]], bool],
) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
  """What is kept of conversations, in their order.

  Args:
    conversations: from `converse`.
    is_tested: whether something of a test is in one, from `overlap`.

  Returns:
    Those that say something, ask nothing that was asked before, whatever its
    case and punctuation, and have nothing of a test; and how many were
    "generated", "empty", "repeated", "overlapping" and "kept".
  """
  counts = dict.fromkeys(
    ("generated", "empty", "repeated", "overlapping", "kept"), 0
  )
  kept, asked = [], set()
  for one in conversations:
    counts["generated"] += 1
    question, answer = (m["content"] for m in one["messages"])
    key = tuple(words(question))
    if not key or not words(answer):
      counts["empty"] += 1
    elif key in asked:
      counts["repeated"] += 1
    elif is_tested(one["messages"]):
      counts["overlapping"] += 1
    else:
      asked.add(key)
      kept.append(one)
  counts["kept"] = len(kept)
  return kept, counts


def overlap(
  tests: Iterable[str], *, ngram: int = 13
) -> Callable[[Sequence[Mapping[str, str]]], bool]:
  """What tells whether conversations have something of a test's texts.

  Args:
    tests: the texts.
    ngram: so many words in a row, in lower case and without punctuation, are
      no accident. Of a shorter text all words are looked for, and of one of
      less than six a message that is nothing else.

  Returns:
    `messages -> bool`.
  """
  runs: dict[int, set[tuple[str, ...]]] = {}
  whole = set()
  for text in tests:
    found = words(text)
    whole.add(tuple(found))
    if len(found) < _LEAST:
      continue
    size = min(ngram, len(found))
    runs.setdefault(size, set()).update(_runs(found, size))

  def is_tested(messages: Sequence[Mapping[str, str]]) -> bool:
    for message in messages:
      found = words(message["content"])
      if tuple(found) in whole or any(
        not some.isdisjoint(_runs(found, size)) for size, some in runs.items()
      ):
        return True
    return False

  return is_tested


def words(text: str) -> list[str]:
  """Its words in lower case."""
  return _WORD.findall(text.lower())


def _runs(found: Sequence[str], size: int) -> Iterable[tuple[str, ...]]:
  return (tuple(found[i : i + size]) for i in range(len(found) - size + 1))
