"""The joint optimum: the most that any lossless rule accepts of a whole draft.

For small instances whose laws are all known. A context s is the tokens after
the root, P(s) and Q(s) are the draft's and the target's probability of s, A(s)
is the probability that at least s is accepted. docs/optimum.md proves:

- Proposition 1: a rule is lossless iff A(sx) <= A(s) q(x | s) and what stops at
  s, D(s) = A(s) - sum_x A(sx), is taken from drafts that have s.
- Proposition 2: that can be done iff A(W) <= P(the draft has one of W) for
  every antichain W, a set of which no member continues another. For K i.i.d.
  paths the right side is 1 - (1 - P(W))^K.
- Proposition 3: the optimum is attained by selecting a path of the draft and
  block verification with the law of the selected path.

HiGHS solves the program over all drafts in a(s) = A(s) / Q(s): losslessness is
then a(sx) <= a(s) <= 1, without tiny coefficients. A solution is returned only
if its dual confirms it to 1e-7 tokens; unless laws are sharp, errors are
rounding errors.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, sparse

from specjax.exact import ContextLaw, target_block_law
from specjax.siblings import IID, Siblings, log_probs_of_tokens
from specjax.tree import Tree

_CERTAIN = 1e-7  # HiGHS drops coefficients below 1e-9
_MOST_DRAFTS = 1 << 17
_ROOT = (0,)  # the context before the draft, as in `specjax.exact`


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointOptimum:
  """An optimal plan of accepted mass, and its value.

  Attributes:
    expected_accepted: expected number of accepted drafted tokens.
    acceptance: G + 1 arrays; entry g, `f64[V, .., V]` with g axes, is A(s), the
      probability that at least the g tokens s are accepted.
  """

  expected_accepted: float
  acceptance: tuple[np.ndarray, ...]


def any_tree(
  tree: Tree, draft: ContextLaw, target: ContextLaw, *, siblings: Siblings = IID
) -> JointOptimum:
  """The joint optimum for any law of drafts, as one program over all drafts.

  Its variables are A(s) and the mass that each set of drafted contexts gives to
  stops at each of its members (Proposition 1).

  Args:
    tree: of fixed form; V ** N drafts must be few.
    draft, target: the laws after every context, `f64[V]`.
    siblings: how the children of a node are drawn, without noise.

  Raises:
    ValueError: if there are too many drafts.
    ArithmeticError: if the solver fails on these laws.
  """
  contexts = _Contexts.of(target, tree.max_depth)
  q = contexts.probs
  sets, probs = _drafted_sets(
    tree, draft, vocab=contexts.vocab, siblings=siblings
  )
  which, place = np.nonzero(sets & (q > 0))  # pairs of a set and its member
  size, pairs = len(q), len(which)
  # The variable is D_T(s) in units of min(P(T), Q(s)), its upper bound.
  unit = np.minimum(probs[which], q[place])
  # a(s) Q(s) - sum_x a(sx) Q(sx) <= the mass from the sets, over Q(s).
  inner = np.flatnonzero((contexts.parent >= 0) & (q > 0))
  above = contexts.parent[inner]
  stops = sparse.coo_array(
    (
      np.concatenate([np.ones(size), -q[inner] / q[above],
                      -unit / q[place]]),
      (
        np.concatenate([np.arange(size), above, place]),
        np.concatenate([np.arange(size), inner, size + np.arange(pairs)]),
      ),
    ),
    shape=(size, size + pairs),
  )  # fmt: skip
  given = sparse.coo_array(
    (unit / probs[which], (which, size + np.arange(pairs))),
    shape=(len(sets), size + pairs),
  )
  flow = contexts.flow()
  flow.resize(flow.shape[0], size + pairs)
  solution = _maximize(
    np.concatenate([q, np.zeros(pairs)]),
    sparse.vstack([flow, stops, given]),
    np.concatenate([np.zeros(flow.shape[0] + size), np.ones(len(sets))]),
  )
  return contexts.optimum(q * solution[:size])


def _drafted_sets(
  tree: Tree, draft: ContextLaw, *, vocab: int, siblings: Siblings
) -> tuple[np.ndarray, np.ndarray]:
  """The sets of contexts that drafts may have, with their probabilities.

  `bool[T, V + V^2 + .. + V^G]`, contexts level by level and in the order of
  their tokens, and `f64[T]`; sets of probability 0 are left out.
  """
  if siblings.with_noise:
    raise ValueError(f"drafts with noise ({siblings.name}) are not enumerable")
  if vocab**tree.num_drafted > _MOST_DRAFTS:
    raise ValueError(
      f"at most {_MOST_DRAFTS} drafts are enumerated, got {vocab} ** "
      f"{tree.num_drafted}"
    )
  drawn = itertools.product(range(vocab), repeat=tree.num_drafted)
  tokens = np.array([(*_ROOT, *draft) for draft in drawn], np.int32)
  starts = _starts(vocab, tree.max_depth)
  laws = np.zeros((*tokens.shape, vocab))
  place = np.full(tokens.shape, -1)
  for node in range(tree.num_nodes):
    depth = int(tree.depth[node])
    along = tokens[:, tree.paths[node][1 : depth + 1]]
    rank = along @ vocab ** np.arange(depth)[::-1]
    if node:
      place[:, node] = starts[depth] + rank
    if tree.children[node]:
      after = itertools.product(range(vocab), repeat=depth)
      table = np.array([draft((*_ROOT, *context)) for context in after], float)
      laws[:, node] = table[rank]
  with jax.enable_x64(True), np.errstate(divide="ignore"):  # type: ignore[attr-defined]
    drawn_from = np.asarray(
      _laws_of_tokens(tree, siblings, jnp.asarray(tokens), jnp.log(laws))
    )
  each = np.take_along_axis(drawn_from[:, 1:], tokens[:, 1:, None], axis=-1)
  probs = np.exp(each[..., 0].sum(axis=1))
  sets = np.zeros((len(tokens), starts[-1]), bool)
  np.put_along_axis(sets, place[:, 1:], True, axis=1)
  sets, probs = sets[probs > 0], probs[probs > 0]
  sets, inverse = np.unique(sets, axis=0, return_inverse=True)
  return sets, np.bincount(inverse.ravel(), probs)


_laws_of_tokens = jax.jit(log_probs_of_tokens, static_argnums=(0, 1))


# ------------------------------------------------------------------- contexts


def _starts(vocab: int, length: int) -> np.ndarray:
  """First index of the contexts of each depth 1..G, and their number."""
  return np.cumsum([0, 0, *(vocab**g for g in range(1, length + 1))])


@dataclasses.dataclass(frozen=True)
class _Contexts:
  """The V + .. + V^G contexts, level by level, in the order of their tokens.

  `parent` is the context that each one continues, -1 for the root.
  """

  vocab: int
  length: int
  probs: np.ndarray
  parent: np.ndarray

  @classmethod
  def of(cls, law: ContextLaw, length: int):
    """The contexts under a law, G at least 1."""
    vocab = len(law(_ROOT))
    levels = [
      target_block_law(law, length=g).ravel() for g in range(1, length + 1)
    ]
    starts = _starts(vocab, length)
    parent = np.full(starts[-1], -1)
    for g in range(2, length + 1):
      above = np.arange(starts[g - 1], starts[g])
      parent[starts[g] : starts[g + 1]] = np.repeat(above, vocab)
    return cls(vocab, length, np.concatenate([[], *levels]), parent)

  def flow(self) -> sparse.csr_array:
    """Rows of `a(sx) - a(s) <= 0`."""
    size = len(self.parent)
    inner = np.flatnonzero(self.parent >= 0)
    rows = np.arange(len(inner))
    return sparse.csr_array(
      (
        np.repeat([1.0, -1.0], len(inner)),
        (np.tile(rows, 2), np.concatenate([inner, self.parent[inner]])),
      ),
      shape=(len(inner), size),
    )

  def optimum(self, acceptance: np.ndarray) -> JointOptimum:
    """The plan with these A(s), `f64[V + .. + V^G]`."""
    starts = _starts(self.vocab, self.length)
    bounds = itertools.pairwise(starts[1:])
    return JointOptimum(
      expected_accepted=float(acceptance.sum()),
      acceptance=(
        np.ones(()),
        *(
          acceptance[low:high].reshape((self.vocab,) * g)
          for g, (low, high) in enumerate(bounds, start=1)
        ),
      ),
    )


def _maximize(worth: np.ndarray, rows, most: np.ndarray) -> np.ndarray:
  """The x in [0, 1] that maximizes `worth @ x` under `rows @ x <= most`.

  Raises ArithmeticError unless x satisfies each row and attains the dual's
  bound, both to `_CERTAIN`.
  """
  rows = sparse.csr_array(rows)
  solution = optimize.linprog(
    -worth,
    A_ub=rows,
    b_ub=most,
    bounds=(0, 1),
    method="highs-ds",
    options={
      "primal_feasibility_tolerance": 1e-10,
      "dual_feasibility_tolerance": 1e-10,
    },
  )
  if solution.status == 0:
    x = np.clip(solution.x, 0, 1)
    off = np.max(rows @ x - most, initial=0)
    # Any such y bounds the optimum from above.
    y = np.maximum(-solution.ineqlin.marginals, 0)
    gap = y @ most + np.maximum(worth - rows.T @ y, 0).sum() - worth @ x
    if off <= _CERTAIN and abs(gap) <= _CERTAIN:
      return x
    reason = f"rows are off by {off:.1e}, its dual by {gap:.1e}"
  else:
    reason = solution.message
  least = np.min(worth, where=worth > 0, initial=1)
  raise ArithmeticError(
    f"HiGHS did not solve the program ({reason}); its least mass is "
    f"{least:.1e}, and masses near 1e-12 are too small for HiGHS"
  )
