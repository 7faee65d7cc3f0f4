"""The best static tree for a measured acceptance: Sequoia's dynamic program.

Chen et al. (NeurIPS 2024). Suppose that from any node the walk continues to the
child of rank b, the b-th drawn there, with probability a_b. Node n is then
reached with the product of a_rank along its path, and the expected number of
accepted tokens is the sum of these over all drafted nodes. Let c(m, l, b) be
the largest sum, counting the root as 1, over trees with exactly m nodes, depth
at most l and b children of the root:

  c(1, l, 0) = 1,
  c(m, l, b) = max_y c(y, l, b - 1) + a_b max_b' c(m - y, l - 1, b'),

where the last child's subtree has m - y nodes. The decoder measures the a_b
(`acceptance_by_rank`).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.state import Counters
from specjax.tree import Tree

# Acceptances come from float32 sums: they may add up to this much over 1.
_ROUNDING = 1e-4
# A larger tree must be better by more than rounding.
_GAIN = 1e-12


def acceptance_by_rank(counters: Counters) -> np.ndarray:
  """Measured probability that the walk continues to the child of rank b.

  Measure with a tree whose inner nodes all have the same number of children
  (`specjax.tree.k_ary`): averages over different nodes may add up to more than
  1. `f64[C]`, over all rows; 0 for ranks that were never offered.
  """
  offered, accepted = (
    np.asarray(x, np.float64).sum(axis=0)
    for x in (counters.rank_offered, counters.rank_accepted)
  )
  ratio = np.zeros_like(offered)
  np.divide(accepted, offered, out=ratio, where=offered > 0)
  return np.clip(ratio, 0, 1)


def expected_accepted(
  tree: Tree, acceptance: Sequence[float] | np.ndarray
) -> float:
  """Expected number of accepted drafted tokens per round.

  The sum over drafted nodes of the product of `acceptance[rank]`, `f[C]`, along
  the node's path; raises like `best_tree`.
  """
  acceptance = _check_acceptance(acceptance)
  missing = max(tree.max_children - len(acceptance), 0)
  acceptance = np.pad(acceptance, (0, missing))
  reach = np.ones(tree.num_nodes)
  for node in range(1, tree.num_nodes):
    reach[node] = reach[tree.parents[node]] * acceptance[tree.rank[node]]
  return float(reach[1:].sum())


def best_tree(
  acceptance: Sequence[float] | np.ndarray,
  *,
  num_nodes: int,
  max_depth: int | None = None,
) -> Tree:
  """The tree with the largest expected number of accepted tokens.

  Args:
    acceptance: `f[C]`, a_b: the probability that the walk goes on to the child
      of rank b. No node gets more than C children.
    num_nodes: the most drafted nodes; the root does not count
      (`Tree.num_drafted`, not `Tree.num_nodes`).
    max_depth: the most drafted tokens on a path; by default `num_nodes`.

  Returns:
    The smallest of the best trees. If nothing is ever accepted, that is the
    root alone: plain decoding.

  Raises:
    ValueError: if an acceptance is not a probability, they add up to more than
      1, or a size is not positive.
  """
  acceptance = _check_acceptance(acceptance)
  if num_nodes < 1:
    raise ValueError(f"num_nodes must be >= 1, got {num_nodes}")
  if max_depth is not None and max_depth < 1:
    raise ValueError(f"max_depth must be >= 1 or None, got {max_depth}")
  max_depth = min(max_depth or num_nodes, num_nodes)
  table = _solve(acceptance, num_nodes, max_depth)
  values = table.best[-1, 1:]
  size = 1 + int(np.argmax(values >= values.max() - _GAIN))
  return table.tree(size, max_depth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table:
  """The solved program; M nodes at most, root included, L levels, C ranks.

  Attributes:
    best: `f64[L + 1, M + 1]`, max_b c(m, l, b); -inf if there is no such tree.
    width: `int[L + 1, M + 1]`, the maximizing b.
    split: `int[L + 1, C + 1, M + 1]`, the maximizing y in c(m, l, b).
  """

  best: np.ndarray
  width: np.ndarray
  split: np.ndarray

  def tree(self, size: int, depth: int) -> Tree:
    """The best tree of `size` nodes, root included, of at most that depth."""
    parents, pending = [-1], [(size, depth)]
    for node, (left, levels) in enumerate(pending):  # grows as we go
      family = []
      for rank in range(self.width[levels, left], 0, -1):
        previous = int(self.split[levels, rank, left])
        family.append((left - previous, levels - 1))
        left = previous
      pending += reversed(family)
      parents += [node] * len(family)
    return Tree(tuple(parents))


def _solve(acceptance: np.ndarray, num_drafted: int, max_depth: int) -> _Table:
  """Fills the table, one max-plus convolution for each depth and rank."""
  most = num_drafted + 1
  # A last rank without acceptance can only waste nodes.
  ranks = min(np.flatnonzero(acceptance).max(initial=-1) + 1, num_drafted)
  best = np.full((max_depth + 1, most + 1), -np.inf)
  best[:, 1] = 1
  width = np.zeros(best.shape, np.int32)
  split = np.zeros((max_depth + 1, ranks + 1, most + 1), np.int32)
  sizes = np.arange(most + 1)
  rest = sizes[:, None] - sizes  # [m, y], nodes of the last child's subtree
  for depth in range(1, max_depth + 1):
    below = np.where(rest > 0, best[depth - 1][np.maximum(rest, 0)], -np.inf)
    previous = np.full(most + 1, -np.inf)  # c(., l, b - 1)
    previous[1] = 1
    for rank in range(1, ranks + 1):
      chance = acceptance[rank - 1]
      # A rank of chance 0 still needs a subtree that exists.
      gain = np.where(below > -np.inf, chance * np.maximum(below, 0), -np.inf)
      total = previous + gain  # [m, y]
      split[depth, rank] = np.argmax(total, axis=1)
      previous = np.max(total, axis=1)
      better = previous > best[depth]
      best[depth] = np.where(better, previous, best[depth])
      width[depth] = np.where(better, rank, width[depth])
  return _Table(best=best, width=width, split=split)


def _check_acceptance(acceptance) -> np.ndarray:
  """The acceptances as `f64[C]`."""
  acceptance = np.asarray(acceptance, np.float64)
  if acceptance.ndim != 1 or not len(acceptance):
    raise ValueError(
      f"acceptance needs one probability per rank, got shape {acceptance.shape}"
    )
  if not np.all((acceptance >= 0) & (acceptance <= 1)):
    raise ValueError(
      f"acceptance must be probabilities in [0, 1], got {acceptance.tolist()}"
    )
  if acceptance.sum() > 1 + _ROUNDING:
    raise ValueError(
      "acceptance of one node's ranks must add up to at most 1, got "
      f"{acceptance.sum():.6g}: measure it with a tree whose inner nodes all "
      "have the same number of children"
    )
  return acceptance
