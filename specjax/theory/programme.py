"""Linear programmes over [0, 1], solved by HiGHS, confirmed by their duals."""

import numpy as np
from scipy import optimize, sparse

CERTAIN = 1e-7
"""Largest error of a solution that is given out: HiGHS leaves coefficients
below 1e-9 away."""


def maximise(
  worth: np.ndarray, rows, most: np.ndarray, *, equal: bool = False
) -> np.ndarray:
  """The x in [0, 1] of largest `worth @ x` with `rows @ x <= most`.

  Args:
    worth: `f64[n]`.
    rows: `f64[m, n]`, sparse, each to the scale of 1.
    most: `f64[m]`.
    equal: whether `rows @ x` must be `most`.

  Returns:
    `f64[n]`.

  Raises:
    ArithmeticError: unless x keeps each row, and has the worth of its dual,
      which none exceeds, to `CERTAIN`.
  """
  rows = sparse.csr_array(rows)
  solution = optimize.linprog(
    -worth,
    **({"A_eq": rows, "b_eq": most} if equal else {"A_ub": rows, "b_ub": most}),
    bounds=(0, 1),
    method="highs-ds",
    options={
      "primal_feasibility_tolerance": 1e-10,
      "dual_feasibility_tolerance": 1e-10,
    },
  )
  if solution.status != 0:
    raise ArithmeticError(failed(solution.message, worth))
  x = np.clip(solution.x, 0, 1)
  off = rows @ x - most
  off = np.max(np.abs(off) if equal else off, initial=0)
  # Any such y bounds the optimum from above.
  y = -(solution.eqlin if equal else solution.ineqlin).marginals
  if not equal:
    y = np.maximum(y, 0)
  bound = y @ most + np.maximum(worth - rows.T @ y, 0).sum()
  gap = bound - worth @ x
  if not (off <= CERTAIN and abs(gap) <= CERTAIN):
    raise ArithmeticError(
      failed(f"rows are off by {off:.1e}, its dual by {gap:.1e}", worth)
    )
  return x


def failed(reason: str, worth: np.ndarray) -> str:
  """The error message of a programme that was not solved.

  Args:
    reason: it failed.
    worth: `f64[n]`, masses for the most part, of which the least is named.
  """
  least = np.min(worth, where=worth > 0, initial=1)
  return (
    f"HiGHS did not solve the programme ({reason}); the least mass in it is "
    f"{least:.1e}, and masses near 1e-12 are beyond it"
  )
