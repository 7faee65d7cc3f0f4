"""Tokens per second of speculative decoding, predicted from costs.

N is the number of drafted tokens per cycle, P the probability that one is
accepted given that all before it were, T_s the seconds of a draft step, T_v
those of a target pass over the drafted tokens. Except in `exact_tokens`,
acceptance is assumed to be i.i.d. (a capped geometric number of accepted
tokens: Leviathan et al., ICML 2023). Scalars and arrays broadcast.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specjax import tree_search
from specjax.tree import Tree

Number = float | np.ndarray


def expected_accepted(num_tokens: Number, acceptance: Number) -> np.ndarray:
  """`E_0`: drafted tokens accepted in a cycle.

  `P (1 - P^N) / (1 - P)`, and N at P = 1; `f64[...]`.

  Raises:
    ValueError: for N < 0, or P outside [0, 1].
  """
  n, p = _checked(num_tokens, acceptance)
  less = np.where(p < 1, p, 0.0)
  # -expm1(n log p) does not cancel near P = 1.
  with np.errstate(divide="ignore", invalid="ignore"):
    lost = np.where(less > 0, -np.expm1(n * np.log(less)), 1.0)
  value = less * np.where(n > 0, lost, 0.0) / (1 - less)
  return np.where(p < 1, value, n)


def tokens_per_cycle(num_tokens: Number, acceptance: Number) -> np.ndarray:
  """`(1 - P^(N + 1)) / (1 - P)`: block efficiency, extra token included."""
  return 1 + expected_accepted(num_tokens, acceptance)


def exact_tokens(first_accepted: Sequence[float]) -> float:
  """Block efficiency for any acceptance: `1 + sum P(first i accepted)`.

  Args:
    first_accepted: `f[N]`, the probability that the first i drafted tokens are
      accepted, i = 1..N: nonincreasing.

  Raises:
    ValueError: if they are not probabilities, or increase.
  """
  first = np.asarray(first_accepted, np.float64)
  likely = ((first >= 0) & (first <= 1)).all()
  if not likely or (np.diff(first) > 1e-9).any():
    raise ValueError(
      f"must be probabilities that do not increase, got {first.tolist()}"
    )
  return float(1 + first.sum())


def expected_calls(first_accepted: Sequence[float], length: int) -> float:
  """Expected target calls of a completion of L tokens.

  `C(L) = 1 + sum_d P(d accepted) C(L - d - 1)`, with `C = 0` below one token.
  The last call emits fewer tokens than it could, so `L / C(L)` is less than
  `exact_tokens`, its limit.

  Args:
    first_accepted: as in `exact_tokens`; calls are assumed independent.
    length: L, tokens of the completion.

  Raises:
    ValueError: as in `exact_tokens`.
  """
  exact_tokens(first_accepted)
  reached = np.array([1.0, *first_accepted, 0.0])
  accepted = reached[:-1] - reached[1:]  # P(d accepted), d = 0..N
  calls = np.zeros(len(accepted) + length)  # also at L - d - 1 <= 0
  for left in range(len(accepted), len(calls)):
    calls[left] = 1 + accepted @ calls[left - len(accepted) : left][::-1]
  return float(calls[-1])


def tree_tokens(tree: Tree, acceptance_by_rank: Sequence[float]) -> float:
  """Block efficiency of a tree: 1 plus each node's acceptance probability.

  Takes `specjax.tree_search.acceptance_by_rank`, `f[C]`.

  Raises:
    ValueError: if they are not probabilities, or add up to more than 1.
  """
  return 1 + tree_search.expected_accepted(tree, acceptance_by_rank)


def throughput(
  num_tokens: Number,
  acceptance: Number,
  draft_seconds: Number,
  verify_seconds: Number,
) -> np.ndarray:
  """Tokens per second: `tokens_per_cycle / (N T_s + T_v)`.

  Raises:
    ValueError: for numbers out of range.
  """
  tokens = tokens_per_cycle(num_tokens, acceptance)
  return tokens / (np.asarray(num_tokens) * draft_seconds + verify_seconds)


def verify_curve(
  measured: Mapping[int, float],
) -> Callable[[Number], np.ndarray]:
  """T_v(n) between measured widths: piecewise linear.

  Args:
    measured: seconds of a target pass by the number of tokens fed, N + 1.

  Returns:
    `fed tokens -> seconds`; raises ValueError outside the measured range.
  """
  widths = np.array(sorted(measured), float)
  seconds = np.array([measured[int(w)] for w in widths])

  def at(fed: Number) -> np.ndarray:
    fed = np.asarray(fed, float)
    if (fed < widths[0]).any() or (fed > widths[-1]).any():
      raise ValueError(
        f"measured for {int(widths[0])}..{int(widths[-1])} tokens, asked for "
        f"{fed.tolist()}"
      )
    return np.interp(fed, widths, seconds)

  return at


def best_num_tokens(
  acceptance: float,
  draft_seconds: float,
  verify_seconds: float | Callable[[Number], np.ndarray],
  *,
  most: int = 64,
) -> int:
  """The N with the largest throughput; 0 if speculation does not pay off.

  Args:
    acceptance: P.
    draft_seconds: T_s.
    verify_seconds: T_v, or a function of the tokens fed (N + 1).
    most: the largest N to try; ties go to the smallest.
  """
  n = np.arange(most + 1)
  verify = verify_seconds(n + 1) if callable(verify_seconds) else verify_seconds
  rates = throughput(n, acceptance, draft_seconds, verify)
  return int(np.flatnonzero(rates >= rates.max() * (1 - 1e-12))[0])


def break_even(
  num_tokens: int,
  draft_seconds: float,
  verify_seconds: float,
  plain_seconds: float,
) -> float:
  """The least P at which a cycle is no slower than plain decoding.

  There `tokens_per_cycle = (N T_s + T_v) / plain_seconds`, with N >= 1 and
  `plain_seconds` for a target pass over one token; inf if even P = 1 is slower.
  """
  need = (num_tokens * draft_seconds + verify_seconds) / plain_seconds
  if need <= 1:
    return 0.0
  if need > num_tokens + 1:
    return float("inf")
  low, high = 0.0, 1.0
  for _ in range(60):
    middle = (low + high) / 2
    enough = tokens_per_cycle(num_tokens, middle) >= need
    low, high = (low, middle) if enough else (middle, high)
  return high


def _checked(num_tokens, acceptance) -> tuple[np.ndarray, np.ndarray]:
  n, p = np.asarray(num_tokens), np.asarray(acceptance, float)
  if not (np.isfinite(n) & (n >= 0) & (np.floor(n) == n)).all():
    raise ValueError(
      f"num_tokens must be >= 0 and whole numbers, got {num_tokens}"
    )
  if not ((p >= 0) & (p <= 1)).all():
    raise ValueError(f"acceptance must be in [0, 1], got {acceptance}")
  return n, p
