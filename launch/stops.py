"""Incremental detokenization, and stop strings that may span tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from launch.prompts import Prompt
from models import token_text
from models.tokenizers import Tokenizer
from specjax.runtime.stopping import Watch
from specjax.state import StopReason

# Replaces invalid bytes in a text.
_NONE = "\ufffd"


class Detokenizer:
  """Detokenizes incrementally, in whole characters.

  Returned text is final: the pieces and the rest make up the text of all
  tokens. Fallback bytes therefore wait for the tokens after them, since one
  invalid byte invalidates its neighbors.
  """

  def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
    """Starts a text after the tokens `before`."""
    self._tokenizer = tokenizer
    # Tokens of the last returned text, and those after it.
    self._shown = tokenizer.context(before)
    self._pending: list[int] = []
    self._ends_in_byte = False

  def add(self, token: int) -> str:
    """Takes a token; returns the text that is now final, perhaps empty."""
    self._pending.append(token)
    if token_text.fallback_byte(self._tokenizer, token) is not None:
      self._ends_in_byte = True
    elif not token_text.is_silent(self._tokenizer, token):
      self._ends_in_byte = False
    new = self._new()
    if not new or self._ends_in_byte or new.endswith(_NONE):
      return ""
    self._shown, self._pending = self._pending, []
    return new

  def rest(self) -> str:
    """The remaining text if no token follows, without partial characters."""
    return self._new().rstrip(_NONE) if self._pending else ""

  def _new(self) -> str:
    before = self._tokenizer.decode(self._shown)
    return self._tokenizer.decode([*self._shown, *self._pending])[len(before) :]


class Reader:
  """Streams the text of a completion; the pieces make up `text_of`.

  Holds back text that may still change: the first bytes of a character, and
  the possible beginning of a stop string.

  Attributes:
    token_ids: tokens of the completion so far.
  """

  def __init__(
    self, tokenizer: Tokenizer, stop: Sequence[str], prompt: Sequence[int]
  ):
    """Starts the completion of a prompt's tokens, with its stop strings."""
    self._tokenizer, self._stop, self._prompt = tokenizer, stop, prompt
    self._detokenizer = Detokenizer(tokenizer, prompt)
    self._text, self._num_sent = "", 0
    self.token_ids: list[int] = []

  def read(self, token_ids: Sequence[int]) -> str:
    """Takes tokens; returns the text that is now final, perhaps empty."""
    self.token_ids += token_ids
    self._text += "".join(map(self._detokenizer.add, token_ids))
    text = before(self._text, self._stop)
    begun = [
      count
      for stop in self._stop
      for count in range(1, len(stop))
      if text.endswith(stop[:count])
    ]
    return self._sent(text[: len(text) - max(begun, default=0)])

  def finish(self, *, cut: bool) -> str:
    """The rest of the text; `cut` if a stop string ended it."""
    text = self._tokenizer.decode(self.token_ids, after=self._prompt)
    return self._sent(before(text, self._stop) if cut else text)

  def _sent(self, text: str) -> str:
    new = text[self._num_sent :]
    self._num_sent += len(new)
    return new


def watch(
  tokenizer: Tokenizer, stop: Sequence[str], context: Sequence[int] = ()
) -> Watch | None:
  """A watch that ends a row at the token that completes a stop string."""
  if not stop:
    return None
  text = Detokenizer(tokenizer, context)
  longest, tail = max(map(len, stop)), ""

  def look(token_ids: Sequence[int]) -> int | None:
    nonlocal tail
    for count, token in enumerate(token_ids, start=1):
      tail += text.add(token)
      now = tail + text.rest()
      if any(x in now for x in stop):
        return count
      tail = tail[-longest:]
    return None

  return look


def before(text: str, stop: Sequence[str]) -> str:
  """The text before the first stop string in it; all of it if there is none."""
  places = [at for x in stop if (at := text.find(x)) >= 0]
  return text[: min(places, default=len(text))]


def text_of(
  prompt: Prompt, row: Mapping[str, Any], tokenizer: Tokenizer
) -> str:
  """The text of a completion, without the stop string that ended it.

  Args:
    prompt: its prompt.
    row: "token_ids", including the one that completed a stop string, and
      "stop_reason".
    tokenizer: the pair's tokenizer.
  """
  text = tokenizer.decode(row["token_ids"], after=prompt.token_ids)
  if row["stop_reason"] != StopReason.STOP_STRING.name.lower():
    return text
  return before(text, prompt.stop)
