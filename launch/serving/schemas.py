"""Parses request bodies in OpenAI's or vLLM's format into a `Call`."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import (
  BaseModel,
  ConfigDict,
  Field,
  ValidationError,
  field_validator,
)

from launch.prompts import Settings, reason_of
from launch.serving.control import MAX_TOP, MAX_TOP_SCORED, Request
from models import chat
from models.tokenizers import Tokenizer

_COMPLETION_TOKENS = 16  # the default of OpenAI's completions
# Fields of OpenAI's and vLLM's clients that are ignored, with any value (None)
# or only with these values, which have no effect.
_IGNORED: dict[str, list[Any] | None] = dict.fromkeys(
  ("add_generation_prompt", "cache_prompt", "include_reasoning", "metadata",
   "parallel_tool_calls", "priority", "prompt_cache_key",
   "prompt_cache_retention", "request_id", "safety_identifier", "service_tier",
   "spaces_between_special_tokens", "store", "user", "verbosity")
) | {
  "cache_salt": [""], "chat_template_kwargs": [{}],
  "continue_final_message": [False], "function_call": ["none", "auto"],
  "functions": [[]], "include_stop_str_in_output": [False],
  "length_penalty": [1], "modalities": [["text"]], "reasoning_effort": ["none"],
  "response_format": [{"type": "text"}], "skip_special_tokens": [True],
  "suffix": [""], "tool_choice": ["none", "auto"], "tools": [[]],
  "use_beam_search": [False],
}  # fmt: skip


@dataclasses.dataclass
class RefusalError(Exception):
  """A rejected request; its fields are those of OpenAI's errors."""

  message: str
  param: str | None = None
  code: str | None = None
  status: int = 400
  kind: str = "invalid_request_error"
  headers: Mapping[str, str] | None = None

  def body(self) -> dict[str, Any]:
    """The error in OpenAI's format."""
    error = {"message": self.message, "type": self.kind}
    return {"error": {**error, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
  """Defaults and bounds of a request's settings.

  Attributes:
    warp: temperature, top_k, top_p and min_p.
    max_new_tokens: tokens of a chat's answer unless the request sets them.
    longest_prompt, max_length: maximum tokens of a prompt, and of prompt and
      completion.
    most: maximum completions of a request.
    scores: whether prompts can be scored.
  """

  model: str
  warp: Mapping[str, float]
  vocab_size: int
  max_new_tokens: int
  longest_prompt: int
  max_length: int
  most: int
  scores: bool = False
  has_objectives: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """A checked API call.

  Attributes:
    prompts: token ids of each.
    budgets: maximum new tokens of each.
    request: the first completion's; the others differ in prompt, budget and
      stream, which is i for choice i of a prompt.
    objective: seconds that it may take per token, or None.
  """

  body: "Body"
  prompts: Sequence[Sequence[int]]
  budgets: Sequence[int]
  log_probs: bool
  request: Request
  objective: float | None

  @property
  def is_chat(self) -> bool:
    """True for a conversation."""
    return isinstance(self.body, Chat)


class StreamOptions(BaseModel):
  """Whether to report usage in a stream's last chunk, or in all chunks."""

  include_usage: bool | None = None
  continuous_usage_stats: bool | None = None


class Body(Settings):
  """Fields that completions and conversations share."""

  model: str | None = None
  n: int = Field(1, ge=1)
  max_tokens: int | None = Field(None, ge=0)
  max_completion_tokens: int | None = Field(None, ge=0)
  echo: bool = False
  stream: bool = False
  stream_options: StreamOptions = StreamOptions()
  return_token_ids: bool = False
  token_origins: bool = False
  slo_ms_per_token: float | None = Field(None, gt=0, le=1e9)


_Ids = list[Annotated[int, Field(ge=0)]]


class Completion(Body):
  """A request for completions; `logprobs` is the number of top tokens."""

  prompt: _Ids | list[str | _Ids] | str
  logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_SCORED)] | bool = False

  def encoded(self, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt."""
    given = self.prompt
    is_one = isinstance(given, str) or all(isinstance(x, int) for x in given)
    return [
      tokenizer.encode(x) if isinstance(x, str) else x
      for x in ([given] if is_one else given)
    ]


class Part(BaseModel):
  """A part of a message."""

  type: Literal["text"]
  text: str


class Message(BaseModel):
  """A message; other fields that clients repeat from answers are ignored."""

  model_config = ConfigDict(strict=True)
  role: Literal["system", "developer", "user", "assistant"]
  content: str | list[Part]
  tool_calls: list[Any] | None = Field(None, max_length=0)

  def plain(self) -> dict[str, str]:
    """The message in the format of chat templates."""
    content = self.content
    if not isinstance(content, str):
      content = "".join(part.text for part in content)
    role = "system" if self.role == "developer" else self.role
    return {"role": role, "content": content}


class Chat(Body):
  """A request for an answer to a conversation."""

  messages: list[Message] = Field(min_length=1)
  echo: Literal[False] = False
  logprobs: bool = False
  top_logprobs: int = Field(0, ge=0, le=MAX_TOP)

  @field_validator("top_logprobs")
  @classmethod
  def _check_top_logprobs(cls, top_logprobs, info):
    if top_logprobs and not info.data.get("logprobs"):
      raise ValueError("it needs logprobs: true")
    return top_logprobs

  def encoded(self, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the one prompt."""
    try:
      return [chat.encode(tokenizer, [x.plain() for x in self.messages])]
    except ValueError as error:
      raise _refused("messages", " ".join(str(error).split())) from None


def read(
  data: bytes, *, is_chat: bool, tokenizer: Tokenizer, defaults: Defaults
) -> Call:
  """Parses and checks the body of a request."""
  body = _parsed(data, Chat if is_chat else Completion)
  if body.model not in (None, defaults.model):
    message = f"there is no model {body.model!r}, only {defaults.model!r}"
    raise RefusalError(message, "model", "model_not_found", status=404)
  prompts = [tuple(ids) for ids in body.encoded(tokenizer)]
  if (count := body.n * len(prompts)) > defaults.most:
    raise _refused("n", f"at most {defaults.most} completions, got {count}")
  budgets = [_budget(body, prompt, defaults) for prompt in prompts]
  try:
    given = body.overrides(vocab_size=defaults.vocab_size)
  except ValueError as error:
    name, _, reason = str(error).partition(": ")
    raise _refused(name, reason) from None
  log_probs = body.logprobs is not False
  scored = body.echo and (log_probs or not all(budgets))
  if scored and not defaults.scores:
    raise _refused("echo", "prompts are not scored on a mesh: leave it out")
  likeliest = body.top_logprobs if is_chat else body.logprobs
  return Call(
    body=body,
    prompts=prompts,
    budgets=budgets,
    log_probs=log_probs,
    request=Request(
      token_ids=prompts[0],
      max_new_tokens=budgets[0],
      ignore_stop=given.pop("ignore_eos", False),
      scored=scored,
      num_likeliest=0 if likeliest is True else int(likeliest),
      **{"seed": secrets.randbits(32), **defaults.warp, **given},
    ),
    objective=_objective(body, defaults),
  )


def _refused(name: str, reason: str, code: str | None = None) -> RefusalError:
  return RefusalError(f"{name}: {reason}", name, code)


def _parsed(data: bytes, model: type[Body]) -> Any:
  """Parses a body; null fields count as missing."""
  try:
    record = pydantic_core.from_json(data, allow_inf_nan=False)
  except ValueError as error:
    raise RefusalError(f"the body is not JSON: {error}") from None
  if not isinstance(record, dict):
    raise RefusalError("the body must be a JSON object")
  given = {k: v for k, v in record.items() if v is not None}
  for name in _IGNORED.keys() & given.keys():
    values, value = _IGNORED[name], given.pop(name)
    if values is not None and value not in values:
      raise _refused(
        name, "not supported, leave it out", "unsupported_parameter"
      )
  try:
    return model.model_validate(given)
  except ValidationError as error:
    field, reason = reason_of(error)
    raise _refused(field.partition(".")[0], reason) from None


def _budget(body: Any, prompt: Sequence[int], defaults: Defaults) -> int:
  """Maximum new tokens of a prompt, by default limited to what fits."""
  kind = "messages" if isinstance(body, Chat) else "prompt"
  if not prompt:
    raise _refused(kind, "the prompt is empty")
  if max(prompt) >= defaults.vocab_size:
    raise _refused(kind, f"token ids are 0 to {defaults.vocab_size - 1}")
  if len(prompt) > defaults.longest_prompt:
    raise _too_long(
      f"your {kind} resulted in {len(prompt)} tokens, and a prompt may have "
      f"{defaults.longest_prompt} (--max_prompt)", defaults, kind,
    )  # fmt: skip
  room = defaults.max_length - len(prompt)
  budget = body.max_completion_tokens
  budget = body.max_tokens if budget is None else budget
  if budget is None:
    is_chat = kind == "messages"
    return min(defaults.max_new_tokens if is_chat else _COMPLETION_TOKENS, room)
  if budget == 0 and not body.echo:
    raise _refused("max_tokens", "it is 0, and nothing is echoed")
  if budget > room:
    raise _too_long(
      f"you requested {len(prompt) + budget} tokens ({len(prompt)} in the "
      f"{kind}, {budget} in the completion)", defaults, "max_tokens",
    )  # fmt: skip
  return budget


def _too_long(what: str, defaults: Defaults, name: str) -> RefusalError:
  """The error for a long prompt, in OpenAI's words, which clients parse."""
  return RefusalError(
    f"This model's maximum context length is {defaults.max_length} tokens. "
    f"However, {what}. Please reduce the length.",
    param=name, code="context_length_exceeded",
  )  # fmt: skip


def _objective(body: Body, defaults: Defaults) -> float | None:
  """The objective in seconds per token, or None."""
  if body.slo_ms_per_token is None:
    return None
  if not defaults.has_objectives:
    raise _refused(
      "slo_ms_per_token", "this server keeps no objectives: start it with "
      "--depth_policy=objectives", "unsupported_parameter",
    )  # fmt: skip
  return body.slo_ms_per_token / 1000
