"""The joint optimum: the most that any lossless rule accepts of a whole draft.

Of a small instance, all laws known. A context s is the tokens after the root,
P(s) and Q(s) are the draft's and the target's probability of s, A(s) is the
probability that at least s is accepted. docs/optimum.md proves (its
propositions are meant below):

- Proposition 1: a rule is lossless iff A(sx) <= A(s) q(x | s) and what stops at
  s, D(s) = A(s) - sum_x A(sx), is taken from drafts that have s.
- Proposition 2: that can be done iff A(W) <= P(the draft has one of W) for
  every antichain W, a set of which no member continues another. For K i.i.d.
  paths the right side is 1 - (1 - P(W))^K.
- Proposition 3: the optimum is attained by selecting a path of the draft and
  block verification with the law of the selected path.

The programmes are solved by HiGHS, in a(s) = A(s) / Q(s): then losslessness is
a(sx) <= a(s) <= 1, without a coefficient that could be tiny. No solution is
given out whose dual does not confirm it to 1e-7 tokens; where laws are not
sharp, errors are those of rounding.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse

from specjax.exact import ContextLaw, target_block_law
from specjax.siblings import IID, Siblings, laws_of_tokens
from specjax.theory import programme
from specjax.tree import Tree

_VIOLATED = 1e-13  # less than that is rounding
_MOST_DRAFTS = 1 << 17
_ROOT = (0,)  # the context that drafts begin in, as in `specjax.exact`


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointOptimum:
  """A plan of accepted mass, and what it comes to.

  Attributes:
    expected_accepted: expected number of accepted drafted tokens.
    acceptance: G + 1 arrays; entry g, `f64[V, .., V]` with g axes, is A(s), the
      probability that at least the g tokens s are accepted.
    selected: likewise, the probability that a selected path goes through s,
      with which block verification accepts as much (Proposition 3); None where
      it was not computed.
  """

  expected_accepted: float
  acceptance: tuple[np.ndarray, ...]
  selected: tuple[np.ndarray, ...] | None = None


# ------------------------------------------------------------------ the optima


def iid_paths(
  draft: ContextLaw, target: ContextLaw, *, length: int, count: int
) -> JointOptimum:
  """The joint optimum of K i.i.d. paths of G tokens, by cuts (Proposition 2).

  A cut that a solution violates is found among the antichains of largest
  `A(W) - lam P(W)`, for one lam by a dynamic programme over the contexts: W
  violates `A(W) <= f(P(W))`, f concave, most where it is on the upper hull of
  all points (P(W), A(W)). Ends when no *new* cut is violated.

  Args:
    draft, target: the laws after every context, `f64[V]`.
    length: G, at least 1; V ** G contexts must be few (hundreds).
    count: K, at least 1.

  Returns:
    The optimum, without `selected`.

  Raises:
    ValueError: if a number is not positive.
    ArithmeticError: if the solver fails on these laws.
  """
  if count < 1:
    raise ValueError(f"count must be >= 1, got {count}")
  contexts = _Contexts.of(target, length)
  p = _Contexts.of(draft, length).probs
  q = contexts.probs
  flow = contexts.flow()
  cuts: dict[bytes, np.ndarray] = {}
  while True:
    masks = np.array(list(cuts.values()), float).reshape(len(cuts), len(q))
    scale = np.max(masks * q, axis=1, initial=0)
    rows = masks * q / scale[:, None]
    within = _some_path(masks @ p, count) / scale
    a = programme.maximise(
      q,
      sparse.vstack([flow, sparse.csr_array(rows)]),
      np.concatenate([np.zeros(flow.shape[0]), within]),
    )
    violated = [
      (mask @ (q * a) - _some_path(mask @ p, count), mask)
      for mask in _hull(contexts, q * a, p, count)
    ]
    new = [
      m for by, m in violated if by > _VIOLATED and m.tobytes() not in cuts
    ]
    if not new:
      break
    cuts |= {mask.tobytes(): mask for mask in new}
  if max(by for by, _ in violated) > programme.CERTAIN:
    raise ArithmeticError(
      programme.failed("a cut that it was given is violated", q)
    )
  return contexts.optimum(q * a)


def any_tree(
  tree: Tree, draft: ContextLaw, target: ContextLaw, *, siblings: Siblings = IID
) -> JointOptimum:
  """The joint optimum of any law of drafts, as one programme over all drafts.

  Its variables are A(s) and what each set of drafted contexts gives to stops at
  each of its members (Proposition 1).

  Args:
    tree: of fixed form; V ** N drafts must be few.
    draft, target: the laws after every context, `f64[V]`.
    siblings: how the children of a node are drawn, without noise.

  Returns:
    The optimum, with `selected`.

  Raises:
    ValueError: if the tree has no drafted node, or the drafts carry noise or
      are too many.
    ArithmeticError: if the solver fails on these laws.
  """
  contexts = _Contexts.of(target, tree.max_depth)
  q = contexts.probs
  sets, probs = drafted_sets(
    tree, draft, vocab=contexts.vocab, siblings=siblings
  )
  which, place = np.nonzero(sets & (q > 0))  # pairs of a set and its member
  size, pairs = len(q), len(which)
  # D_T(s) <= min(P(T), Q(s)), in units of which it is a variable.
  unit = np.minimum(probs[which], q[place])
  # a(s) Q(s) - sum_x a(sx) Q(sx) <= what the sets give, over Q(s).
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
  solution = programme.maximise(
    np.concatenate([q, np.zeros(pairs)]),
    sparse.vstack([flow, stops, given]),
    np.concatenate([np.zeros(flow.shape[0] + size), np.ones(len(sets))]),
  )
  shares = np.zeros(sets.shape)
  shares[which, place] = solution[size:] * unit
  return contexts.optimum(
    q * solution[:size], _selected(contexts, sets, probs, shares)
  )


def selected_path(
  selected: Sequence[np.ndarray], target: ContextLaw
) -> JointOptimum:
  """Block verification of a selected path whose law is known (Proposition 3).

  `A(sx) = min(A(s) q(x | s), g(sx))`, where g(s) is the probability that the
  selected path goes through s. For the draft's own law it is rule `block`.

  Args:
    selected: g as in `JointOptimum.selected`.
    target: the law after every context, `f64[V]`.

  Returns:
    What it accepts.
  """
  acceptance, before = [np.ones(())], np.ones(())
  for depth, through in enumerate(selected[1:], start=1):
    q = target_block_law(target, length=depth)
    # In a(s), so that no law has to be divided out.
    kept = np.divide(through, q, out=np.ones_like(q), where=through < q)
    before = np.minimum(before[..., None], kept)
    acceptance.append(q * before)
  return JointOptimum(
    expected_accepted=float(sum(a.sum() for a in acceptance[1:])),
    acceptance=tuple(acceptance),
    selected=tuple(selected),
  )


def drafted_sets(
  tree: Tree, draft: ContextLaw, *, vocab: int, siblings: Siblings = IID
) -> tuple[np.ndarray, np.ndarray]:
  """The sets of contexts that a draft may be, and their probabilities.

  Args:
    tree: of fixed form; V ** N drafts must be few.
    draft: the draft's law after every context, `f64[V]`.
    vocab: V.
    siblings: how the children of a node are drawn, without noise.

  Returns:
    `bool[T, V + V^2 + .. + V^G]`, contexts level by level and in the order of
    their tokens, and `f64[T]`; sets of probability 0 are left out.

  Raises:
    ValueError: if the drafts carry noise or are too many.
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


