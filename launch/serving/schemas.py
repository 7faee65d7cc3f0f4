"""Parses request bodies in OpenAI's or vLLM's format to an `Ask`."""

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
from launch.serving.control import MOST_LIKELIEST, MOST_SCORED, Asked
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
    max_new_tokens: of a chat's answer.
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
class Ask:
  """A checked request.

  Attributes:
    prompts: token ids of each.
    budgets: maximum new tokens of each.
    asked: the first completion; others differ in prompt, budget and stream,
      which is i for choice i of a prompt.
    objective: seconds that it may take per token, or None.
  """

  request: "Request"
  prompts: Sequence[Sequence[int]]
  budgets: Sequence[int]
  log_probs: bool
  asked: Asked
  objective: float | None

  @property
  def is_chat(self) -> bool:
    """True for a conversation."""
    return isinstance(self.request, Chat)


class StreamOptions(BaseModel):
  """Whether to report usage in a last chunk of a stream, or in all chunks."""

  include_usage: bool | None = None
  continuous_usage_stats: bool | None = None


class Request(Settings):
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


class Completion(Request):
  """A request for completions; `logprobs` is the number of top tokens."""

  prompt: _Ids | list[str | _Ids] | str
  logprobs: Annotated[int, Field(ge=0, le=MOST_SCORED)] | bool = False

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


class Chat(Request):
  """A request for an answer to a conversation."""

  messages: list[Message] = Field(min_length=1)
  echo: Literal[False] = False
  logprobs: bool = False
  top_logprobs: int = Field(0, ge=0, le=MOST_LIKELIEST)

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
  body: bytes, *, is_chat: bool, tokenizer: Tokenizer, defaults: Defaults
) -> Ask:
  """Parses and checks the body of a request."""
  request = _parsed(body, Chat if is_chat else Completion)
  if request.model not in (None, defaults.model):
    message = f"there is no model {request.model!r}, only {defaults.model!r}"
    raise RefusalError(message, "model", "model_not_found", status=404)
  prompts = [tuple(ids) for ids in request.encoded(tokenizer)]
  if (count := request.n * len(prompts)) > defaults.most:
    raise _refused("n", f"at most {defaults.most} completions, got {count}")
  budgets = [_budget(request, prompt, defaults) for prompt in prompts]
  try:
    given = request.given(vocab_size=defaults.vocab_size)
  except ValueError as error:
    name, _, reason = str(error).partition(": ")
    raise _refused(name, reason) from None
  log_probs = request.logprobs is not False
  scored = request.echo and (log_probs or not all(budgets))
  if scored and not defaults.scores:
    raise _refused("echo", "prompts are not scored on a mesh: leave it out")
  likeliest = request.top_logprobs if is_chat else request.logprobs
  return Ask(
    request=request,
    prompts=prompts,
    budgets=budgets,
    log_probs=log_probs,
    asked=Asked(
      token_ids=prompts[0],
      max_new_tokens=budgets[0],
      ignore_stop=given.pop("ignore_eos", False),
      scored=scored,
      num_likeliest=0 if likeliest is True else int(likeliest),
      **{"seed": secrets.randbits(32), **defaults.warp, **given},
    ),
    objective=_objective(request, defaults),
  )


def _refused(name: str, reason: str, code: str | None = None) -> RefusalError:
  return RefusalError(f"{name}: {reason}", name, code)


def _parsed(body: bytes, model: type[Request]) -> Any:
  """Parses a body; null fields count as missing."""
  try:
    record = pydantic_core.from_json(body, allow_inf_nan=False)
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


def _budget(request: Any, prompt: Sequence[int], defaults: Defaults) -> int:
  """Maximum new tokens of a prompt, by default limited to what fits."""
  kind = "messages" if isinstance(request, Chat) else "prompt"
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
  budget = request.max_completion_tokens
  budget = request.max_tokens if budget is None else budget
  if budget is None:
    is_chat = kind == "messages"
    return min(defaults.max_new_tokens if is_chat else _COMPLETION_TOKENS, room)
  if budget == 0 and not request.echo:
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


def _objective(request: Request, defaults: Defaults) -> float | None:
  """The objective in seconds per token, or None."""
  if request.slo_ms_per_token is None:
    return None
  if not defaults.has_objectives:
    raise _refused(
      "slo_ms_per_token", "this server keeps no objectives: start it with "
      "--depth_policy=objectives", "unsupported_parameter",
    )  # fmt: skip
  return request.slo_ms_per_token / 1000
