"""A conversation's token ids, turn by turn, as the model's template makes them.

What was generated stays as it is: an answer's ids are never made from its text
again. What stands between an answer and the next one is what the template
writes there. Where a template writes an answer, or what came before it, in
another way once the conversation goes on, all of it is made anew.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from models import chat
from models.tokenizers import Tokenizer

Message = dict[str, str]

# Stands for an answer while a template is asked what it writes around it; a
# character that Unicode assigns to nobody.
_PLACE = "\ufdd1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
  """A question, as the model is to read it.

  Attributes:
    messages: the conversation, the question last.
    ids: of all of it, with what begins the answer.
    anew: why the ids do not begin with those of the conversation so far, or "".
  """

  messages: tuple[Message, ...]
  ids: tuple[int, ...]
  anew: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
  """What was said.

  Attributes:
    tokenizer: of the model, with a chat template.
    stop_tokens: ids that end an answer.
    messages: as templates read them; an answer last, unless nothing was said.
    ids: what the model has read and written, or None if that is to be made
      anew.
  """

  tokenizer: Tokenizer
  stop_tokens: tuple[int, ...]
  messages: tuple[Message, ...] = ()
  ids: tuple[int, ...] | None = None

  @property
  def has_answer(self) -> bool:
    """Whether anything was said beside a system's message."""
    return any(message["role"] == "assistant" for message in self.messages)

  def ask(self, text: str) -> Turn:
    """The next turn; nothing is said until it is `answered`.

    Raises:
      ValueError: if the template refuses it.
    """
    messages = (*self.messages, {"role": "user", "content": text})
    more: list[int] | str = "it is the first question"
    if self.has_answer:
      more = "the system's message is another"
    if self.has_answer and self.ids is not None:
      more = following(
        self.tokenizer, messages, self.ids, ended=self._has_ended()
      )
    if isinstance(more, str):
      ids = chat.encode(self.tokenizer, messages)
      return Turn(messages=messages, ids=tuple(ids), anew=more)
    assert self.ids is not None
    return Turn(messages=messages, ids=(*self.ids, *more), anew="")

  def _has_ended(self) -> bool:
    return bool(self.ids) and self.ids[-1] in self.stop_tokens

  def answered(self, turn: Turn, token_ids: Sequence[int]) -> "Conversation":
    """The conversation with a turn and its answer, whole or not."""
    answer = {
      "role": "assistant",
      "content": self.tokenizer.decode(token_ids, after=turn.ids),
    }
    return dataclasses.replace(
      self, messages=(*turn.messages, answer), ids=(*turn.ids, *token_ids)
    )

  def with_system(self, text: str) -> "Conversation":
    """The conversation under another system's message, or under none.

    Raises:
      ValueError: if the template refuses it.
    """
    messages = tuple(m for m in self.messages if m["role"] != "system")
    if text:
      messages = ({"role": "system", "content": text}, *messages)
    asked = dataclasses.replace(self, messages=messages, ids=None)
    asked.ask("?")
    return asked

  def begun_anew(self) -> "Conversation":
    """One in which nothing was said yet, under the same system's message."""
    messages = tuple(m for m in self.messages if m["role"] == "system")
    return dataclasses.replace(self, messages=messages, ids=None)


def following(
  tokenizer: Tokenizer,
  messages: Sequence[Message],
  ids: Sequence[int],
  *,
  ended: bool,
) -> list[int] | str:
  """The ids that the template writes after an answer, up to the next one.

  Args:
    tokenizer: with the template.
    messages: the conversation: an answer, then the question after it.
    ids: of all up to the answer, the tokens that were generated last.
    ended: whether the last of them is a stop token.

  Returns:
    The ids; or, where those of the whole conversation would not begin with
    `ids`, the reason.
  """
  safe, forged = chat.protect(tokenizer, messages)
  answer: Any = safe[-2]
  render = lambda *said: chat.render(tokenizer, said)
  text = render(*safe[:-2], {**answer, "content": _PLACE}, safe[-1])
  head, place, tail = text.partition(_PLACE)
  if not place or _PLACE in tail or head != render(*safe[:-2]):
    return "the template rewrites what came before an answer"
  whole = head + answer["content"] + tail
  if render(*safe) != whole:
    return "the template rewrites answers"
  if tail.startswith(tuple(tokenizer.special_tokens())):
    rest = chat.encode_rendered(tokenizer, tail, forged)
    if not ended:  # the end of its turn is the template's
      return rest
    if rest[0] == ids[-1]:
      return rest[1:]
    return "the answer ended with another token than the template writes"
  # Tokens might reach over the border.
  every = chat.encode_rendered(tokenizer, whole, forged)
  if tuple(every[: len(ids)]) == tuple(ids):
    return every[len(ids) :]
  return "the template ends answers with text, and ids are others there"
