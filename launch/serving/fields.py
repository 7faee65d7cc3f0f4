"""Checks of the fields of a request: supported, neutral or refused.

A field that would change which tokens are sampled is either done as it says or
refused; so is every field that is not known. Fields that change nothing
(`user`, `priority`) are not read.
"""

from typing import Any

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
  "cache_salt", "ignore_eos", "logprobs", "max_completion_tokens",
  "max_tokens", "min_p", "model", "n", "seed", "slo_class", "slo_ms_per_token",
  "stop", "stream", "stream_options", "temperature", "token_origins", "top_k",
  "top_p",
}  # fmt: skip
COMPLETION = _OURS | {"echo", "prompt"}
CHAT = _OURS | {"messages", "top_logprobs"}


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
