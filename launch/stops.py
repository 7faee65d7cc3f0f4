"""Stop strings, which may span tokens, and incremental detokenisation."""

from collections.abc import Mapping, Sequence
from typing import Any

from launch.prompts import Prompt
from models import token_text
from models.tokenizers import Tokenizer
from specjax.runtime.stopping import Watch
from specjax.state import StopReason

# What stands in a text for bytes that are no character.
_NONE = "\ufffd"


class Detokenizer:
  """An incremental detokenizer: whole characters as tokens come.

  Text that was returned is final: all pieces and the rest make up the text of
  all tokens. So fallback bytes wait for the tokens after them: a byte that is
  no part of a character turns all bytes beside it into none.
  """

  def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
    """Begins without any token.

    Args:
      tokenizer: of the pair.
      before: tokens of what is completed.
    """
    self._tokenizer = tokenizer
    # Tokens whose text is the newest that was given, and those behind them.
    self._given = tokenizer.context(before)
    self._held: list[int] = []
    self._ends_in_byte = False

  def add(self, token: int) -> str:
    """Takes a token; the text that is now final, perhaps empty."""
    self._held.append(token)
    if token_text.fallback_byte(self._tokenizer, token) is not None:
      self._ends_in_byte = True
    elif not token_text.is_silent(self._tokenizer, token):
      self._ends_in_byte = False
    new = self._new()
    if not new or self._ends_in_byte or new.endswith(_NONE):
      return ""
    self._given, self._held = self._held, []
    return new

  def rest(self) -> str:
    """The remaining text, if no token follows.

    The first bytes of a character are no text yet.
    """
    return self._new().rstrip(_NONE) if self._held else ""

  def _new(self) -> str:
    before = self._tokenizer.decode(self._given)
    return self._tokenizer.decode([*self._given, *self._held])[len(before) :]


def watch(
  tokenizer: Tokenizer, stop: Sequence[str], context: Sequence[int] = ()
) -> Watch | None:
  """A watch that ends a row with the token that completes a stop string.

  Args:
    tokenizer: of the pair.
    stop: the texts, none empty; without any there is nothing to watch for.
    context: tokens of what is completed.

  Returns:
    A `specjax.runtime.stopping.Watch` of one completion.
  """
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
    prompt: what was completed.
    row: "token_ids", the token that completed a stop string included, and
      "stop_reason".
    tokenizer: of the pair.
  """
  text = tokenizer.decode(row["token_ids"], after=prompt.token_ids)
  if row["stop_reason"] != StopReason.STOP_STRING.name.lower():
    return text
  return before(text, prompt.stop)
