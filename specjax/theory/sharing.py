"""Drafted tokens for a batch: one depth for all rows, or a length for each.

Survival S[b, j] is the chance that token j of row b is reached and kept. A
budget of n drafted tokens is best spent on the n largest, and since S does not
rise along a row, those are a beginning of every row. Which n, what they cost
says. Rounds are dense arrays here, `[B, depth + 1]`, so that a ragged choice
saves nothing in this library's programs; the difference between the two is what
a kernel for ragged rows could gain.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
  """A choice of draft lengths, and what it yields.

  Attributes:
    lengths: `int[B]`, drafted tokens.
    tokens: expected tokens of a round, all rows.
    seconds: of the round.
  """

  lengths: np.ndarray
  tokens: float
  seconds: float

  @property
  def rate(self) -> float:
    """Tokens per second, all rows."""
    return self.tokens / self.seconds


def shared_depth(
  survival: np.ndarray,
  draft_seconds: float,
  verify_seconds: Callable[[int], float],
  *,
  weights: Sequence[float] | None = None,
) -> Shares:
  """The best depth that is the same for all rows.

  Level k + 1 pays if `sum_b w_b S[b, k + 1]` is above the rate times what it
  costs.

  Args:
    survival: `f64[B, G]`, not rising along a row.
    draft_seconds: of a level, of all rows.
    verify_seconds: of the target's pass by the tokens it is fed, of all rows.
    weights: `f64[B]`, what a row's tokens are worth: multipliers of promised
      latencies. They decide on the depth; tokens are counted as they are.
  """
  survival = _checked(survival)
  rows, most = survival.shape
  worth = np.ones(rows) if weights is None else np.asarray(weights, float)
  seconds = np.array(
    [
      k * draft_seconds + verify_seconds(rows * (k + 1))
      for k in range(most + 1)
    ]
  )
  each = np.pad(np.cumsum(survival, axis=1), ((0, 0), (1, 0))) + 1
  k = int(np.argmax(worth @ each / seconds))
  return Shares(
    lengths=np.full(rows, k), tokens=each[:, k].sum(), seconds=seconds[k]
  )


def ragged(
  survival: np.ndarray,
  draft_seconds: float,
  verify_seconds: Callable[[int], float],
) -> Shares:
  """The best number of tokens for every row, whatever the others have.

  Args:
    survival, draft_seconds, verify_seconds: as `shared_depth`'s; drafting costs
      as many levels as the longest row has.
  """
  survival = _checked(survival)
  rows, most = survival.shape
  best = None
  for depth in range(most + 1):
    # A stable sort: of equals the earlier token, and so a row's beginning.
    flat = survival[:, :depth].T.ravel()
    order = np.argsort(-flat, kind="stable")
    gained = rows + np.concatenate([[0.0], np.cumsum(flat[order])])
    seconds = np.array(
      [
        depth * draft_seconds + verify_seconds(rows + n)
        for n in range(len(flat) + 1)
      ]
    )
    n = int(np.argmax(gained / seconds))
    lengths = np.bincount(order[:n] % rows, minlength=rows)
    candidate = Shares(lengths=lengths, tokens=gained[n], seconds=seconds[n])
    if best is None or candidate.rate > best.rate * (1 + 1e-12):
      best = candidate
  assert best is not None
  return best


def _checked(survival: np.ndarray) -> np.ndarray:
  survival = np.asarray(survival, np.float64)
  if survival.ndim != 2 or ((survival < 0) | (survival > 1)).any():
    raise ValueError(
      "survival must be probabilities [rows, levels], got shape "
      f"{survival.shape}"
    )
  if (np.diff(survival, axis=1) > 1e-9).any():
    raise ValueError("survival must not rise along a row")
  return survival
