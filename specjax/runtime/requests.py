"""Requests to an engine: prompts with their settings, and batches of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from specjax.types import Inputs

_MIN_WIDTH = 32
_COARSE = 256  # widths up to this are powers of two


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """One request's settings; None for the engine's.

  Attributes:
    temperature, top_k, top_p, min_p: the warp, see `specjax.types.Sampling`.
    max_new_tokens: the budget, at most the engine's.
    seed: the row draws from `fold_in(key(seed), stream)`.
    presence_penalty, frequency_penalty, repetition_penalty, min_tokens,
      stop_token_ids: see `specjax.penalties`; None is neutral.
    logit_bias: pairs of a token and the bias of its logit.
    ignore_eos: whether to ignore the engine's stop tokens.
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

  def overrides(self) -> dict[str, Any]:
    """The settings that are not None, by name."""
    return {k: v for k, v in vars(self).items() if v is not None}


class Request(Protocol):
  """A request to an engine: a prompt of one or more tokens.

  For an encoder-decoder it also has the encoder's `input_ids`.
  """

  @property
  def token_ids(self) -> Sequence[int]:
    """Tokens of the prompt."""

  @property
  def stream(self) -> int:
    """Number of its random stream, a `u32`."""

  @property
  def settings(self) -> Settings:
    """Its own settings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """A `Request` of tokens alone."""

  token_ids: tuple[int, ...]
  stream: int = 0
  settings: Settings = Settings()

  def __post_init__(self):
    if not self.token_ids:
      raise ValueError("a prompt has no tokens: give it one or more")


def input_ids_of(request: Request) -> Sequence[int]:
  """The encoder's tokens of a request; empty for decoders."""
  return getattr(request, "input_ids", None) or ()


def content_of(request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The encoder's tokens and the prompt's, which identify a request."""
  return tuple(input_ids_of(request)), tuple(request.token_ids)


@dataclasses.dataclass(frozen=True)
class Batch:
  """Prompts decoded together, padded to a common shape.

  Attributes:
    prompts: the requests.
    rows: rows of the batch, `len(prompts)` or more.
    width: P, the padded prompt length.
    input_width: padded length of the encoder's inputs; 0 without an encoder.
  """

  prompts: tuple[Request, ...]
  rows: int
  width: int
  input_width: int = 0

  def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens `i32[rows, width]`, lengths `i32[rows]`, streams `u32[rows]`.

    Spare rows repeat the first prompt.
    """
    filled = self.row_requests()
    tokens, lengths = _padded([p.token_ids for p in filled], self.width)
    return tokens, lengths, np.array([p.stream for p in filled], np.uint32)

  def inputs(self) -> Inputs | None:
    """The encoder's inputs, padded, or None."""
    if not self.input_width:
      return None
    texts = [input_ids_of(p) for p in self.row_requests()]
    tokens, lengths = _padded(texts, self.input_width)
    return Inputs(tokens=tokens, lengths=lengths)  # type: ignore[arg-type]

  def row_requests(self) -> list[Request]:
    """The request of every row; spare rows repeat the first."""
    return [
      *self.prompts,
      *[self.prompts[0]] * (self.rows - len(self.prompts)),
    ]


def _padded(texts, width: int) -> tuple[np.ndarray, np.ndarray]:
  """`i32[len(texts), width]` and the lengths, `i32[len(texts)]`."""
  tokens = np.zeros((len(texts), width), np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  return tokens, np.array([len(text) for text in texts], np.int32)


def make_batches(
  prompts: Sequence[Request],
  *,
  batch_size: int,
  max_width: int,
  total: int | None = None,
) -> list[Batch]:
  """Groups prompts of similar length, so that few widths are compiled.

  Args:
    prompts: the prompts to decode, in the order of the file.
    batch_size: rows of a batch; fewer if there are fewer prompts.
    max_width: the longest prompt that the buffer holds.
    total: number of prompts of the whole run, if some are decoded already.

  Returns:
    Batches with the same number of rows, short prompts first.
  """
  if not prompts:
    return []
  rows = min(batch_size, total or len(prompts))
  # Encoder inputs are usually longer than prompts.
  ordered = sorted(
    prompts, key=lambda p: (len(input_ids_of(p)), len(p.token_ids))
  )
  return [
    _batch_of(ordered[start : start + rows], rows, max_width)
    for start in range(0, len(ordered), rows)
  ]


def _batch_of(prompts: Sequence[Request], rows: int, max_width: int) -> Batch:
  """One batch of prompts, padded."""
  longest = max(len(p.token_ids) for p in prompts)
  read = max(len(input_ids_of(p)) for p in prompts)
  width = min(_rounded(longest), max_width)
  return Batch(tuple(prompts), rows, width, read and _rounded(read))


def batch_of_tokens(
  prompts: Sequence[Sequence[int]],
  settings: Settings | Sequence[Settings] | None,
  *,
  vocab_size: int,
  max_width: int,
) -> Batch:
  """One batch of prompts, in order; raises like `Engine.complete`."""
  for i, ids in enumerate(prompts):
    if isinstance(ids, str):
      raise TypeError(
        "prompts are lists of token ids, got a string: encode it first with "
        "tokenizer.encode(text)"
      )
    if np.ndim(ids) != 1:
      raise TypeError(f"prompt {i} must be a list of token ids, got {ids!r}")
    wrong = [x for x in ids if not 0 <= x < vocab_size]
    if wrong:
      raise ValueError(
        f"tokens must be in 0..{vocab_size - 1}, got {wrong[0]} in prompt {i}: "
        "encode it with the target's own tokenizer"
      )
  if settings is None or isinstance(settings, Settings):
    settings = [settings or Settings()] * len(prompts)
  if len(settings) != len(prompts) or not len(prompts):
    raise ValueError(
      "give one or more prompts, and settings for all or for each: got "
      f"{len(prompts)} prompts and {len(settings)} settings"
    )
  requests = [
    Prompt(token_ids=tuple(ids), stream=i, settings=one)
    for i, (ids, one) in enumerate(zip(prompts, settings, strict=True))
  ]
  longest = max(len(ids) for ids in prompts)
  if longest > max_width:
    raise ValueError(
      f"a prompt has {longest} tokens, but only {max_width} fit beside "
      "max_new_tokens (max_length, or a model's positions)"
    )
  return _batch_of(requests, len(prompts), max_width)


def _rounded(length: int) -> int:
  """Rounds up to a power of two, or above 256 to a multiple of its eighth."""
  length = max(length, _MIN_WIDTH)
  step = power = 1 << (length - 1).bit_length()
  if power > _COARSE:
    step = power // 8
  return -(-length // step) * step