_laws_of_tokens = jax.jit(laws_of_tokens, static_argnums=(0, 1))


# ------------------------------------------------------------------- contexts


def _starts(vocab: int, length: int) -> np.ndarray:
  """First index of the contexts of each depth 1..G, and their number."""
  return np.cumsum([0, 0, *(vocab**g for g in range(1, length + 1))])


@dataclasses.dataclass(frozen=True)
class _Contexts:
  """The contexts of depth 1..G, level by level, in the order of their tokens.

  Attributes:
    vocab: V.
    length: G.
    probs: `f64[V + .. + V^G]`, their probabilities under a law.
    parent: the context that each continues, -1 for the root.
  """

  vocab: int
  length: int
  probs: np.ndarray
  parent: np.ndarray

  @classmethod
  def of(cls, law: ContextLaw, length: int):
    """The contexts under a law, G at least 1."""
    if length < 1:
      raise ValueError(f"length must be >= 1, got {length}")
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

  def levels(self, values: np.ndarray) -> list[np.ndarray]:
    """Arrays `[..., V^g]` of depth 1..G, of one `[..., V + .. + V^G]`."""
    starts = _starts(self.vocab, self.length)
    bounds = itertools.pairwise(starts[1:])
    return [values[..., low:high] for low, high in bounds]

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

  def optimum(self, acceptance, selected=None) -> JointOptimum:
    """The plan with these A(s), `f64[V + .. + V^G]`, and these g(s)."""

    def shaped(values):
      return np.ones(()), *(
        level.reshape((self.vocab,) * g)
        for g, level in enumerate(self.levels(values), start=1)
      )

    return JointOptimum(
      expected_accepted=float(acceptance.sum()),
      acceptance=shaped(acceptance),
      selected=None if selected is None else shaped(selected),
    )


