"""Stop strings: where a completion's text ends, also across tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from launch.prompts import Prompt
from models.tokenizers import Tokenizer
from specjax.endings import Watch
from specjax.state import StopReason


def stepper(tokenizer: Tokenizer) -> Callable[[int], str]:
  """Makes text of one completion's tokens, one after another.

  A byte can turn characters before it into others, where a vocabulary falls
  back to bytes. What was given stands then, and all tokens are decoded anew.

  Args:
    tokenizer: of the pair.

  Returns:
    What takes a token and gives the whole characters that came with it.
  """
  stream: DecodeStream | None = DecodeStream(skip_special_tokens=True)
  ids: list[int] = []
  given = 0

  def step(token: int) -> str:
    nonlocal stream, given
    ids.append(token)
    if stream is not None:
      try:
        new = stream.step(tokenizer.backend, token) or ""
      except Exception:  # the library raises no narrower one
        stream = None
      else:
        given += len(new)
        return new
    text = tokenizer.decode(ids)
    if text.endswith("\ufffd"):  # perhaps the first bytes of a character
      return ""
    new, given = text[given:], max(given, len(text))
    return new

  return step


def watch(tokenizer: Tokenizer, stop: Sequence[str]) -> Watch | None:
  """What ends a row with the token that completes a stop string.

  Args:
    tokenizer: of the pair.
    stop: the texts, none empty; without any there is nothing to watch for.

  Returns:
    A `specjax.endings.Watch` of one completion.
  """
  if not stop:
    return None
  step = stepper(tokenizer)
  longest, tail = max(map(len, stop)), ""

  def look(token_ids: Sequence[int]) -> int | None:
    nonlocal tail
    for count, token in enumerate(token_ids, start=1):
      tail += step(token)
      if any(text in tail for text in stop):
        return count
      tail = tail[-longest:]
    return None

  return look


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
  text = tokenizer.decode(row["token_ids"])
  if row["stop_reason"] != StopReason.STOP_STRING.name.lower():
    return text
  found = [at for x in prompt.stop if (at := text.find(x)) >= 0]
  return text[: min(found, default=len(text))]
