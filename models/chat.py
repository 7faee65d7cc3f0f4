"""Conversations for chat models: messages in, token ids out.

Special tokens, as `<|im_start|>`, come only from the model's template: their
names in a message are plain text.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers as hf

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

  As transformers' `apply_chat_template`, except that names of special tokens in
  messages become text, not tokens.

  Args:
    tokenizer: one with a `chat_template`.
    messages: `{"role": ..., "content": ...}` each, as the template expects.
    add_generation_prompt: whether to end with the start of the assistant's next
      message.

  Raises:
    ValueError: for messages without role or content, or rejected by the
      template, or without a template.
  """
  for message in messages:
    for key in ("role", "content"):
      if not isinstance(message.get(key), str):
        raise ValueError(f'every message needs a string under "{key}"')
  names, expression = _special(tokenizer)

  def marked(value: Any) -> Any:
    """A JSON value with the numbers of special tokens between marks."""
    if isinstance(value, str):
      if _MARK in value:
        raise ValueError(f"a message holds {_MARK!r}, which is no character")
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
  """Ids of a text that a template has rendered.

  It may be a part that begins or ends at a special token.
  """
  if _MARK not in text:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids
  names, expression = _special(tokenizer)
  marked, special = _marked(tokenizer)
  # Names in messages become text again, and those of the template marks.
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
  """A tokenizer whose special tokens are marks, and the ids of those."""
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
  """Messages rendered by a chat template; arguments as in `encode`."""
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


def _special(tokenizer: Tokenizer) -> tuple[list[str], str]:
  """Names of special tokens, longest first, and an expression of them all."""
  names = sorted(tokenizer.special_tokens(), key=len, reverse=True)
  return names, "|".join(map(re.escape, names)) or "(?!)"  # never matches
