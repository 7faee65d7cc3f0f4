"""Parses and checks the body of a request, in OpenAI's form or vLLM's."""

import dataclasses
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.serving import fields
from launch.serving.control import Asked
from launch.serving.refusals import RefusalError
from models import chat
from models.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
  """Defaults and bounds of a request's settings.

  Attributes:
    model: its name.
    temperature, top_k, top_p, min_p: the warp.
    vocab_size: one more than the largest id of a prompt.
    max_new_tokens: of a chat's answer; a completion has 16, as OpenAI's.
    longest_prompt: tokens of it.
    max_length: tokens of prompt and completion together.
    most: completions that one request may ask for.
    scores: whether the tokens of prompts can be scored.
    has_objectives: whether objectives are kept.
    classes: objectives by name, seconds a token; "default" is for requests
      without one.
  """

  model: str
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  vocab_size: int
  max_new_tokens: int
  longest_prompt: int
  max_length: int
  most: int
  scores: bool = False
  has_objectives: bool = False
  classes: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
  """A checked request.

  Attributes:
    is_chat: whether it is a conversation.
    prompts: token ids of each.
    budgets: new tokens at most, of each.
    num_choices: completions of each.
    is_seeded: whether the client gave the seed.
    stop: texts before the first of which a completion ends.
    log_probs: whether they are wanted.
    echo: whether the prompt is a part of the text.
    asked: the first completion; choice i of a prompt draws from stream i, and
      all else but prompt and budget is theirs too.
    origins: whether the origin of every token is.
    stream: whether chunks are.
    usage: whether one more, the last of them, counts tokens.
    usage_so_far: whether every other one does.
    objective: seconds a token that it may take, or None.
  """

  is_chat: bool
  prompts: tuple[tuple[int, ...], ...]
  budgets: tuple[int, ...]
  num_choices: int
  is_seeded: bool
  stop: tuple[str, ...]
  log_probs: bool
  echo: bool
  asked: Asked
  origins: bool
  stream: bool
  usage: bool
  usage_so_far: bool
  objective: float | None


_COMPLETION_TOKENS = 16


def read(
  body: bytes, *, is_chat: bool, tokenizer: Tokenizer, defaults: Defaults
) -> Ask:
  """Reads the body of a request.

  Args:
    body: whatever came.
    is_chat: whether it came to the place for conversations.
    tokenizer: of the pair.
    defaults: see above.

  Raises:
    RefusalError: for all that is not a request this server answers.
  """
  record = record_of(body)
  try:
    return _read(record, is_chat, tokenizer, defaults)
  except RecursionError:
    raise RefusalError("the body is nested too deeply") from None


def record_of(body: bytes) -> dict[str, Any]:
  """The fields of a body that are not null.

  Raises:
    RefusalError: if it is no JSON object.
  """
  try:
    record = json.loads(body)
  except (ValueError, RecursionError):
    raise RefusalError("the body is not JSON") from None
  if not isinstance(record, dict):
    raise RefusalError("the body must be a JSON object")
  return {key: value for key, value in record.items() if value is not None}


def check_model(record: dict[str, Any], defaults: Defaults) -> None:
  """Raises RefusalError for another model than the server's."""
  model = record.get("model", defaults.model)
  if model != defaults.model:
    raise RefusalError(
      f"there is no model {str(model)[:80]!r}, only {defaults.model!r}",
      status=404,
      param="model",
      code="model_not_found",
    )


def _read(record, is_chat, tokenizer, defaults: Defaults) -> Ask:
  fields.check(record, fields.CHAT if is_chat else fields.COMPLETION)
  check_model(record, defaults)
  count = fields.count(record, defaults.most)
  listed = record.get("prompt")
  if isinstance(listed, list) and not all(type(x) is int for x in listed):
    _check_count(count * len(listed), defaults)  # before they are read
  if is_chat:
    prompts = [conversation(record, tokenizer)]
  else:
    prompts = completions(record.get("prompt"), tokenizer, defaults.vocab_size)
  for prompt in prompts:
    _check_prompt(prompt, "messages" if is_chat else "prompt", defaults)
  _check_count(count * len(prompts), defaults)
  seed = fields.number(record, "seed")
  warp = {
    name: getattr(defaults, name)
    if (value := fields.number(record, name)) is None
    else value
    for name in ("temperature", "top_k", "top_p", "min_p")
  }
  stop = fields.stop(record)
  budgets = tuple(_budget(record, p, is_chat, defaults) for p in prompts)
  echo = fields.flag(record, "echo")
  log_probs, num_likeliest = fields.log_probs(record, is_chat)
  ask = Ask(
    is_chat=is_chat,
    prompts=tuple(prompts),
    budgets=budgets,
    num_choices=count,
    is_seeded=seed is not None,
    stop=stop,
    log_probs=log_probs,
    echo=echo,
    origins=fields.flag(record, "token_origins"),
    stream=fields.flag(record, "stream"),
    **fields.usage(record),
    objective=fields.objective(
      record, defaults.classes, kept=defaults.has_objectives
    ),
    asked=Asked(
      token_ids=prompts[0],
      seed=secrets.randbits(32) if seed is None else seed,
      max_new_tokens=budgets[0],
      **warp,
      ignore_stop=fields.flag(record, "ignore_eos"),
      scored=echo and (log_probs or not all(budgets)),
      num_likeliest=num_likeliest,
      **fields.penalties(record, min(budgets), defaults.vocab_size),
    ),
  )
  if ask.asked.scored and not defaults.scores:
    raise RefusalError(
      "prompts are not scored on a mesh: leave echo out",
      param="echo",
      code="unsupported_parameter",
    )
  return ask


