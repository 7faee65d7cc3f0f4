"""Bodies of requests in OpenAI's form or vLLM's: checked, and as an `Ask`."""

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launch.prompts import Settings, reason_of
from launch.serving.control import MOST_LIKELIEST, MOST_SCORED, Asked
from launch.serving.refusals import RefusalError
from models import chat
from models.tokenizers import Tokenizer

_COMPLETION_TOKENS = 16  # of a completion that does not say, as OpenAI's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
  """Defaults and bounds of a request's settings.

  Attributes:
    model: its name.
    temperature, top_k, top_p, min_p: the warp.
    vocab_size: one more than the largest id of a prompt.
    max_new_tokens: of a chat's answer.
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
    request: as it came, a `Completion` or a `Chat`.
    prompts: token ids of each.
    budgets: new tokens at most, of each.
    log_probs: whether they are wanted.
    asked: the first completion; choice i of a prompt draws from stream i, and
      all else but prompt and budget is theirs too.
    objective: seconds a token that it may take, or None.
  """

  request: "Request"
  prompts: tuple[tuple[int, ...], ...]
  budgets: tuple[int, ...]
  log_probs: bool
  asked: Asked
  objective: float | None

  @property
  def is_chat(self) -> bool:
    """True for a conversation."""
    return isinstance(self.request, Chat)


# Fields that change nothing of what is sampled here, whatever they say.
_IGNORED = {
  "add_generation_prompt", "cache_prompt", "include_reasoning", "metadata",
  "parallel_tool_calls", "priority", "prompt_cache_key",
  "prompt_cache_retention", "request_id", "safety_identifier", "service_tier",
  "spaces_between_special_tokens", "store", "user", "verbosity",
}  # fmt: skip
# Fields of what is not done here, with the values that do not ask for it.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
  "cache_salt": ("",), "chat_template_kwargs": ({},),
  "continue_final_message": (False,), "function_call": ("none", "auto"),
  "functions": ([],), "include_stop_str_in_output": (False,),
  "length_penalty": (1,), "modalities": (["text"],),
  "reasoning_effort": ("none",), "response_format": ({"type": "text"},),
  "skip_special_tokens": (True,), "suffix": ("",),
  "tool_choice": ("none", "auto"), "tools": ([],),
  "use_beam_search": (False,),
}  # fmt: skip


class StreamOptions(BaseModel):
  """Chunks of a stream that count tokens: one more at its end, or all."""

  model_config = ConfigDict(strict=True)
  include_usage: bool | None = None
  continuous_usage_stats: bool | None = None


class Request(Settings):
  """Fields that completions and conversations share."""

  model: str | None = None
  n: int = Field(1, ge=1)
  best_of: int | None = None
  max_tokens: int | None = Field(None, ge=0)
  max_completion_tokens: int | None = Field(None, ge=0)
  echo: bool = False
  stream: bool = False
  stream_options: StreamOptions = StreamOptions()
  return_token_ids: bool = False
  token_origins: bool = False
  slo_ms_per_token: float | None = Field(None, gt=0, le=1e9)
  slo_class: str | None = None


class Completion(Request):
  """A request for completions; `logprobs` is a number of likeliest tokens."""

  prompt: str | list[Any]
  logprobs: bool | Annotated[int, Field(ge=0, le=MOST_SCORED)] = False


class Part(BaseModel):
  """A part of a message."""

  type: Literal["text"]
  text: str


class Message(BaseModel):
  """A message; what else clients repeat of an answer is ignored."""

  model_config = ConfigDict(strict=True)
  role: Literal["system", "developer", "user", "assistant"]
  content: str | list[Part]
  tool_calls: list[Any] | None = Field(None, max_length=0)

  def plain(self) -> dict[str, str]:
    """The message as templates know it."""
    content = self.content
    if not isinstance(content, str):
      content = "".join(part.text for part in content)
    role = "system" if self.role == "developer" else self.role
    return {"role": role, "content": content}


class Chat(Request):
  """A request for an answer to a conversation."""

  messages: list[Message] = Field(min_length=1)
  echo: Literal[False] = False
  logprobs: bool = False
  top_logprobs: int = Field(0, ge=0, le=MOST_LIKELIEST)


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
  request = _parsed(body, Chat if is_chat else Completion)
  if request.model not in (None, defaults.model):
    raise no_model(request.model, defaults)
  if request.best_of not in (None, request.n):
    raise _refused("best_of", "completions are not ranked: it must equal n")
  if isinstance(request, Chat):
    _check_count(request.n, defaults)
    prompts = [_conversation(request, tokenizer)]
    log_probs, num_likeliest = request.logprobs, request.top_logprobs
    if num_likeliest and not log_probs:
      raise _refused("top_logprobs", "it wants logprobs: true beside it")
  else:
    listed = _listed(request.prompt)
    _check_count(request.n * len(listed), defaults)
    prompts = [_prompt(one, tokenizer, defaults) for one in listed]
    log_probs = request.logprobs is not False
    num_likeliest = 0 if request.logprobs is True else int(request.logprobs)
  for prompt in prompts:
    _check_prompt(prompt, "messages" if is_chat else "prompt", defaults)
  budgets = tuple(_budget(request, prompt, defaults) for prompt in prompts)
  try:
    given = request.given(vocab_size=defaults.vocab_size)
  except ValueError as error:
    name, _, reason = str(error).partition(": ")
    raise _refused(name, reason) from None
  if given.get("min_tokens", 0) > min(budgets):
    raise _refused("min_tokens", f"it may be max_tokens ({min(budgets)})")
  scored = request.echo and (log_probs or not all(budgets))
  if scored and not defaults.scores:
    raise _refused("echo", "prompts are not scored on a mesh: leave it out")
  usual = {
    name: getattr(defaults, name)
    for name in ("temperature", "top_k", "top_p", "min_p")
  }
  return Ask(
    request=request,
    prompts=tuple(prompts),
    budgets=budgets,
    log_probs=log_probs,
    asked=Asked(
      token_ids=prompts[0],
      max_new_tokens=budgets[0],
      ignore_stop=given.pop("ignore_eos", False),
      scored=scored,
      num_likeliest=num_likeliest,
      **{"seed": secrets.randbits(32), **usual, **given},
    ),
    objective=_objective(request, defaults),
  )


