"""Fields of a request: those that are known, and how each is read.

A field that would change which tokens are sampled is either done as it says or
refused; so is every field that is not known. Fields that change nothing
(`user`, `priority`) are not read.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from launch import prompt_lines
from launch.serving.control import MOST_LIKELIEST, MOST_SCORED
from launch.serving.refusals import RefusalError

# Fields that are not read: they change nothing of what is sampled.
_UNREAD = {
  "metadata", "priority", "prompt_cache_key", "prompt_cache_retention",
  "request_id", "safety_identifier", "user", "verbosity",
}  # fmt: skip
# Fields of features that are not there, with what asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "add_generation_prompt": (True,),
  "best_of": (1,),
  "chat_template_kwargs": ({},),
  "continue_final_message": (False,),
  "echo": (False,),
  "function_call": ("none", "auto"),
  "functions": ([],),
  "include_reasoning": (True, False),
  "include_stop_str_in_output": (False,),
  "length_penalty": (1,),
  "modalities": (["text"],),
  "parallel_tool_calls": (True, False),
  "reasoning_effort": ("none",),
  "response_format": ({"type": "text"},),
  "service_tier": ("auto", "default"),
  "skip_special_tokens": (True,),
  "spaces_between_special_tokens": (True, False),
  "store": (False,),
  "suffix": ("",),
  "tool_choice": ("none", "auto"),
  "tools": ([],),
  "top_logprobs": (0,),
  "use_beam_search": (False,),
}
# How the law reads its own text, in `specjax.penalties`.
PENALTIES = (
  "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
  "min_tokens", "stop_token_ids",
)  # fmt: skip
_OURS = {
  *PENALTIES,
  "ignore_eos", "logprobs", "max_completion_tokens",
  "max_tokens", "min_p", "model", "n", "seed", "slo_class", "slo_ms_per_token",
  "stop", "stream", "stream_options", "temperature", "token_origins", "top_k",
  "top_p",
}  # fmt: skip
COMPLETION = _OURS | {"echo", "prompt"}
CHAT = _OURS | {"messages", "top_logprobs"}
# Every stop text is looked for at every token, while others wait.
_MOST_STOPS, _LONGEST_STOP = 16, 256


def check(record: dict[str, Any], known: set[str]) -> None:
  """Raises RefusalError for a field that is neither done nor neutral.

  Args:
    record: what a client sent.
    known: the names of those that are done.
  """
  for name, value in record.items():
    if name in known or name in _UNREAD:
      continue
    if name not in _NEUTRAL:
      raise RefusalError(
        f"unknown field {name[:80]!r}: it might change what is sampled",
        param=name[:80],
        code="unknown_parameter",
      )
    if not any(_same(value, x) for x in _NEUTRAL[name]):
      raise RefusalError(
        f"{name} is not supported here: leave it out",
        param=name,
        code="unsupported_parameter",
      )


def _same(value: Any, neutral: Any) -> bool:
  """Equality in which true is not 1."""
  return value == neutral and isinstance(value, bool) == isinstance(
    neutral, bool
  )


# ------------------------------------------------------------ as they are read


def count(record: dict, most: int) -> int:
  """Choices of each prompt."""
  value = record.get("n", 1)
  if type(value) is not int or value < 1:
    raise RefusalError(
      f"n must be a whole number in 1..{most}, got {json.dumps(value)[:40]}",
      param="n",
    )
  return value


def flag(record: dict, name: str, usual: bool = False) -> bool:
  """True or false; anything else is a RefusalError."""
  value = record.get(name, usual)
  if not isinstance(value, bool):
    raise RefusalError(f"{name} must be true or false", param=name)
  return value


def number(record: dict, name: str, like: str | None = None) -> Any:
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


def stop(record: dict) -> tuple[str, ...]:
  """Texts before the first of which a completion ends."""
  try:
    texts = prompt_lines.stop_texts(record.get("stop"))
  except ValueError as error:
    raise RefusalError(str(error), param="stop") from None
  if len(texts) > _MOST_STOPS or any(len(x) > _LONGEST_STOP for x in texts):
    raise RefusalError(
      f"at most {_MOST_STOPS} stop texts of {_LONGEST_STOP} characters each",
      param="stop",
    )
  return texts


def log_probs(record: dict, is_chat: bool) -> tuple[bool, int]:
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


def usage(record: dict) -> dict[str, bool]:
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


def objective(
  record: dict, classes: Mapping[str, float], *, kept: bool
) -> float | None:
  """Seconds a token, said outright or by the name of a class.

  Args:
    record: the request.
    classes: objectives by name; "default" is for requests without one.
    kept: whether the server keeps any.
  """
  both = ("slo_ms_per_token", "slo_class")
  given = [name for name in both if name in record]
  if not given:
    return classes.get("default")
  name = given[0]
  if len(given) > 1:
    raise RefusalError(f"give one of {' and '.join(both)}", param=name)
  value = record[name]
  if name == "slo_ms_per_token":
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not (good and 0 < value < 1e9 and math.isfinite(value)):
      raise RefusalError(f"{name} must be milliseconds above 0", param=name)
  if not kept:
    raise RefusalError(
      "this server keeps no objectives: it must be started with "
      "--depth_policy=objectives",
      param=name,
      code="unsupported_parameter",
    )
  if name == "slo_ms_per_token":
    return value / 1000
  if not isinstance(value, str) or value not in classes:
    raise RefusalError(
      f"there is no class {str(value)[:80]!r} of objectives, expected one of "
      f"{sorted(classes)}",
      param=name,
    )
  return classes[value]


def penalties(record: dict, budget: int, vocab_size: int) -> dict[str, Any]:
  """The penalties of a request; `budget` is of the shortest completion."""
  lists = {
    "logit_bias": prompt_lines.logit_bias,
    "stop_token_ids": prompt_lines.stop_ids,
  }
  given = {}
  for name in PENALTIES:
    if name in lists:
      read = functools.partial(lists[name], record, vocab_size)
      given[name] = _as_in_lines(read, name, name)
    else:
      given[name] = number(record, name)
  if (given["min_tokens"] or 0) > budget:
    raise RefusalError(
      f"min_tokens must be at most max_tokens ({budget}), got "
      f"{given['min_tokens']}",
      param="min_tokens",
    )
  return {name: value for name, value in given.items() if value is not None}
