"""Prefix caching: a prompt reuses the cached beginning of another row's text.

The host remembers the text of every row, running or finished. A prompt gets a
row, and the longest common prefix with any row.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from launch.serving.control import Asked, Report
from specjax.state import StopReason

_LEAST = 16  # tokens of a text that a row is chosen for


class Texts:
  """The text in each row's caches.

  Attributes:
    cached: `i32[B]`, tokens of each row's prompt that were not read.
  """

  def __init__(
    self,
    num_slots: int,
    max_length: int,
    groups: int = 1,
    *,
    share: bool = True,
    whole: bool = False,
  ):
    """Begins without any text.

    Args:
      num_slots: B.
      max_length: of a text.
      groups: of devices that rows are cut over; no text is copied from one to
        another.
      share: whether a prompt may begin as another's text.
      whole: whether texts are kept whole or not at all, since states of
        recurrent layers cannot be cut short.
    """
    self._share, self._whole = share, whole
    self._group = np.arange(num_slots) * groups // num_slots
    self._tokens = np.zeros((num_slots, max_length), np.int32)
    self._lengths = np.zeros(num_slots, np.int32)
    self._read = np.zeros(num_slots, np.int32)  # tokens of each prompt so far
    self._touched = np.zeros(num_slots, np.int64)
    self.cached = np.zeros(num_slots, np.int32)

  def place(self, free: Sequence[int], asked: Asked) -> int:
    """The free row that a prompt costs least.

    One whose whole text the prompt goes on from, if that is long enough; else
    the one that was not used for longest: a beginning can be copied from any
    row of its group.
    """
    same, free = self._same(asked), np.asarray(free)
    whole = free[(same[free] == self._lengths[free]) & (same[free] >= _LEAST)]
    if len(whole):
      return int(whole[np.argmax(same[whole])])
    best = int(np.argmax(same))
    near = free[self._group[free] == self._group[best]]
    free = near if len(near) and same[best] >= _LEAST else free
    return int(free[np.argmin(self._touched[free])])

  def begin(self, row: int) -> None:
    """A row is given a request, of which it has read nothing."""
    self._read[row] = self.cached[row] = 0

  def source(self, row: int, asked: Asked) -> tuple[int, int]:
    """The row to go on from, and how many of its tokens are kept.

    It is the row itself if no other row's text has more of the prompt. At least
    one token is left to read.
    """
    done = int(self._read[row])
    same = np.minimum(self._same(asked), len(asked.token_ids) - 1)
    same = np.where(self._group == self._group[row], same, 0)
    if self._whole:
      same = np.where(same == self._lengths, same, 0)
    best = int(np.argmax(same))
    if same[best] <= done:
      return row, done
    self.cached[row] += int(same[best]) - done
    return best, int(same[best])

  def read(self, row: int, asked: Asked, length: int) -> None:
    """A row has the first tokens of its prompt."""
    self._tokens[row, :length] = asked.token_ids[:length]
    self._lengths[row] = self._read[row] = length
    self._touched[row] = self._touched.max() + 1

  def hear(self, report: Report, running: np.ndarray) -> None:
    """Rows that are `running`, `bool[B]`, have emitted tokens."""
    for row in np.flatnonzero(running):
      start, length = int(report.start[row]), int(report.length[row])
      self._tokens[row, start:length] = report.tokens[row, : length - start]
      self._lengths[row] = length
      self._touched[row] = self._touched.max() + 1
    self.forget(np.flatnonzero(report.reason == StopReason.NAN_LOGITS))

  def longest(self, rows: np.ndarray) -> int:
    """Tokens of the longest text of some rows, `bool[B]`; 1 of none."""
    return int(np.max(self._lengths[rows], initial=1))

  def forget(self, rows: Iterable[int]) -> None:
    """Forgets the texts of these rows, so that none is reused."""
    self._lengths[list(rows)] = 0

  def _same(self, asked: Asked) -> np.ndarray:
    """`i32[B]`, tokens that each row's text and the prompt begin with alike."""
    if not self._share:
      return np.zeros(len(self._lengths), np.int32)
    prompt = np.asarray(asked.token_ids, np.int32)
    width = min(len(prompt), self._tokens.shape[1])
    differs = self._tokens[:, :width] != prompt[:width]
    same = np.where(differs.any(1), differs.argmax(1), width)
    return np.minimum(same, self._lengths).astype(np.int32)
