"""Parses and checks the body of a request in OpenAI's form."""

import dataclasses
import functools
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch import prompt_lines
from launch.serving import asked_prompts, fields
from launch.serving.control import MOST_LIKELIEST, MOST_SCORED
from launch.serving.refusals import RefusalError
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
    seed: of all; choice i of a prompt draws from stream i.
    is_seeded: whether the client gave it.
    temperature, top_k, top_p, min_p: the warp.
    stop: texts before the first of which a completion ends.
    cache_salt: as vLLM's: only requests of the same one share what they have
      read.
    ignore_eos: whether the model's own end of a text ends none.
    presence_penalty, frequency_penalty, repetition_penalty, logit_bias,
      min_tokens, stop_token_ids: as `specjax.runtime.requests.Settings` has
      them, neutral where not given.
    log_probs: whether they are wanted.
    echo: whether the prompt is a part of the text.
    num_likeliest: tokens that are wanted in the place of each.
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
  seed: int
  is_seeded: bool
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  stop: tuple[str, ...]
  cache_salt: str
  ignore_eos: bool
  log_probs: bool
  origins: bool
  stream: bool
  usage: bool
  usage_so_far: bool
  objective: float | None
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  repetition_penalty: float = 1.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  min_tokens: int = 0
  stop_token_ids: tuple[int, ...] = ()
  echo: bool = False
  num_likeliest: int = 0

  @property
  def scored(self) -> bool:
    """True if the target's law is read at the prompt's tokens."""
    return self.echo and (self.log_probs or not all(self.budgets))


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
  count = _count(record, defaults)
  listed = record.get("prompt")
  if isinstance(listed, list) and not all(type(x) is int for x in listed):
    _check_count(count * len(listed), defaults)  # before they are read
  if is_chat:
    prompts = [asked_prompts.conversation(record, tokenizer)]
  else:
    prompts = asked_prompts.completions(
      record.get("prompt"), tokenizer, defaults.vocab_size
    )
  for prompt in prompts:
    _check_prompt(prompt, "messages" if is_chat else "prompt", defaults)
  _check_count(count * len(prompts), defaults)
  seed = _number(record, "seed")
  warp = {
    name: getattr(defaults, name)
    if (value := _number(record, name)) is None
    else value
    for name in ("temperature", "top_k", "top_p", "min_p")
  }
  try:
    stop = prompt_lines.stop_texts(record.get("stop"))
  except ValueError as error:
    raise RefusalError(str(error), param="stop") from None
  if len(stop) > _MOST_STOPS or any(len(x) > _LONGEST_STOP for x in stop):
    raise RefusalError(
      f"at most {_MOST_STOPS} stop texts of {_LONGEST_STOP} characters each",
      param="stop",
    )
  budgets = tuple(_budget(record, p, is_chat, defaults) for p in prompts)
  echo = flag(record, "echo")
  log_probs, most = _log_probs(record, is_chat)
  ask = Ask(
    is_chat=is_chat,
    prompts=tuple(prompts),
    budgets=budgets,
    num_choices=count,
    seed=secrets.randbits(32) if seed is None else seed,
    is_seeded=seed is not None,
    **warp,
    stop=stop,
    cache_salt=_salt(record),
    ignore_eos=flag(record, "ignore_eos"),
    log_probs=log_probs,
    origins=flag(record, "token_origins"),
    stream=flag(record, "stream"),
    **_usage(record),
    objective=_objective(record, defaults),
    **_penalties(record, min(budgets), defaults.vocab_size),
    echo=echo,
    num_likeliest=most,
  )
  if ask.scored and not defaults.scores:
    raise RefusalError(
      "prompts are scored neither on a mesh nor by a target with recurrent "
      "states: leave echo out",
      param="echo",
      code="unsupported_parameter",
    )
  return ask


# Every stop text is looked for at every token, while others wait.
_MOST_STOPS, _LONGEST_STOP = 16, 256


def _count(record: dict, defaults: Defaults) -> int:
  """Choices of each prompt."""
  count = record.get("n", 1)
  if type(count) is not int or count < 1:
    raise RefusalError(
      f"n must be a whole number in 1..{defaults.most}, got "
      f"{json.dumps(count)[:40]}",
      param="n",
    )
  return count


def _check_count(count: int, defaults: Defaults) -> None:
  if count > defaults.most:
    raise RefusalError(
      f"at most {defaults.most} completions may be asked for at once, got "
      f"{count}",
      param="n",
    )


def flag(record: dict, name: str, usual: bool = False) -> bool:
  """True or false; anything else is a RefusalError."""
  value = record.get(name, usual)
  if not isinstance(value, bool):
    raise RefusalError(f"{name} must be true or false", param=name)
  return value


