"""Published methods that draft several children or paths.

A node here has two children, the two most likely or two drawn ones.
"""

import functools
from collections.abc import Iterator

import numpy as np

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  normal,
  point,
  ratio,
  tempered,
)  # fmt: skip


def _two_most_likely(law: np.ndarray) -> list[int]:
  return np.argsort(-law, kind="stable")[:2].tolist()


def _children(draft: Law, rows: list[tuple]) -> list[tuple]:
  """The texts with either of the two most likely next tokens."""
  return [(*row, x) for row in rows for x in _two_most_likely(draft(row))]


def _longest(rows, accept) -> Iterator[tuple[float, tuple[int, ...]]]:
  """The longest accepted prefix of several paths; ties go to the first.

  Every path has its own coins, even at tokens that it shares with others.
  """
  each = []
  for row in rows:
    coins = [accept(row[:i], x) for i, x in enumerate(row)]
    each.append(
      [
        np.prod(coins[:k]) * (1 - coins[k] if k < len(row) else 1)
        for k in range(len(row) + 1)
      ]
    )
  for lengths in np.ndindex(*map(len, each)):
    best = int(np.argmax(lengths))
    mass = np.prod([each[row][k] for row, k in enumerate(lengths)])
    yield mass, rows[best][: lengths[best]]


def _eagle1(
  draft: Law, target: Law, depth: int, *, temperature: float, stale: bool
) -> Iterator[Entry]:
  """Two children without replacement, tested in turn.

  The release before the fix also skips token 0, and tests a child once for
  every path through it, which is not modeled here.
  """
  del depth
  warp = tempered(temperature)
  p, q = warp(draft)(()), warp(target)(())
  for x, y in np.ndindex(len(p), len(p)):
    untried = p * (1 - point(x, len(p)))
    if x == y or not untried[y]:
      continue
    untried = normal(untried)
    weight = p[x] * untried[y]
    accept = ratio(q[x], p[x])
    yield weight * accept, (x,), target((x,))
    weight, left = weight * (1 - accept), normal(q - p)
    accept = ratio(left[y], untried[y])
    yield weight * accept, (y,), left if stale else target((y,))
    yield weight * (1 - accept), (), normal(left - untried)


def _top_two(
  draft: Law, target: Law, depth: int, *, temperature=1.0, as_sampled=False
) -> Iterator[Entry]:
  """The two most likely children, tested in turn."""
  del depth
  p, left = draft(()), tempered(temperature)(target)(())
  weight = 1.0
  for x in _two_most_likely(p):
    law = p if as_sampled else point(x, len(p))
    accept = ratio(left[x], law[x])
    yield weight * accept, (x,), target((x,))
    weight, left = weight * (1 - accept), normal(left - law)
  yield weight, (), left


def _beams(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """The two paths of a beam search, each tested as drawn from the draft."""
  rows: list[tuple] = [()]
  value = lambda row: np.prod([draft(row[:i])[x] for i, x in enumerate(row)])
  for _ in range(depth):
    rows = sorted(_children(draft, rows), key=value, reverse=True)[:2]
  test = lambda text, x: ratio(target(text)[x], draft(text)[x])
  for mass, tokens in _longest(rows, test):
    residual = normal(target(tokens) - draft(tokens))
    yield mass, tokens, target(tokens) if len(tokens) == depth else residual


def nucleus(law: Law, top_p: float = 0.8) -> Law:
  """The most likely tokens until their mass exceeds top-p."""

  def cut(text) -> np.ndarray:
    q = law(text)
    order = np.argsort(-q, kind="stable")
    before = np.cumsum(q[order]) - q[order]
    kept = np.zeros(len(q))
    kept[order[before <= top_p]] = 1
    return normal(q * kept)

  return cut


def _medusa_nucleus(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """Draws separately for every path and token, and again after a miss."""
  q, rows = nucleus(target), [()]
  for _ in range(depth):
    rows = _children(draft, rows)
  for mass, tokens in _longest(rows, lambda text, x: q(text)[x]):
    yield mass, tokens, q(tokens)


def _eagle(name, where, finding, rounds, temperature=1.0) -> Method:
  return Method(
    name=f"{name}, T = {temperature:g}",
    source=f"github.com/SafeAILab/EAGLE, {where}",
    finding=finding,
    depth=1,
    rounds=functools.partial(rounds, temperature=temperature),
    warp=tempered(temperature),
  )


_FIXED = functools.partial(_eagle1, stale=False)
_BONUS = "the token after the last accepted one is drawn before the warp"
_EAGLE1, _EAGLE2 = (
  f"eagle/model/utils.py at {commit}" for commit in ("08dc06c", "8009b6d")
)

METHODS = (
  _eagle(
    "EAGLE-1, before the fix",
    "model/utils.py at 38d5327",
    "the token after a second child comes from the parent's residual",
    functools.partial(_eagle1, stale=True),
  ),
  _eagle("EAGLE-1, fixed", _EAGLE1, "as RSD", _FIXED),
  _eagle("EAGLE-1, fixed", _EAGLE1, _BONUS, _FIXED, 0.5),
  _eagle(
    "EAGLE-2", _EAGLE2, "deterministic children, tested as such", _top_two
  ),
  _eagle("EAGLE-2", _EAGLE2, _BONUS, _top_two, 0.5),
  Method(
    name="Sampled tests on a top-k tree",
    source="a construction: SpecInfer's test, arXiv 2305.09781, on EAGLE-2's "
    "children, arXiv 2406.16858",
    claim="none",
    finding="deterministic children are tested as if sampled from the softmax",
    depth=1,
    rounds=functools.partial(_top_two, as_sampled=True),
  ),
  Method(
    name="Recurrent drafter",
    source="github.com/apple/ml-recurrent-drafter, "
    "recurrent_drafting/recurrent_drafting.py at d4f4a72; issue 6",
    finding="beam-search paths are tested as if sampled; the longest is kept",
    rounds=_beams,
  ),
  Method(
    name="Medusa, nucleus",
    source="github.com/FasterDecoding/Medusa, medusa/model/utils.py at 2b89814",
    claim="samples at top-p",
    finding="each path is tested with draws of its own, then one more is drawn",
    rounds=_medusa_nucleus,
    warp=nucleus,
  ),
)
