"""Encodes conversations for chat models.

Special tokens, such as `<|im_start|>`, come only from the model's template:
their names in a message are plain text.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers as hf

from models.tokenizers import Tokenizer

# A Unicode noncharacter, which no text contains.
_MARK = "\ufdd0"


def encode(
  tokenizer: Tokenizer,
  messages: Sequence[Mapping[str, Any]],
  *,
  add_generation_prompt: bool = True,
) -> list[int]:
  """Encodes a conversation with the tokenizer's chat template.

  Like transformers' `apply_chat_template`, but names of special tokens in
  messages become text, not tokens.

  Args:
    tokenizer: one with a `chat_template`.
    messages: `{"role": ..., "content": ...}` each, as the template expects.
    add_generation_prompt: whether to end with the start of the assistant's next
      message.

  Raises:
    ValueError: if a message has no role or content, the template rejects the
      messages, or there is no template.
  """
  for message in messages:
    for key in ("role", "content"):
      if not isinstance(message.get(key), str):
        raise ValueError(f'every message needs a string under "{key}"')
  names, expression = _special(tokenizer)

  def marked(value: Any) -> Any:
    """Replaces names of special tokens in a JSON value with marked numbers."""
    if isinstance(value, str):
      if _MARK in value:
        raise ValueError(f"a message contains the noncharacter {_MARK!r}")
      number = lambda match: _mark(names.index(match[0]))
      return re.sub(expression, number, value)
    if isinstance(value, Mapping):
      return {marked(key): marked(x) for key, x in value.items()}
    return [marked(x) for x in value] if isinstance(value, list) else value

  text = render(
    tokenizer,
    [marked(message) for message in messages],
    add_generation_prompt=add_generation_prompt,
  )
  return encode_rendered(tokenizer, text)


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
  """Encodes a text that a template has rendered.

  It may be a part that starts or ends at a special token.
  """
  if _MARK not in text:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids
  names, expression = _special(tokenizer)
  marked, special = _marked(tokenizer)
  # Unmark names in messages, and mark those of the template.
  swap = lambda match: (
    names[int(match[1])] if match[1] else _mark(names.index(match[0]))
  )
  text = re.sub(f"{_mark('([0-9]+)')}|{expression}", swap, text)
  ids = marked.encode(text, add_special_tokens=False).ids
  return [special.get(i, i) for i in ids]


def _mark(number: int | str) -> str:
  return f"{_MARK}{number}{_MARK}"


@functools.lru_cache(maxsize=4)
def _marked(tokenizer: Tokenizer) -> tuple[hf.Tokenizer, dict[int, int]]:
  """A tokenizer with marks as special tokens, and the ids behind the marks."""
  copy, names = tokenizer.plain_copy(), _special(tokenizer)[0]
  how = lambda t: dict(lstrip=t.lstrip, rstrip=t.rstrip, normalized=False)
  tokens = tokenizer.special_tokens()
  marks = {_mark(i): tokens[name] for i, name in enumerate(names)}
  copy.add_tokens([hf.AddedToken(x, **how(t)) for x, t in marks.items()])
  ids = tokenizer.backend.token_to_id
  return copy, {copy.token_to_id(x): ids(t.content) for x, t in marks.items()}


def render(
  tokenizer: Tokenizer,
  messages: Sequence[Mapping[str, Any]],
  *,
  add_generation_prompt: bool = True,
) -> str:
  """Renders messages with a chat template; arguments as for `encode`."""
  if tokenizer.chat_template is None:
    raise ValueError("the target's tokenizer has no chat template")
  # Compiles templates in a sandbox. Importing it takes a second, and would warn
  # about missing torch, which is not needed here.
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
  except Exception as error:  # a template may raise anything
    reason = " ".join(str(error).split())
    raise ValueError(f"the chat template rejects this: {reason}") from None
  return text


def _special(tokenizer: Tokenizer) -> tuple[list[str], str]:
  """Names of special tokens, longest first, and a regex for all of them."""
  names = sorted(tokenizer.special_tokens(), key=len, reverse=True)
  return names, "|".join(map(re.escape, names)) or "(?!)"  # never matches