def no_model(name: str, defaults: Defaults) -> RefusalError:
  """The refusal of another model than the server's."""
  return RefusalError(
    f"there is no model {name[:80]!r}, only {defaults.model!r}",
    status=404, param="model", code="model_not_found",
  )  # fmt: skip


def classes_of(written: Sequence[str]) -> dict[str, float]:
  """Objectives by name, seconds a token, of "NAME=MILLISECONDS" each.

  Raises:
    ValueError: for anything else.
  """
  classes = {}
  for one in written:
    name, _, value = one.partition("=")
    try:
      classes[name] = float(value) / 1000
    except ValueError:
      classes[name] = math.nan
    if not name or not 0 < classes[name] < 1e6:
      raise ValueError(f"objectives are NAME=MILLISECONDS, got {one!r}")
  return classes


def _refused(name: str, reason: str, code: str | None = None) -> RefusalError:
  return RefusalError(f"{name}: {reason}", param=name, code=code)


def _parsed(body: bytes, model: type[Request]) -> Any:
  """A model of a body, whose null fields count as left out."""
  try:
    record = pydantic_core.from_json(body, allow_inf_nan=False)
  except ValueError as error:
    raise RefusalError(f"the body is not JSON: {error}") from None
  if not isinstance(record, dict):
    raise RefusalError("the body must be a JSON object")
  record = {
    name: value
    for name, value in record.items()
    if value is not None and name not in _IGNORED
  }
  for name in _NOT_DONE.keys() & record.keys():
    if record.pop(name) not in _NOT_DONE[name]:
      raise _refused(
        name, "not supported here, leave it out", "unsupported_parameter"
      )
  try:
    return model.model_validate(record)
  except ValidationError as error:
    field, reason = reason_of(error, model)
    raise _refused(field.partition(".")[0], reason) from None


def _check_count(count: int, defaults: Defaults) -> None:
  if count > defaults.most:
    raise _refused(
      "n", f"at most {defaults.most} completions at once, got {count}"
    )


def _budget(request: Request, prompt: Sequence[int], defaults: Defaults) -> int:
  """New tokens of a prompt; what is not said is cut to what fits."""
  is_chat = isinstance(request, Chat)
  room = defaults.max_length - len(prompt)
  name, budget = "max_tokens", request.max_tokens
  if request.max_completion_tokens is not None:
    name, budget = "max_completion_tokens", request.max_completion_tokens
    if request.max_tokens not in (None, budget):
      raise _refused(name, "max_tokens says something else")
  if budget is None:
    return min(defaults.max_new_tokens if is_chat else _COMPLETION_TOKENS, room)
  if budget == 0 and not request.echo:
    raise _refused(name, "it is 0, and nothing is echoed")
  if budget > room:
    raise _too_long(
      f"you requested {len(prompt) + budget} tokens ({len(prompt)} in the "
      f"{'messages' if is_chat else 'prompt'}, {budget} in the completion)",
      defaults,
      name,
    )
  return budget


def _check_prompt(prompt, name: str, defaults: Defaults) -> None:
  if not prompt:
    raise _refused(name, "the prompt is empty")
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


def _is_ids(value: Any) -> bool:
  return isinstance(value, list) and all(type(x) is int for x in value)


def _listed(prompt: str | list[Any]) -> list[Any]:
  """The prompts of a request, a text or token ids each."""
  if isinstance(prompt, str) or (prompt and _is_ids(prompt)):
    return [prompt]
  if prompt and all(isinstance(x, str) or _is_ids(x) for x in prompt):
    return prompt
  raise _refused("prompt", "expected a text, token ids, or a list of either")


def _prompt(
  prompt: str | list[int], tokenizer: Tokenizer, defaults: Defaults
) -> tuple[int, ...]:
  if isinstance(prompt, str):
    return tuple(tokenizer.encode(prompt))
  wrong = [x for x in prompt if not 0 <= x < defaults.vocab_size]
  if wrong:
    raise _refused(
      "prompt", f"token ids are 0 to {defaults.vocab_size - 1}, got {wrong[0]}"
    )
  return tuple(prompt)


def _conversation(request: Chat, tokenizer: Tokenizer) -> tuple[int, ...]:
  try:
    plain = [message.plain() for message in request.messages]
    return tuple(chat.encode(tokenizer, plain))
  except ValueError as error:
    raise _refused("messages", " ".join(str(error).split())) from None


def _objective(request: Request, defaults: Defaults) -> float | None:
  """Seconds a token, said outright or by the name of a class."""
  value, name = request.slo_ms_per_token, request.slo_class
  if value is None and name is None:
    return defaults.classes.get("default")
  if not defaults.has_objectives:
    raise _refused(
      "slo_class" if value is None else "slo_ms_per_token",
      "this server keeps no objectives: start it with "
      "--depth_policy=objectives",
      "unsupported_parameter",
    )
  if value is not None:
    return value / 1000
  if name not in defaults.classes:
    raise _refused("slo_class", f"there are {sorted(defaults.classes)}")
  return defaults.classes[name]
