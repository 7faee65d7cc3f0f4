"""Conversations that a chat model makes up by itself (Magpie, Xu et al. 2024).

A chat template begins a user's turn with the same tokens in every conversation.
A model that is given those and nothing else says what a user might, and then
answers; behind an answer they have it ask on. The result is training text of
the very law that a draft has to learn, made of nothing but the model; what a
test asks must not be in it, and is looked for word by word.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from launch.serving import jobs
from launch.serving.control import Asked
from models import chat
from models.tokenizers import Tokenizer
from specjax.state import StopReason

_MARK = "\ufdd1"  # a character that no text has
_WORD = re.compile(r"\w+")
_NGRAM = 13  # words that two texts have in common by no accident
_LEAST = 6  # a shorter text stands in others by chance: it must be all of one


def before_the_user(
  tokenizer: Tokenizer, system: str = "", said: Sequence[Mapping[str, str]] = ()
) -> tuple[int, ...]:
  """The tokens with which a template begins a user's turn.

  Args:
    tokenizer: with a chat template.
    system: the system's words before it; "" for the template's own.
    said: the messages before it.

  Raises:
    ValueError: if there is no template, or it begins with the user's words, or
      it leaves out what the system says.
  """
  messages = [*said, {"role": "user", "content": _MARK}]
  if system:
    messages.insert(0, {"role": "system", "content": system})
  text = chat.render(tokenizer, messages, add_generation_prompt=False)
  if system not in text:
    raise ValueError("the chat template has no place for what the system says")
  before, mark, _ = text.partition(_MARK)
  if not mark or not before:
    raise ValueError(
      "the chat template puts nothing before what a user says: a model cannot "
      "be asked to say it"
    )
  return tuple(chat.encode_rendered(tokenizer, before))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maker:
  """Makes conversations, by jobs that ask a model for each turn.

  Attributes:
    tokenizer: with a chat template.
    budget: tokens of either turn, at most.
    room: tokens that may stand before an answer, at most.
    temperatures: of the user's turn; conversation i has that of place
      `i % len(temperatures)`.
    answer_temperatures: of the answer, the next one each time all users' turns
      have had all temperatures and all that a system says; None for that of the
      user's turn.
    turns: conversation i has up to `1 + i % turns` of a user's turns, as many
      as there is room for.
    begun: messages up to a user's turn: conversation i begins with the i-th,
      and those after the last have a made-up user.
    systems: what the system says while the user's turn is made up, "" for the
      template's own words; conversation i has the place
      `i // len(temperatures)`, from the beginning again after the last. The
      answer is given without it.
    seed: turn t of conversation i draws from streams `2 (turns i + t)` and the
      one after it.
    top_k, top_p, min_p: of both turns, see `specjax.types.Sampling`.
  """

  tokenizer: Tokenizer
  budget: int
  room: int
  temperatures: Sequence[float]
  answer_temperatures: Sequence[float] | None = None
  turns: int = 1
  begun: Sequence[Sequence[Mapping[str, str]]] = ()
  systems: Sequence[str] = ("",)
  seed: int = 0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  @functools.cached_property
  def begins(self) -> list[tuple[int, ...]]:
    """The tokens before a user's turn, for each of `systems`."""
    return [before_the_user(self.tokenizer, text) for text in self.systems]

  @functools.cached_property
  def longest(self) -> int:
    """Tokens of the longest prompt that is asked, at most.

    All the room, if users ask on or prompts are given: they are as long as
    they are.

    Raises:
      ValueError: if what the system says is longer than `room`, or a template
        has no place for it.
    """
    before = max(map(len, self.begins))
    if before > self.room:
      raise ValueError(
        f"what the system says takes {before} tokens with its template, and "
        f"there is room for {self.room} before an answer"
      )
    if self.turns > 1 or self.begun:
      return self.room
    nothing = [{"role": "user", "content": ""}]
    around = len(chat.encode(self.tokenizer, nothing))
    return min(self.room, max(before, around + self.budget))

  def conversation(self, number: int) -> jobs.Job[dict[str, Any] | None]:
    """A conversation, in two completions a turn.

    Args:
      number: its own: it decides all draws.

    Returns:
      The job. It makes `{"number", "temperature", "answer_temperature",
      "messages", "whole"}`, the last whether the last answer ended by itself;
      None if the first user's turn did not, was empty, or is too long.
    """
    begun = self.begun[number] if number < len(self.begun) else ()
    place, warmth = divmod(number, len(self.temperatures))
    temperature = answered = self.temperatures[warmth]
    if self.answer_temperatures is not None:
      cycle = number if begun else place // len(self.systems)
      answered = self.answer_temperatures[cycle % len(self.answer_temperatures)]
    begin = self.begins[place % len(self.systems)]
    messages: list[dict[str, str]] = []
    whole, stream = True, 2 * self.turns * number
    for turn in range(1 + number % self.turns):
      if turn:
        begin = before_the_user(self.tokenizer, said=messages)
      if begun and not turn:
        asked = [dict(message) for message in begun]
      else:
        if not whole or len(begin) > self.longest:
          break
        question, ended = self._said(
          (yield self._asked(begin, stream + 2 * turn, temperature))
        )
        if not (ended and question):
          break
        asked = [*messages, {"role": "user", "content": question}]
      prompt = tuple(chat.encode(self.tokenizer, asked))
      if len(prompt) > self.longest:
        break
      answer, whole = self._said(
        (yield self._asked(prompt, stream + 2 * turn + 1, answered))
      )
      messages = [*asked, {"role": "assistant", "content": answer}]
    if not messages:
      return None
    return {
      "number": number,
      "temperature": temperature,
      "answer_temperature": answered,
      "messages": messages,
      "whole": whole,
    }

  def _asked(self, token_ids, stream: int, temperature: float) -> Asked:
    return Asked(
      token_ids=token_ids,
      seed=self.seed,
      stream=stream % 2**32,
      max_new_tokens=self.budget,
      temperature=temperature,
      top_k=self.top_k,
      top_p=self.top_p,
      min_p=self.min_p,
    )

  def _said(self, completed: jobs.Completed) -> tuple[str, bool]:
    ids = completed.token_ids
    whole = completed.reason == StopReason.STOP_TOKEN
    return self.tokenizer.decode(ids[:-1] if whole else ids).strip(), whole


