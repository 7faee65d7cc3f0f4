"""Prefix caching: a prompt reuses the KV cache of another row's prefix.

The host remembers the text of every row, running or finished. A prompt reuses
the longest common prefix with any row.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from launch.serving.control import Report, Request
from specjax.state import StopReason

_LEAST = 16  # shortest prefix for which a row is chosen


class Texts:
  """The text in each row's caches.

  Attributes:
    cached: `i32[B]`, tokens of each row's prompt from the cache.
  """

  def __init__(
    self,
    num_slots: int,
    max_length: int,
    groups: int = 1,
    *,
    share: bool = True,
    only_whole: bool = False,
  ):
    """Starts without any text.

    Args:
      num_slots: B.
      max_length: maximum length of a text.
      groups: groups of devices with their own rows, between which no text is
        copied.
      share: whether a prompt may reuse another text's prefix.
      only_whole: whether a text is reused only as a whole, since recurrent
        states cannot be truncated.
    """
    self._share, self._only_whole = share, only_whole
    self._group = np.arange(num_slots) * groups // num_slots
    self._tokens = np.zeros((num_slots, max_length), np.int32)
    self._lengths = np.zeros(num_slots, np.int32)
    self._read = np.zeros(num_slots, np.int32)  # tokens of each prompt so far
    self._touched = np.zeros(num_slots, np.int64)
    self.cached = np.zeros(num_slots, np.int32)

  def place(self, free: Sequence[int], request: Request) -> int:
    """The best free row for a prompt.

    A row whose whole text is a prefix of the prompt, if long enough; else the
    least recently used row, since prefixes can be copied within its group.
    """
    same, free = self._same(request), np.asarray(free)
    whole = free[(same[free] == self._lengths[free]) & (same[free] >= _LEAST)]
    if len(whole):
      return int(whole[np.argmax(same[whole])])
    best = int(np.argmax(same))
    near = free[self._group[free] == self._group[best]]
    free = near if len(near) and same[best] >= _LEAST else free
    return int(free[np.argmin(self._touched[free])])

  def begin(self, row: int) -> None:
    """Starts a request in a row, with nothing prefilled."""
    self._read[row] = self.cached[row] = 0

  def source(self, row: int, request: Request) -> tuple[int, int]:
    """The row whose prefix is reused, and the number of tokens.

    It is the row itself if no other row has more of the prompt. At least one
    token is left to prefill.
    """
    done = int(self._read[row])
    same = np.minimum(self._same(request), len(request.token_ids) - 1)
    same = np.where(self._group == self._group[row], same, 0)
    if self._only_whole:
      same = np.where(same == self._lengths, same, 0)
    best = int(np.argmax(same))
    if same[best] <= done:
      return row, done
    self.cached[row] += int(same[best]) - done
    return best, int(same[best])

  def record(self, row: int, request: Request, length: int) -> None:
    """Records that a row has the first `length` tokens of its prompt."""
    self._tokens[row, :length] = request.token_ids[:length]
    self._lengths[row] = self._read[row] = length
    self._touched[row] = self._touched.max() + 1

  def extend(self, report: Report, running: np.ndarray) -> None:
    """Adds the tokens that `running` rows, `bool[B]`, have emitted."""
    for row in np.flatnonzero(running):
      start, length = int(report.start[row]), int(report.length[row])
      self._tokens[row, start:length] = report.tokens[row, : length - start]
      self._lengths[row] = length
      self._touched[row] = self._touched.max() + 1
    self.forget(np.flatnonzero(report.reason == StopReason.NAN_LOGITS))

  def longest(self, rows: np.ndarray) -> int:
    """Length of the longest text in some rows, `bool[B]`; at least 1."""
    return int(np.max(self._lengths[rows], initial=1))

  def forget(self, rows: Iterable[int]) -> None:
    """Forgets the texts of these rows, so that none is reused."""
    self._lengths[list(rows)] = 0

  def _same(self, request: Request) -> np.ndarray:
    """Length of each row's common prefix with the prompt, `i32[B]`."""
    if not self._share:
      return np.zeros(len(self._lengths), np.int32)
    prompt = np.asarray(request.token_ids, np.int32)
    width = min(len(prompt), self._tokens.shape[1])
    differs = self._tokens[:, :width] != prompt[:width]
    same = np.where(differs.any(1), differs.argmax(1), width)
    return np.minimum(same, self._lengths).astype(np.int32)
