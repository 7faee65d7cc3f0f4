"""Requests to an engine: prompts with their own settings."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """One request's settings, which replace its engine's where not None.

  Requests that differ in these are rows of one batch and of one program, but
  that a batch in which any row truncates is another than one where none does.

  Attributes:
    temperature, top_k, top_p, min_p: the warp, see `specjax.types.Sampling`.
    max_new_tokens: the budget, at most the engine's, which sizes the buffer.
    seed: draws come from `fold_in(key(seed), stream)`.
    presence_penalty, frequency_penalty, repetition_penalty, min_tokens,
      stop_token_ids: see `specjax.penalties`; None is neutral.
    logit_bias: pairs of a token and what is added to its logit.
    ignore_eos: whether the engine's stop tokens do not end it.
  """

  temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  max_new_tokens: int | None = None
  seed: int | None = None
  presence_penalty: float | None = None
  frequency_penalty: float | None = None
  repetition_penalty: float | None = None
  logit_bias: tuple[tuple[int, float], ...] | None = None
  min_tokens: int | None = None
  stop_token_ids: tuple[int, ...] | None = None
  ignore_eos: bool | None = None

  def given(self) -> dict[str, Any]:
    """The settings that are not None, by name."""
    return {k: v for k, v in vars(self).items() if v is not None}


class Request(Protocol):
  """A request to an engine: a prompt of one or more tokens.

  Its draws come from `fold_in(key(seed), stream)`, a `u32`, whatever is decoded
  beside it. One to an encoder-decoder also has `input_ids`, the tokens that the
  encoder reads, one or more (`input_ids_of`).
  """

  @property
  def token_ids(self) -> Sequence[int]:
    """Tokens of the prompt."""

  @property
  def stream(self) -> int:
    """Identity of its random stream, a `u32`."""

  @property
  def settings(self) -> Settings:
    """Its own settings."""


def input_ids_of(request: Request) -> Sequence[int]:
  """Tokens of the request that an encoder reads; empty for decoders."""
  return getattr(request, "input_ids", None) or ()


def content_of(request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Tokens that the models read, the encoder's first: identity of a prompt.

  Completions of one prompt are not independent units, whatever their row ids
  and seeds (`specjax.intervals.groups_of`).
  """
  return tuple(input_ids_of(request)), tuple(request.token_ids)