def _salt(record: dict) -> str:
  salt = record.get("cache_salt", "")
  if not isinstance(salt, str):
    raise RefusalError("cache_salt must be a text", param="cache_salt")
  return salt


def _usage(record: dict) -> dict[str, bool]:
  """The chunks of a stream that count tokens: `stream_options`."""
  options = record.get("stream_options", {})
  both = {"include_usage": "usage", "continuous_usage_stats": "usage_so_far"}
  # Chunks are never padded, which OpenAI's are unless this says so.
  neutral = {"include_obfuscation": (False, None)}
  if not isinstance(options, dict) or any(
    name not in both and value not in neutral.get(name, ())
    for name, value in options.items()
  ):
    raise RefusalError(
      f"stream_options may hold {' and '.join(both)} alone",
      param="stream_options",
    )
  for name in both:
    if not isinstance(options.get(name), bool | None):
      raise RefusalError(
        f"{name} must be true or false", param=f"stream_options.{name}"
      )
  streams = flag(record, "stream")
  return {ours: streams and bool(options.get(n)) for n, ours in both.items()}


def _number(record: dict, name: str, like: str | None = None) -> Any:
  """A number of the request by the test of a prompts file's line."""
  like = like or name
  read = lambda: prompt_lines.number({like: record.get(name)}, like)
  return _as_in_lines(read, name, like)


def _as_in_lines(read: Callable[[], Any], name: str, like: str) -> Any:
  """A field by the reader of prompts files, whose errors become refusals."""
  try:
    return read()
  except ValueError as error:
    raise RefusalError(
      str(error).replace(f'"{like}"', name), param=name
    ) from None


def _penalties(record: dict, budget: int, vocab_size: int) -> dict[str, Any]:
  """The penalties of a request; `budget` is of the shortest completion."""
  lists = {
    "logit_bias": prompt_lines.logit_bias,
    "stop_token_ids": prompt_lines.stop_ids,
  }
  penalties = {}
  for name in fields.PENALTIES:
    if name in lists:
      read = functools.partial(lists[name], record, vocab_size)
      penalties[name] = _as_in_lines(read, name, name)
    else:
      penalties[name] = _number(record, name)
  if (penalties["min_tokens"] or 0) > budget:
    raise RefusalError(
      f"min_tokens must be at most max_tokens ({budget}), got "
      f"{penalties['min_tokens']}",
      param="min_tokens",
    )
  return {name: value for name, value in penalties.items() if value is not None}


def _log_probs(record: dict, is_chat: bool) -> tuple[bool, int]:
  """True if log-probabilities are wanted, and the number of likeliest tokens.

  Completions ask for both with one number, chats with a flag and a number.
  """
  value = record.get("logprobs", False)
  if not is_chat and not isinstance(value, bool):
    return True, _up_to(value, MOST_SCORED, "logprobs")
  wanted = flag(record, "logprobs")
  most = _up_to(record.get("top_logprobs", 0), MOST_LIKELIEST, "top_logprobs")
  if most and not wanted:
    raise RefusalError(
      "top_logprobs wants logprobs: true beside it", param="top_logprobs"
    )
  return wanted, most


def _up_to(value: Any, most: int, name: str) -> int:
  if type(value) is not int or not 0 <= value <= most:
    raise RefusalError(
      f"{name} must be a whole number in 0..{most}, got "
      f"{json.dumps(value)[:40]}",
      param=name,
    )
  return value


def _objective(record: dict, defaults: Defaults) -> float | None:
  """Seconds a token, said outright or by the name of a class."""
  both = ("slo_ms_per_token", "slo_class")
  given = [name for name in both if name in record]
  if not given:
    return defaults.classes.get("default")
  name = given[0]
  if len(given) > 1:
    raise RefusalError(f"give one of {' and '.join(both)}", param=name)
  value = record[name]
  if name == "slo_ms_per_token":
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not (good and 0 < value < 1e9 and math.isfinite(value)):
      raise RefusalError(f"{name} must be milliseconds above 0", param=name)
  if not defaults.has_objectives:
    raise RefusalError(
      "this server keeps no objectives: it must be started with "
      "--depth_policy=objectives",
      param=name,
      code="unsupported_parameter",
    )
  if name == "slo_ms_per_token":
    return value / 1000
  if not isinstance(value, str) or value not in defaults.classes:
    raise RefusalError(
      f"there is no class {str(value)[:80]!r} of objectives, expected one of "
      f"{sorted(defaults.classes)}",
      param=name,
    )
  return defaults.classes[value]


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
      return _number(record, name, "max_new_tokens")
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
