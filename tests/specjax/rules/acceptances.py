"""The best acceptance of k drafts, by search and by a linear program."""

import itertools
from collections.abc import Callable

import numpy as np
from scipy import optimize, sparse


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
