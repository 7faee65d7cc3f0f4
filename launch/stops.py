"""Stop strings: where a completion's text ends, also across tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from launch.prompts import Prompt
from models.tokenizers import Tokenizer
from specjax.endings import Watch
from specjax.state import StopReason


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
  stream = DecodeStream(skip_special_tokens=True)
  longest, tail = max(map(len, stop)), ""

  def look(token_ids: Sequence[int]) -> int | None:
    nonlocal tail
    for count, token in enumerate(token_ids, start=1):
      tail += stream.step(tokenizer.backend, token) or ""
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
