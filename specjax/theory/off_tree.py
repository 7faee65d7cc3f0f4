"""The price of not knowing the laws off the draft, for small instances.

The joint optimum (`specjax.theory.joint`) knows the laws of all contexts, a
rule sees those on its draft. What the others are worth depends on a prior, for
a rule could guess them: here every context has m equally likely pairs of laws,
independent of the others. A rule must be lossless for each assignment of pairs,
and what it does with a draft depends on the pairs on that draft. The best of
such rules is a linear programme in the mass that each draft with its pairs
stops at each of its contexts with each next token, under equation (1) of
docs/joint.md for each assignment.

A rule that is lossless for all laws is one of them, so the programme bounds all
rules from above, and the mean of the joint optima bounds the programme.
"""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
from scipy import sparse

from specjax.theory import joint, programme
from specjax.tree import Tree

Prior = Callable[[tuple[int, ...]], np.ndarray]
"""The m equally likely pairs of laws (draft, target) after a context,
`f64[m, 2, V]`."""

Context = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffTree:
  """Expected accepted tokens, over the prior.

  Attributes:
    on_draft: of the best rule that sees the laws on its draft.
    everywhere: of the best that sees all laws: the mean joint optimum.
  """

  on_draft: float
  everywhere: float


def optimum(tree: Tree, prior: Prior) -> OffTree:
  """The optimum of i.i.d. drafts, with and without the laws off the draft.

  Args:
    tree: of fixed form. The assignments, the product of m over all contexts of
      less than G tokens, must be few (tens).
    prior: the pairs of laws after each context of less than G tokens.

  Returns:
    Both optima.

  Raises:
    ValueError: if the tree has no drafted node, or the drafts are too many.
    ArithmeticError: if the solver fails on these laws.
  """
  vocab, length = np.shape(prior((0,)))[-1], tree.max_depth
  levels = [
    itertools.product(range(vocab), repeat=g) for g in range(length + 1)
  ]
  contexts = list(itertools.chain(*levels))
  inner = [s for s in contexts if len(s) < length]
  pairs = {s: np.asarray(prior((0, *s)), float) for s in inner}
  assignments = [
    dict(zip(inner, chosen, strict=True))
    for chosen in itertools.product(*(range(len(pairs[s])) for s in inner))
  ]
  stops = _Stops(vocab, length)
  everywhere = 0.0
  for number, chosen in enumerate(assignments):
    laws = {s: pairs[s][chosen[s]] for s in inner}
    draft = lambda context, laws=laws: laws[context[1:]][0]
    target = lambda context, laws=laws: laws[context[1:]][1]
    everywhere += joint.any_tree(tree, draft, target).expected_accepted
    drafts = joint.drafted_sets(tree, draft, vocab=vocab)
    for members, prob in zip(*drafts, strict=True):
      held = ((), *itertools.compress(contexts[1:], members))
      shown = tuple((s, chosen[s]) for s in held if s in chosen)
      stops.add(
        number, held, shown, prob, {s: law[1] for s, law in laws.items()}
      )
  on_draft = stops.most() / len(assignments)
  return OffTree(on_draft=on_draft, everywhere=everywhere / len(assignments))


class _Stops:
  """The programme as it grows: variables, and the equations they are in.

  A variable is the mass of a draft with its pairs that stops at a context and
  goes on with a token (after G tokens with any).
  """

  def __init__(self, vocab: int, length: int):
    self.vocab, self.length = vocab, length
    self.columns: dict[tuple, range] = {}  # by draft and pairs
    self.worth: list[float] = []
    self.equations: dict[tuple, int] = {}
    self.right: dict[int, float] = {}  # of the equations, where not 0
    self.entries: list[tuple[float, int, int]] = []

  def add(self, number: int, held, shown, prob: float, target) -> None:
    """Adds a draft to the equations of an assignment.

    Args:
      number: of the assignment.
      held: the contexts of the draft.
      shown: the pairs on it.
      prob: P(draft), which the pairs on it decide.
      target: the target's law after each context.
    """
    ends = [
      (stop, token)
      for stop in held
      for token in (range(self.vocab) if len(stop) < self.length else (None,))
    ]
    key = held, shown
    if key not in self.columns:
      first = len(self.worth)
      self.columns[key] = range(first, first + len(ends))
      self.worth += [0.0] * len(ends)
      whole = self._equation("a draft", key)
      self.right[whole] = prob
      self.entries += [(1.0, whole, c) for c in self.columns[key]]
    for column, (stop, token) in zip(self.columns[key], ends, strict=True):
      self.worth[column] += len(stop)
      emitted = stop if token is None else (*stop, token)
      # (1): of what comes to s, A(s), x gets q(x | s), accepted or not.
      for depth in range(min(len(emitted), self.length)):
        s = emitted[:depth]
        for x in range(self.vocab):
          value = (x == emitted[depth]) - target[s][x]
          self.entries.append((value, self._equation(number, s, x), column))

  def _equation(self, *key) -> int:
    return self.equations.setdefault(key, len(self.equations))

  def most(self) -> float:
    """The largest total of accepted tokens, over all assignments."""
    values, rows, columns = zip(*self.entries, strict=True)
    matrix = sparse.csr_array(
      (values, (rows, columns)), (len(self.equations), len(self.worth))
    )
    right = np.zeros(len(self.equations))
    right[list(self.right)] = list(self.right.values())
    worth = np.array(self.worth)
    scale = worth.max()
    mass = programme.maximise(worth / scale, matrix, right, equal=True)
    return float(worth @ mass)
