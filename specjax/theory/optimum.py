"""The best possible acceptance of k drafts at one position.

Optimal transport with membership cost (Sun et al., NeurIPS 2023): over all
couplings of k drafted tokens and an output token distributed as the target,
the largest probability that the output is among the drafts.
"""

import numpy as np


def iid_optimum(draft: np.ndarray, target: np.ndarray, count: int) -> float:
  """The optimum for k i.i.d. drafts, `min_S {q(S) + 1 - p(S)^k}`.

  The minimum is attained by a set of the lowest q / p (p(S)^k is convex in
  p(S)), so one sort finds it.

  Args:
    draft: `f64[V]`, p.
    target: `f64[V]`, q.
    count: k >= 1.

  Returns:
    The acceptance probability.

  Raises:
    ValueError: if `count` is not positive.
  """
  if count < 1:
    raise ValueError(f"the number of drafts must be >= 1, got {count}")
  p, q = np.asarray(draft, float), np.asarray(target, float)
  some = (p > 0) | (q > 0)
  p, q = p[some], q[some]
  ratio = np.divide(q, p, out=np.full_like(q, np.inf), where=p > 0)
  order = np.argsort(ratio, kind="stable")
  gap = np.cumsum(q[order]) - np.cumsum(p[order]) ** count
  return float(1 + min(0.0, gap.min()))
