"""Scoring of prompts' own tokens, in a cache beside those of the rows.

Rounds do not keep the distribution at every token, which that needs. Prompts
share the cache: they are scored one after another, in chunks. Its programs are
compiled by the first request that needs them.
"""

import functools
from collections.abc import Sequence
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
      target: whose distribution it is.
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

  def _program(self, width: int) -> Any:
    if self._cache is None:
      cache = self._target.new_cache(self._params.target, 1, self._slots)
      states = recurrent.widened(cache.recurrent, self.widths[-1])
      self._cache = cache.replace(recurrent=states)
    if width not in self._score:
      score = functools.partial(programs.score, self._target, self._vocab_size)
      args = (np.zeros(width + 1, np.int32), np.int32(0))
      lowered = jax.jit(score, donate_argnums=1).lower(
        self._params, self._cache, *args
      )
      self._score[width] = lowered.compile()
    return self._score[width]

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

  def read_on(
    self, row: int, asked: Asked, most: int
  ) -> tuple[int, Scores | None]:
    """Scores more tokens of a prompt, of the row that is the first in line.

    Args:
      row: which.
      asked: what it was given.
      most: tokens at most; the narrowest program's are always scored.

    Returns:
      The width of the pass, and the `Scores` if that was the end.
    """
    known, text = self._known[row], asked.token_ids
    start = sum(len(one[0]) for one in known)
    fits = max((w for w in self.widths if w <= most), default=self.widths[0])
    count, width = min(fits, len(text) - 1 - start), 0
    if count:
      width = min(w for w in self.widths if w >= count)
      tokens = np.full(width + 1, text[start], np.int32)
      tokens[: count + 1] = text[start : start + count + 1]
      self._cache, new = self._program(width)(
        self._params, self._cache, tokens, np.int32(start)
      )
      known.append(tuple(x[:count] for x in jax.device_get(new)))
    if start + count < len(text) - 1:
      return width, None
    self.drop(row)
    none = np.zeros((0, MOST_SCORED), np.float32)
    parts = known or [(none[:, 0], none.astype(np.int32), none)]
    return width, Scores(*map(np.concatenate, zip(*parts, strict=True)))