# ------------------------------------------------------------- what is kept


def sifted(
  conversations: Iterable[Mapping[str, Any]],
  is_tested: Callable[[Sequence[Mapping[str, str]]], bool],
) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
  """Filters conversations, and counts those dropped and kept.

  Args:
    conversations: from `Maker.conversation`.
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
    texts = [words(message["content"]) for message in one["messages"]]
    key = tuple(texts[0])
    if not all(texts):
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
  tests: Iterable[str],
) -> Callable[[Sequence[Mapping[str, str]]], bool]:
  """A test for conversations that contain parts of a test set's texts.

  13 words in a row, in lower case and without punctuation, are no accident. Of
  a shorter text all words are looked for, and of one of less than six a message
  that is nothing else.
  """
  runs: dict[int, set[tuple[str, ...]]] = {}
  whole = set()
  for text in tests:
    said = words(text)
    whole.add(tuple(said))
    if len(said) < _LEAST:
      continue
    size = min(_NGRAM, len(said))
    runs.setdefault(size, set()).update(_runs(said, size))

  def is_tested(messages: Sequence[Mapping[str, str]]) -> bool:
    for message in messages:
      said = words(message["content"])
      if tuple(said) in whole or any(
        not some.isdisjoint(_runs(said, size)) for size, some in runs.items()
      ):
        return True
    return False

  return is_tested


def words(text: str) -> list[str]:
  """Its words in lower case."""
  return _WORD.findall(text.lower())


def _runs(sequence: Sequence[str], size: int) -> Iterable[tuple[str, ...]]:
  return (
    tuple(sequence[i : i + size]) for i in range(len(sequence) - size + 1)
  )
