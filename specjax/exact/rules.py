"""Checks a rule's claim to be lossless, and any distance that it reports.

A rule that claims to be lossless is summed over every draft of small trees, for
models that depend on the whole text and for hard cases: zeros, disjoint
supports, point masses, a draft equal to the target. Any distance that a rule
reports must be the true one.
"""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from specjax import siblings as siblings_lib
from specjax.exact.enumeration import (
  BlockLaw,
  ContextLaw,
  block_law,
  target_block_law,
)
from specjax.siblings import Siblings
from specjax.tree import Tree, chain, k_ary, paths
from specjax.types import Rule

_VOCAB = 3
_TREES = (
  chain(1),
  chain(2),
  k_ary(2),
  Tree((-1, 0, 0, 0)),
  Tree((-1, 0, 0, 1)),
  paths(2, 2),
)
_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleCheck:
  """Result of the checks of a rule that passed.

  Attributes:
    num_cases: combinations of tree, siblings and laws that were summed.
    error: the largest error: for a lossless rule of the joint law of the next
      tokens, else of the reported distances.
    total_variation: the largest distance of the first token's law from the
      target's.
    reports: whether it reports distances.
  """

  num_cases: int
  error: float
  total_variation: float
  reports: bool


def check_rule(rule: Rule) -> RuleCheck:
  """Checks a rule against its claims.

  - On any input its node probabilities sum to 1, and so does the next token's
    law after every node that it may end at.
  - If it is `lossless`, the joint law of the next tokens is the target's, on
    every tree and all siblings that its `check` accepts.
  - The distance that it reports for the first token is exact. A rule that
    reports none passes.

  Args:
    rule: the rule; siblings with noise cannot be enumerated.

  Returns:
    The `RuleCheck`.

  Raises:
    ValueError: if the rule fails, naming the tree, siblings and laws; or if it
      accepts none of the trees.
  """
  error, largest, cases, reports = 0.0, 0.0, 0, False
  with jax.enable_x64(True):  # type: ignore[attr-defined]
    for tree, siblings in _forms(rule):
      for name, draft, target in _laws():
        where = (
          f"rule {rule.name!r} on parents {tree.parents}, siblings "
          f"{siblings.name!r}, laws {name!r}"
        )
        law = block_law(rule, tree, draft, target, siblings=siblings)
        _check_outcome(law, where)
        cases += 1
        largest = max(largest, law.total_variation)
        reported = law.reported_total_variation
        reports |= reported is not None
        off = []
        if rule.lossless:
          expected = target_block_law(target, length=tree.max_depth + 1)
          off.append(
            (
              "is not lossless: the law of its output is",
              float(np.abs(law.output - expected).max()),
            )
          )
        if reported is not None:
          off.append(
            (
              f"reports a distance of {reported:.3g} from the target,",
              abs(reported - law.total_variation),
            )
          )
        for claim, distance in off:
          error = max(error, distance)
          if not distance <= _TOLERANCE:
            raise ValueError(f"{where} {claim} off by {distance:.3g}")
  if not cases:
    raise ValueError(
      f"rule {rule.name!r} accepts none of the trees "
      f"{[t.parents for t in _TREES]} with siblings that can be enumerated: "
      "nothing was checked"
    )
  return RuleCheck(
    num_cases=cases, error=error, total_variation=largest, reports=reports
  )


def _forms(rule: Rule) -> Iterator[tuple[Tree, Siblings]]:
  """Trees and siblings that the rule accepts, each once."""
  for tree in _TREES:
    for siblings in siblings_lib.SIBLINGS.values():
      most = siblings.max_children or _VOCAB
      if siblings.with_noise or tree.max_children > most:
        continue
      try:
        rule.check(tree, siblings)
      except ValueError:
        continue
      yield tree, siblings


def _laws() -> Iterator[tuple[str, ContextLaw, ContextLaw]]:
  """Pairs of draft and target laws, with a name for each difficulty."""
  of_text = lambda text: np.random.default_rng([7, *text])

  def draw(text, other):
    law = of_text((*text, other)).dirichlet(np.ones(_VOCAB))
    return law / law.sum()

  def without(text, token, other):
    law = draw(text, other)
    law[(token + sum(text)) % _VOCAB] = 0
    return law / law.sum()

  def rare(text, other):
    law = draw(text, other) * [1, 1e-9, 1e-12]
    return law / law.sum()

  point = lambda text, other: np.eye(_VOCAB)[(3 * text[-1] + other) % _VOCAB]
  draft, target = (lambda text: draw(text, 0)), (lambda text: draw(text, 1))
  yield "random", draft, target
  yield "equal", target, target
  yield (
    "zeros", lambda text: without(text, 0, 0), lambda text: without(text, 1, 1)
  )  # fmt: skip
  yield "deterministic draft", lambda text: point(text, 0), target
  yield "deterministic target", draft, lambda text: point(text, 1)
  yield (
    "disjoint supports",
    lambda text: point(text, 0),
    lambda text: (1 - point(text, 0)) / (_VOCAB - 1),
  )
  yield "tiny masses", lambda text: rare(text, 0), target


def _check_outcome(law: BlockLaw, where: str) -> None:
  """Raises ValueError unless all outcomes together have probability 1."""
  emitted = [np.asarray(mass) for mass in law.emitted]
  if not all(np.isfinite(mass).all() for mass in emitted):
    raise ValueError(f"{where}: its laws are not finite")
  least = min(mass.min() for mass in emitted)
  total = sum(mass.sum() for mass in emitted)
  if least < -_TOLERANCE or abs(total - 1) > _TOLERANCE:
    raise ValueError(
      f"{where}: probabilities of a round's outcomes sum to {total:.6g}, and "
      f"the least is {least:.3g}"
    )