def _check_count(count: int, defaults: Defaults) -> None:
  if count > defaults.most:
    raise RefusalError(
      f"at most {defaults.most} completions may be asked for at once, got "
      f"{count}",
      param="n",
    )


def classes_of(written: Sequence[str]) -> dict[str, float]:
  """Objectives by name, seconds a token, of "NAME=MILLISECONDS" each.

  Raises:
    ValueError: for anything else, and for a name that is there twice.
  """
  classes = {}
  for one in written:
    name, _, value = one.partition("=")
    try:
      seconds = float(value) / 1000
    except ValueError:
      seconds = math.nan
    if not name or name in classes or not 0 < seconds < 1e6:
      raise ValueError(
        f"objectives are NAME=MILLISECONDS, each name once, got {one!r}"
      )
    classes[name] = seconds
  return classes


def _budget(record, prompt, is_chat: bool, defaults: Defaults) -> int:
  """New tokens of a prompt; what is not said is cut to what fits."""
  room = defaults.max_length - len(prompt)
  both = ("max_completion_tokens", "max_tokens")
  given = {name: record[name] for name in both if name in record}
  if len(given) > 1:
    raise RefusalError(f"give one of {' and '.join(both)}", param=both[0])
  for name in given:
    budget = record[name]
    if budget == 0 and type(budget) is int and record.get("echo") is True:
      return 0
    if type(budget) is not int or budget <= room:
      return fields.number(record, name, "max_new_tokens")
    raise _too_long(
      f"you requested {str(len(prompt) + budget)[:40]} tokens "
      f"({len(prompt)} in the {'messages' if is_chat else 'prompt'}, "
      f"{str(budget)[:40]} in the completion)",
      defaults,
      name,
    )
  usual = defaults.max_new_tokens if is_chat else _COMPLETION_TOKENS
  return min(usual, room)


def _check_prompt(prompt, name: str, defaults: Defaults) -> None:
  if not prompt:
    raise RefusalError("the prompt is empty", param=name)
  if len(prompt) > defaults.longest_prompt:
    raise _too_long(
      f"your {name} resulted in {len(prompt)} tokens, and a prompt may have "
      f"{defaults.longest_prompt} (--max_prompt)",
      defaults,
      name,
    )


def _too_long(what: str, defaults: Defaults, name: str) -> RefusalError:
  """The refusal of a long prompt, in OpenAI's words, which clients parse."""
  return RefusalError(
    f"This model's maximum context length is {defaults.max_length} tokens. "
    f"However, {what}. Please reduce the length.",
    param=name,
    code="context_length_exceeded",
  )


# ----------------------------------------------------------------- the prompts


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


# ------------------------------------------------ /tokenize and /detokenize

_TOKENIZED = {
  "add_special_tokens", "add_generation_prompt", "return_token_strs",
}  # fmt: skip


def tokenize(
  body: bytes, tokenizer: Tokenizer, defaults: Defaults
) -> dict[str, Any]:
  """Ids of a `prompt`, or of `messages` by the chat template.

  Raises:
    RefusalError: for any other body.
  """
  record = record_of(body)
  _check_fields(record, {"prompt", "messages", *_TOKENIZED}, defaults)
  flag = lambda name, usual: fields.flag(record, name, usual)
  names = flag("return_token_strs", False)
  if "messages" in record:
    if flag("add_special_tokens", False):
      raise RefusalError(
        "a chat template has the special tokens itself",
        param="add_special_tokens",
      )
    asks = flag("add_generation_prompt", True)
    token_ids = conversation(record, tokenizer, asks=asks)
  else:
    text, more = record.get("prompt"), flag("add_special_tokens", True)
    if not isinstance(text, str):
      raise RefusalError("prompt must be a text", param="prompt")
    token_ids = encoded(
      lambda: tokenizer.backend.encode(text, add_special_tokens=more).ids,
      "prompt",
    )
  return {
    "count": len(token_ids),
    "max_model_len": defaults.max_length,
    "tokens": list(token_ids),
    "token_strs": [tokenizer.backend.id_to_token(i) for i in token_ids]
    if names
    else None,
  }


def detokenize(
  body: bytes, tokenizer: Tokenizer, defaults: Defaults
) -> dict[str, Any]:
  """The text of `tokens`, special ones by their names.

  Raises:
    RefusalError: for any other body.
  """
  record = record_of(body)
  _check_fields(record, {"tokens"}, defaults)
  token_ids = ids(record.get("tokens"), defaults.vocab_size, "tokens")
  return {
    "prompt": tokenizer.backend.decode(token_ids, skip_special_tokens=False)
  }


def _check_fields(
  record: dict[str, Any], known: set[str], defaults: Defaults
) -> None:
  for name in record.keys() - known - {"model"}:
    raise RefusalError(f"unknown field {name[:80]!r}", param=name[:80])
  check_model(record, defaults)
