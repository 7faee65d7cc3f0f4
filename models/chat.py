"""Conversations as a chat model reads them: messages in, token ids out.

Special tokens, as `<|im_start|>`, come from the model's own template alone: the
name of one in a message is text.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.tokenizers import Tokenizer

# One character that no text has: Unicode assigns it to nobody.
_MARK = "\ufdd0"


def encode(
  tokenizer: Tokenizer,
  messages: Sequence[Mapping[str, Any]],
  *,
  add_generation_prompt: bool = True,
) -> list[int]:
  """Ids of a conversation by the tokenizer's chat template.

  They are those of transformers' `apply_chat_template`, unless a message holds
  the name of a special token, which becomes that token there, and text here.

  Args:
    tokenizer: one with a `chat_template`.
    messages: `{"role": ..., "content": ...}` each, as the template reads them.
    add_generation_prompt: end with what begins the assistant's next message.

  Returns:
    The ids.

  Raises:
    ValueError: for messages without a role or a content, or that the template
      refuses, or if there is none.
  """
  safe, forged = protect(tokenizer, messages)
  text = render(tokenizer, safe, add_generation_prompt=add_generation_prompt)
  return encode_rendered(tokenizer, text, forged)


def protect(
  tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Any], tuple[str, ...]]:
  """Messages in which no special token is named, for a template to render.

  Args:
    tokenizer: whose special tokens they are.
    messages: as `encode`'s.

  Returns:
    The messages, with marks in place of the names, and the names: what
    `encode_rendered` takes.

  Raises:
    ValueError: for messages without a role or a content.
  """
  for message in messages:
    for key in ("role", "content"):
      if not isinstance(message.get(key), str):
        raise ValueError(f'every message needs a string under "{key}"')
  names = tokenizer.special_tokens()
  forged = sorted((n for n in names if _holds(messages, n)), key=len)[::-1]
  if not forged:
    return messages, ()
  if _holds(messages, _MARK):
    raise ValueError(f"a message holds {_MARK!r}, which is no character")
  return _replaced(messages, forged), tuple(forged)


def encode_rendered(
  tokenizer: Tokenizer, text: str, forged: Sequence[str] = ()
) -> list[int]:
  """Ids of the text of protected messages, rendered by a template.

  Args:
    tokenizer: with the template.
    text: the rendered text, or a part that begins or ends at a special token.
    forged: from `protect`.
  """
  if not forged:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids
  names = tokenizer.special_tokens()
  ids: list[int] = []
  pieces = _pieces(text, names)
  for number, piece in enumerate(pieces):
    if number % 2:
      ids.append(tokenizer.backend.token_to_id(piece))
      continue
    before = names[pieces[number - 1]] if number else None
    after = names[pieces[number + 1]] if number + 1 < len(pieces) else None
    piece = piece.lstrip() if before and before.rstrip else piece
    piece = piece.rstrip() if after and after.lstrip else piece
    ids += tokenizer.encode_text(_restored(piece, forged))
  return ids


def render(
  tokenizer: Tokenizer,
  messages: Sequence[Mapping[str, Any]],
  *,
  add_generation_prompt: bool = True,
) -> str:
  """The text that a chat template makes of messages; arguments as `encode`."""
  if tokenizer.chat_template is None:
    raise ValueError("the target's tokenizer has no chat template")
  # It compiles templates in a sandbox. Importing it takes a second, and would
  # tell that there is no torch, which nothing here needs.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  from transformers.utils import chat_template_utils

  try:
    (text,), _ = chat_template_utils.render_jinja_template(
      conversations=[[dict(m) for m in messages]],
      chat_template=tokenizer.chat_template,
      add_generation_prompt=add_generation_prompt,
      bos_token=tokenizer.bos_token or "",
      eos_token=tokenizer.eos_token or "",
    )
  except Exception as error:  # jinja's own, and whatever a template computes
    reason = " ".join(str(error).split())
    raise ValueError(f"the chat template refuses this: {reason}") from None
  return text


def _holds(value: Any, name: str) -> bool:
  """True if any string within a JSON value holds a name."""
  if isinstance(value, str):
    return name in value
  if isinstance(value, Mapping):
    return any(_holds(v, name) for v in value.values())
  if isinstance(value, list | tuple):
    return any(_holds(v, name) for v in value)
  return False


def _replaced(value: Any, names: Sequence[str]) -> Any:
  """A JSON value with a mark in place of every name."""
  if isinstance(value, str):
    for number, name in enumerate(names):
      value = value.replace(name, f"{_MARK}{number}{_MARK}")
    return value
  if isinstance(value, Mapping):
    return {k: _replaced(v, names) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_replaced(v, names) for v in value]
  return value


def _restored(text: str, names: Sequence[str]) -> str:
  """The text with the names put back."""
  return re.sub(f"{_MARK}(\\d+){_MARK}", lambda m: names[int(m[1])], text)


def _pieces(text: str, names: Mapping[str, Any]) -> list[str]:
  """The text cut at names: text, name, text, name, ..., text."""
  longest_first = sorted(names, key=len, reverse=True)
  return re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