def _selected(
  contexts: _Contexts, sets: np.ndarray, probs: np.ndarray, shares: np.ndarray
) -> np.ndarray:
  """The law of a path through where each draft stops, on to its first leaf.

  Of T sets, `bool[T, S]`, with `probs` and D_T(s), their masses that stop at s;
  `f64[S]`, the probability that the path goes through s.
  """
  through = shares.copy()
  levels = contexts.levels(through)
  for above, below in reversed(list(itertools.pairwise(levels))):
    above += below.reshape(*above.shape, -1).sum(axis=-1)
  ends = (probs - levels[0].sum(axis=-1))[:, None]  # at the root
  stops, members = contexts.levels(shares), contexts.levels(sets)
  for level, stop, member in zip(levels, stops, members, strict=True):
    below = member.reshape(*ends.shape, contexts.vocab)
    first = below & (np.cumsum(below, axis=-1) == 1)
    on = (first * ends[..., None]).reshape(level.shape)
    level += on
    ends = stop + on
  return through.sum(axis=0)


# ------------------------------------------------------------------ antichains


def _some_path(mass, count: int):
  """P(one of K i.i.d. paths goes through a set of that mass)."""
  inside = np.clip(mass, 0, 1)
  with np.errstate(divide="ignore"):
    return -np.expm1(count * np.log1p(-inside))


def _antichain(contexts: _Contexts, worth: np.ndarray) -> np.ndarray:
  """The antichain of largest worth, `bool[S]`, by a dynamic programme.

  `val(s) = max(worth(s), sum_x val(sx), 0)`.
  """
  levels, takes = contexts.levels(worth), []
  value = np.zeros(contexts.vocab * len(levels[-1]))
  for level in reversed(levels):
    below = value.reshape(len(level), -1).sum(axis=1)
    takes.append(level > np.maximum(below, 0))
    value = np.maximum(level, np.maximum(below, 0))
  chosen, above = [], np.zeros(1, bool)
  for take in reversed(takes):
    above = np.repeat(above, contexts.vocab)
    chosen.append(take & ~above)
    above = above | take
  return np.concatenate(chosen)


def _hull(
  contexts: _Contexts, acceptance: np.ndarray, p: np.ndarray, steepest: float
) -> list[np.ndarray]:
  """Antichains on the upper hull of (P(W), A(W)), of slopes 0 to `steepest`.

  Between two of them there is another iff it is above their chord.
  """
  masks: dict[bytes, np.ndarray] = {}

  def at(slope):
    mask = _antichain(contexts, acceptance - slope * p)
    return mask, mask @ acceptance, mask @ p

  def between(left, right):
    _, high, wide = left
    _, low, narrow = right
    if not wide > narrow:
      return
    slope = (high - low) / (wide - narrow)
    middle = at(slope)
    mask, value, mass = middle
    chord = high + slope * (mass - wide)
    if mask.tobytes() in masks or not value > chord:
      return
    masks[mask.tobytes()] = mask
    between(left, middle)
    between(middle, right)

  ends = at(0.0), at(steepest)
  masks |= {mask.tobytes(): mask for mask, _, _ in ends}
  between(*ends)
  return list(masks.values())
