"""Prompts and conversations of requests, as token ids."""

from collections.abc import Callable
from typing import Any

from launch.serving.refusals import RefusalError
from models import chat
from models.tokenizers import Tokenizer


def _is_id(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def completions(
  value: Any, tokenizer: Tokenizer, vocab_size: int
) -> list[tuple[int, ...]]:
  """A text, ids below the vocabulary's size, or a list of either."""
  if isinstance(value, str):
    value = [value]
  elif isinstance(value, list) and value and all(map(_is_id, value)):
    value = [value]
  if not (isinstance(value, list) and value):
    raise RefusalError(
      "prompt must be a text, token ids, or a list of either", param="prompt"
    )
  prompts: list[tuple[int, ...]] = []
  for one in value:
    if isinstance(one, str):
      prompts.append(encoded(lambda one=one: tokenizer.encode(one), "prompt"))
    elif isinstance(one, list) and all(map(_is_id, one)):
      prompts.append(ids(one, vocab_size, "prompt"))
    else:
      raise RefusalError(
        "prompt must be a text, token ids, or a list of either", param="prompt"
      )
  return prompts


def ids(value: Any, vocab_size: int, name: str) -> tuple[int, ...]:
  """A list of token ids below the vocabulary's size."""
  if not (isinstance(value, list) and all(map(_is_id, value))):
    raise RefusalError(f"{name} must be a list of token ids", param=name)
  wrong = [x for x in value if not 0 <= x < vocab_size]
  if wrong:
    raise RefusalError(
      f"token ids must be in 0..{vocab_size - 1}, got {str(wrong[0])[:20]}",
      param=name,
    )
  return tuple(value)


# What clients send along as they repeat an answer of a server.
_EMPTY = {"annotations", "audio", "function_call", "refusal", "tool_calls"}
# What a message's author may be, and what the template calls it. Templates may
# leave out whom they do not know, without a word.
_ROLES = {
  "system": "system", "developer": "system", "user": "user",
  "assistant": "assistant",
}  # fmt: skip


def conversation(
  record: dict, tokenizer: Tokenizer, *, asks: bool = True
) -> tuple[int, ...]:
  """The messages of a request, by the model's chat template.

  Args:
    record: the request.
    tokenizer: of the pair.
    asks: whether they end with what begins the assistant's next message.
  """
  messages = record.get("messages")
  if not (isinstance(messages, list) and messages):
    raise RefusalError("messages must be a list of them", param="messages")
  plain = [_message(message) for message in messages]
  return encoded(
    lambda: chat.encode(tokenizer, plain, add_generation_prompt=asks),
    "messages",
  )


def _message(message: Any) -> dict[str, str]:
  if not isinstance(message, dict):
    raise RefusalError("a message must be an object", param="messages")
  for key, value in message.items():
    # No template is told names.
    known = key in ("role", "content")
    known |= key == "name" and isinstance(value, str | None)
    if not known and (key not in _EMPTY or value):
      raise RefusalError(
        f"a message may have a role, a content and a name, got {key[:80]!r}",
        param="messages",
      )
  content = message.get("content")
  if isinstance(content, list):
    parts = [
      part.get("text")
      if isinstance(part, dict) and part.get("type") == "text"
      else None
      for part in content
    ]
    if not all(isinstance(part, str) for part in parts):
      raise RefusalError("messages may hold text alone", param="messages")
    content = "".join(parts)
  if not (isinstance(message.get("role"), str) and isinstance(content, str)):
    raise RefusalError(
      "every message needs a role and a content, both texts", param="messages"
    )
  if message["role"] not in _ROLES:
    raise RefusalError(
      f"a message's role may be {', '.join(_ROLES)}, got "
      f"{message['role'][:80]!r}",
      param="messages",
    )
  return {"role": _ROLES[message["role"]], "content": content}


def encoded(encode: Callable[[], Any], name: str) -> tuple[int, ...]:
  """Ids from an encoding function, whose errors become a RefusalError."""
  try:
    return tuple(encode())
  except (ValueError, TypeError) as error:  # TypeError: lone surrogates
    reason = " ".join(str(error).split())[:400]
    raise RefusalError(f"{name}: {reason}", param=name) from None
