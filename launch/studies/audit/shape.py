"""The interface of audited methods: laws in, the exact law of a round out.

A method is a function of the raw laws of draft and target that enumerates its
drafts and coins: it yields what a round may accept, with its probability and
the law of the next token. The distance from the target is computed in one
place for all. Rules of the library are summed by `specjax.exact.block_law`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from specjax import exact
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Rule

# `(tokens after the root) -> f64[V]`, probabilities.
Law = Callable[[tuple[int, ...]], np.ndarray]
# Probability, the accepted tokens, and the law of the token after them.
Entry = tuple[float, tuple[int, ...], np.ndarray]
# Given the raw laws of draft and target, and how deep drafts go.
Rounds = Callable[[Law, Law, int], Iterator[Entry]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instance:
  """Laws of a draft and a target over V tokens, before any warp."""

  name: str
  draft: Law
  target: Law


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """A published method.

  Attributes:
    name: the method's name, and which of its forms.
    source: paper, or repository, path and commit or version.
    claim: "lossless", or another claim.
    finding: what it does, in one sentence.
    depth: G, the drafted tokens of a path, in the table.
    rounds: `(draft, target, depth) -> entries`, given the raw laws.
    warp: `target -> target`, the law of plain sampling.
  """

  name: str
  source: str
  finding: str
  rounds: Rounds
  claim: str = "lossless"
  depth: int = 2
  warp: Callable[[Law], Law] = lambda law: law


class Outcome(NamedTuple):
  """A method on an instance.

  Attributes:
    distance: total variation from the warped target of the joint law of the
      next G + 1 tokens, where those after the round are from the warped target.
    tokens: expected tokens of a round.
  """

  distance: float
  tokens: float


def outcome(
  method: Method, instance: Instance, depth: int | None = None
) -> Outcome:
  """Sums a method's rounds."""
  depth = depth or method.depth
  target, size = method.warp(instance.target), len(instance.target(()))
  shape = lambda tokens: (size,) * tokens
  emitted = [np.zeros(shape(g + 1)) for g in range(depth + 1)]
  for mass, tokens, law in method.rounds(
    instance.draft, instance.target, depth
  ):
    emitted[len(tokens)][tokens] += mass * law
  total = sum(mass.sum() for mass in emitted)
  if abs(total - 1) > 1e-9 or min(mass.min() for mass in emitted) < -1e-12:
    raise ValueError(f"{method.name} on {instance.name} sums to {total}")
  output, expected = np.ones(()), np.ones(())
  for g, mass in enumerate(emitted):
    laws = [target(t) for t in itertools.product(range(size), repeat=g)]
    laws = np.reshape(laws, shape(g + 1))
    output = output[..., None] * laws + mass if g else mass
    expected = expected[..., None] * laws
  return Outcome(
    distance=float(np.abs(output - expected).sum() / 2),
    tokens=float(sum((g + 1) * m.sum() for g, m in enumerate(emitted))),
  )


def of_rule(
  rule: Rule,
  make_tree: Callable[[int], Tree],
  siblings: Siblings = IID,
  draw: Callable[[Law], Law] = lambda law: law,
  warp: Callable[[Law], Law] = lambda law: law,
) -> Rounds:
  """A rule of the library, given the law of its drafts, `draw(draft)`."""

  def rounds(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
    after_root = lambda law: lambda text: law(text[1:])
    with jax.enable_x64(True):
      law = exact.block_law(
        rule,
        make_tree(depth),
        after_root(draw(draft)),
        after_root(warp(target)),
        siblings=siblings,
      )
    for mass in law.emitted:
      for tokens in np.ndindex(mass.shape[:-1]):
        if total := mass[tokens].sum():
          yield total, tokens, mass[tokens] / total

  return rounds


def tempered(temperature: float) -> Callable[[Law], Law]:
  """The warp to a temperature, as a map from law to law."""

  def warp(law: Law) -> Law:
    return lambda text: normal(law(text) ** (1 / temperature))

  return warp


def normal(mass: np.ndarray) -> np.ndarray:
  """Normalizes a mass; uniform if it is 0, as it is then never drawn from."""
  mass = np.maximum(mass, 0)
  total = mass.sum()
  return mass / total if total > 0 else np.full(len(mass), 1 / len(mass))


def ratio(wanted: float, offered: float) -> float:
  """`min(1, wanted / offered)`."""
  return 1.0 if wanted >= offered else max(wanted, 0) / offered


def paths(law: Law, depth: int) -> Iterator[tuple[float, tuple[int, ...]]]:
  """Every path of drafted tokens, with its probability."""
  for tokens in itertools.product(range(len(law(()))), repeat=depth):
    probs = [law(tokens[:i])[x] for i, x in enumerate(tokens)]
    if weight := float(np.prod(probs)):
      yield weight, tokens


def token_by_token(
  weight: float, tokens: tuple[int, ...], reported: Law, target: Law,
  residual: Callable = lambda q, p, x: q - p,
) -> Iterator[Entry]:  # fmt: skip
  """The standard test of a path, token by token."""
  for i, x in enumerate(tokens):
    q, p = target(tokens[:i]), reported(tokens[:i])
    accept = ratio(q[x], p[x])
    yield weight * (1 - accept), tokens[:i], normal(residual(q, p, x))
    weight *= accept
  yield weight, tokens, target(tokens)


def point(token: int, size: int) -> np.ndarray:
  """The law with all mass on one token, `f64[V]`."""
  return np.eye(size)[token]


def constant(law) -> Law:
  """The same law after any text."""
  return lambda text: np.asarray(law, float)


def _random(seed: int) -> Law:
  return lambda text: np.random.default_rng([seed, *text]).dirichlet(np.ones(3))


_EVEN, _SURE = constant((1 / 2, 1 / 2)), constant((1, 0))
_PAIRS = {
  "A": (constant((2 / 3, 1 / 3)), constant((1 / 3, 2 / 3))),
  "B": (_EVEN, lambda text: (_SURE if text else _EVEN)(text)),
  "C": (constant((0.5, 0.3, 0.2)), constant((0.2, 0.3, 0.5))),
  "R": (_random(7), _random(11)),
}
INSTANCES = tuple(
  Instance(name=name, draft=p, target=q) for name, (p, q) in _PAIRS.items()
)


def smallest(method: Method) -> dict | None:
  """The smallest counterexample among laws of small fractions.

  Neither law depends on the text, and both have full support. Searches by
  number of drafted tokens, then over two or three tokens, then by denominator,
  for the first that is off by 1e-9.

  Returns:
    `depth` G, `denominator`, the numerators `draft` and `target`, `distance`;
    None if there is none up to fifths.
  """
  sizes = itertools.product(range(1, method.depth + 1), (2, 3), range(2, 6))
  for depth, vocab, total in sizes:
    parts = itertools.product(range(1, total), repeat=vocab)
    numerators = [p for p in parts if sum(p) == total]
    for p, q in itertools.product(numerators, repeat=2):
      draft, target = (constant(np.array(k) / total) for k in (p, q))
      instance = Instance(name="small", draft=draft, target=target)
      distance = outcome(method, instance, depth).distance
      if distance > 1e-9:
        return dict(
          depth=depth, denominator=total, draft=list(p), target=list(q),
          distance=distance,
        )  # fmt: skip
  return None
