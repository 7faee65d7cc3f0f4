"""Acceptance of rules for k drafts in closed form: oracles for their code."""

import itertools
from collections.abc import Callable

import numpy as np
from scipy import optimize, sparse


def rejection(draft: np.ndarray, target: np.ndarray, scale: float) -> float:
  """`R(scale) = sum [q - scale p]_+`, behind every acceptance below.

  Args:
    draft: `f64[V]`, p.
    target: `f64[V]`, q.
    scale: at least 0.
  """
  return float(
    np.maximum(np.asarray(target) - scale * np.asarray(draft), 0).sum()
  )


def recursive(draft: np.ndarray, target: np.ndarray, count: int) -> float:
  """Acceptance of recursive rejection, k i.i.d. drafts: `1 - R(s_k)`.

  `s_0 = 0, s_{j+1} = s_j + R(s_j)` (SpecInfer; batch decoding of Yin et al.).
  """
  scale = 0.0
  for _ in range(count):
    scale += rejection(draft, target, scale)
  return 1 - rejection(draft, target, scale)


def kseq_scale(draft: np.ndarray, target: np.ndarray, count: int) -> float:
  """k-SEQ's rho: the least valid one, a root found by SciPy's Brent.

  With `b(r) = sum min(p, q / r)`, the r in [1, k] with `1 - (1 - b)^k = r b`
  (Sun et al., SpecTr, NeurIPS 2023); 1 where nothing can be accepted.
  """
  p, q = np.asarray(draft, float), np.asarray(target, float)
  one = lambda r: np.minimum(p, q / r).sum()
  excess = lambda r: 1 - (1 - one(r)) ** count - r * one(r)
  if count == 1 or one(1.0) == 0 or excess(1.0) <= 0:
    return 1.0
  if excess(count) >= 0:  # by rounding, where next to nothing is accepted
    return float(count)
  return float(optimize.brentq(excess, 1.0, count, xtol=1e-15, rtol=1e-14))


def kseq(draft: np.ndarray, target: np.ndarray, count: int) -> float:
  """Acceptance of k-SEQ, k i.i.d. drafts: `1 - (1 - b(rho))^k`."""
  scale = kseq_scale(draft, target, count)
  one = np.minimum(np.asarray(draft), np.asarray(target) / scale).sum()
  return float(1 - (1 - one) ** count)


def match(draft: np.ndarray, target: np.ndarray, count: int) -> float:
  """Acceptance of naive matching, `sum q (1 - (1 - p)^k)`."""
  return float(
    np.sum(np.asarray(target) * (1 - (1 - np.asarray(draft)) ** count))
  )


def set_optimum(
  target: np.ndarray, covered: Callable[[tuple[int, ...]], float]
) -> float:
  """The optimum for any draft law, by trying every set of tokens.

  `1 + min_S {q(S) - P(all drafts in S)}` (Hu et al., ICLR 2025): exponential in
  V, for tests and small vocabularies.

  Args:
    target: `f64[V]`, q.
    covered: P(all drafts in S) for a set S.

  Returns:
    The acceptance probability.
  """
  vocab = len(target)
  return 1 + min(
    target[list(tokens)].sum() - covered(tokens)
    for size in range(vocab + 1)
    for tokens in itertools.combinations(range(vocab), size)
  )


def plan(
  drafts: np.ndarray, probs: np.ndarray, target: np.ndarray
) -> tuple[float, np.ndarray]:
  """The optimal plan for any draft law, by a linear program (HiGHS).

  Args:
    drafts: `int[D, k]`, the possible drafts.
    probs: `f64[D]`, their probabilities.
    target: `f64[V]`, q.

  Returns:
    The acceptance probability, and `f64[D, V]`: the mass each draft ships to
    each of its own tokens. Rows sum to at most `probs`, columns to at most q.

  Raises:
    RuntimeError: if the solver fails.
  """
  pairs = [(d, int(x)) for d, row in enumerate(drafts) for x in np.unique(row)]
  rows, columns = np.array(pairs).T
  variable = np.arange(len(pairs))
  ones = np.ones(len(pairs))
  limits = sparse.vstack(
    [
      sparse.csr_matrix((ones, (rows, variable)), (len(drafts), len(pairs))),
      sparse.csr_matrix((ones, (columns, variable)), (len(target), len(pairs))),
    ]
  )
  solution = optimize.linprog(
    -ones,
    A_ub=limits,
    b_ub=np.concatenate([probs, target]),
    bounds=(0, None),
    method="highs",
  )
  if not solution.success:
    raise RuntimeError(f"linear program failed: {solution.message}")
  shipped = np.zeros((len(drafts), len(target)))
  shipped[rows, columns] = solution.x
  return float(-solution.fun), shipped
