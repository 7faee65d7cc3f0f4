"""Scoring of prompts' own tokens, in a cache beside those of the rows.

The law at every token is needed for that, which rounds do not leave behind.
Prompts share the cache: they are scored one after another, in chunks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from launch.serving import programs
from launch.serving.control import MOST_SCORED, Asked, Scores
from specjax import recurrent
from specjax.types import LanguageModel, Params


class Scorer:
  """Rows whose prompts are scored before they are read, in line."""

  def __init__(
    self,
    target: LanguageModel,
    params: Params,
    *,
    vocab_size: int,
    longest: int,
    widths: Sequence[int],
  ):
    """Compiles nothing yet.

    Args:
      target: whose law it is.
      params: of it, and more.
      vocab_size: V.
      longest: tokens of the longest prompt.
      widths: of programs, ascending.
    """
    self._target, self._params, self._vocab_size = target, params, vocab_size
    self.widths, self._slots = tuple(widths), longest + widths[-1]
    self._score: dict[int, Any] = {}
    self._cache: Any = None
    self._known: dict[int, list[tuple]] = {}

  def compile(self, say: Callable[[str], None]) -> None:
    """Compiles all programs and runs each once."""
    score = functools.partial(programs.score, self._target, self._vocab_size)
    cache = self._target.new_cache(self._params.target, 1, self._slots)
    states = recurrent.widened(cache.recurrent, self.widths[-1])
    self._cache = cache.replace(recurrent=states)
    for width in self.widths:
      say(f"scores of up to {width} tokens")
      args = (np.zeros(width + 1, np.int32), np.int32(0))
      self._score[width] = (
        jax.jit(score, donate_argnums=1)
        .lower(self._params, self._cache, *args)
        .compile()
      )
      self._cache, _ = self._score[width](self._params, self._cache, *args)

  def begin(self, row: int) -> None:
    """Puts a row at the end of the line."""
    self.drop(row)
    self._known[row] = []

  def drop(self, row: int) -> None:
    """Drops the scores of a row's prompt."""
    self._known.pop(row, None)

  def waits(self, row: int) -> bool:
    """True if a row's prompt is not scored to its end."""
    return row in self._known

  def read_on(self, row: int, asked: Asked, most: int) -> tuple[int, Any]:
    """Scores more tokens of a prompt, of the row that is the first in line.

    Args:
      row: which.
      asked: what it was given.
      most: tokens at most; the narrowest program's are always scored.

    Returns:
      Tokens that the pass was wide, and the `Scores` if that was the end, or
      None.
    """
    known, text = self._known[row], asked.token_ids
    start = sum(len(one[0]) for one in known)
    fits = max((w for w in self.widths if w <= most), default=self.widths[0])
    count, width = min(fits, len(text) - 1 - start), 0
    if count:
      width = next(w for w in self.widths if w >= count)
      tokens = np.full(width + 1, text[start], np.int32)
      tokens[: count + 1] = text[start : start + count + 1]
      self._cache, new = self._score[width](
        self._params, self._cache, tokens, np.int32(start)
      )
      known.append(tuple(x[:count] for x in jax.device_get(new)))
    if start + count < len(text) - 1:
      return width, None
    self.drop(row)
    none = np.zeros((0, MOST_SCORED))
    parts = (
      zip(*known, strict=True) if known else [[none[:, 0]], [none], [none]]
    )
    token_log_probs, likeliest, their_log_probs = map(np.concatenate, parts)
    return width, Scores(
      log_probs=token_log_probs,
      likeliest=likeliest,
      likeliest_log_probs=their_log_probs,
    )
