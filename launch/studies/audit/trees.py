"""Trees of two children: EAGLE's and Medusa's releases, and two pitfalls."""

import functools
from collections.abc import Iterator

import numpy as np

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  in_turn,
  most_likely,
  normal,
  of_rule,
  point,
  ratio,
  tempered,
)
from specjax import rules
from specjax.siblings import TOP_K
from specjax.tree import chain

_EAGLE = "github.com/SafeAILab/EAGLE"
_MEDUSA = "github.com/FasterDecoding/Medusa, medusa/model/utils.py at 2b89814"


def _eagle1(
  draft: Law, target: Law, depth: int, *, temperature: float, stale: bool
) -> Iterator[Entry]:
  """Two children without replacement, tested in turn.

  The release before the mend also skips token 0, and tests a child once for
  every path through it; neither is in here.

  Args:
    draft, target: raw laws.
    depth: 1; a node and its children.
    temperature: of draft and tests. The token after an accepted child comes
      from the target's raw law,
    stale: or, if the elder was rejected, from what was left at the parent.
  """
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


def _certain(
  draft: Law,
  target: Law,
  depth: int,
  *,
  temperature: float = 1.0,
  said: bool = False,
) -> Iterator[Entry]:
  """The two likeliest children, tested in turn.

  Args:
    draft, target: raw laws.
    depth: 1; a node and its children.
    temperature: of the tests; the token after an accepted child comes from the
      target's raw law.
    said: whether they are tested as drawn from the draft's law, not as certain.
  """
  p, left = draft(()), tempered(temperature)(target)(())
  weight = 1.0
  for x in np.argsort(-p, kind="stable")[:2].tolist():
    law = p if said else point(x, len(p))
    accept = ratio(left[x], law[x])
    yield weight * accept, (x,), target((x,))
    weight, left = weight * (1 - accept), normal(left - law)
  yield weight, (), left


def _reranked(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """Two draws, of which the likelier is kept and tested as the only one."""
  p = draft(())
  for x, y in np.ndindex(len(p), len(p)):
    kept = x if p[x] >= p[y] else y
    yield from in_turn(p[x] * p[y], (kept,), draft, target)


def nucleus(law: Law, top_p: float = 0.8) -> Law:
  """The likeliest tokens until their mass exceeds top-p."""

  def cut(text) -> np.ndarray:
    q = law(text)
    order = np.argsort(-q, kind="stable")
    before = np.cumsum(q[order]) - q[order]
    kept = np.zeros(len(q))
    kept[order[before <= top_p]] = 1
    return normal(q * kept)

  return cut


def _longest(rows, accept) -> Iterator[tuple[float, tuple[int, ...]]]:
  """The longest accepted prefix of several paths, of equals the first.

  Every path has coins of its own, at tokens that it shares with others too.

  Args:
    rows: paths of equal length.
    accept: `(text, token) -> probability`.

  Yields:
    Probability and accepted tokens.
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


def _children(draft: Law, text: tuple[int, ...]) -> list[tuple[int, ...]]:
  """The texts with either of the two likeliest next tokens."""
  best = np.argsort(-draft(text), kind="stable")[:2]
  return [(*text, int(x)) for x in best]


def _medusa_nucleus(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """A draw of its own for every path and token; after a miss one anew."""
  q, rows = nucleus(target), [()]
  for _ in range(depth):
    rows = [child for row in rows for child in _children(draft, row)]
  for mass, tokens in _longest(rows, lambda text, x: q(text)[x]):
    yield mass, tokens, q(tokens)


def _beams(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """The two paths of a beam search, each tested as drawn from the draft."""
  rows = [()]
  value = lambda row: np.prod([draft(row[:i])[x] for i, x in enumerate(row)])
  for _ in range(depth):
    longer = [child for row in rows for child in _children(draft, row)]
    rows = sorted(longer, key=value, reverse=True)[:2]
  test = lambda text, x: ratio(target(text)[x], draft(text)[x])
  for mass, tokens in _longest(rows, test):
    left = normal(target(tokens) - draft(tokens))
    yield mass, tokens, target(tokens) if len(tokens) == depth else left


def _medusa_typical(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """The greedy path while it is typical, and then the likeliest token."""
  tokens, kept = most_likely(draft, depth), 0
  for i, x in enumerate(tokens):
    q = target(tokens[:i])
    entropy = -(q * np.log(q + 1e-5)).sum()
    if not q[x] > min(0.09, 0.3 * np.exp(-entropy)):
      break
    kept = i + 1
  after = target(tokens[:kept])
  yield 1.0, tokens[:kept], point(int(np.argmax(after)), len(after))


def _eagle(name, where, finding, rounds, temperature=1.0) -> Method:
  return Method(
    name=f"{name}, T = {temperature:g}",
    source=f"{_EAGLE}, {where}",
    finding=finding,
    depth=1,
    rounds=functools.partial(rounds, temperature=temperature),
    warp=tempered(temperature),
  )


_MENDED = functools.partial(_eagle1, stale=False)
_BONUS = "the token after the last accepted one is drawn before the warp"

METHODS = (
  _eagle(
    "EAGLE-1, before the mend",
    "model/utils.py at 38d5327",
    "the token after a second child comes from the parent's residual",
    functools.partial(_eagle1, stale=True),
  ),
  _eagle(
    "EAGLE-1, mended", "eagle/model/utils.py at 08dc06c", "as RSD", _MENDED
  ),
  _eagle(
    "EAGLE-1, mended", "eagle/model/utils.py at 08dc06c", _BONUS, _MENDED, 0.5
  ),
  _eagle(
    "EAGLE-2",
    "eagle/model/utils.py at 8009b6d",
    "certain children, tested as such",
    _certain,
  ),
  _eagle("EAGLE-2", "eagle/model/utils.py at 8009b6d", _BONUS, _certain, 0.5),
  Method(
    name="Sampled tests on a top-k tree",
    source="a construction: SpecInfer's test, arXiv 2305.09781, on EAGLE-2's "
    "children, arXiv 2406.16858",
    claim="none",
    finding="certain children tested as drawn from the softmax",
    depth=1,
    rounds=functools.partial(_certain, said=True),
  ),
  Method(
    name="A sampled tree, reranked",
    source="a construction: EAGLE-2's reranking, arXiv 2406.16858, of drawn "
    "tokens",
    claim="none",
    finding="the likelier of two draws, tested as if it were one",
    depth=1,
    rounds=_reranked,
  ),
  Method(
    name="Recurrent drafter",
    source="github.com/apple/ml-recurrent-drafter, "
    "recurrent_drafting/recurrent_drafting.py at d4f4a72; issue 6",
    finding="the paths of a beam search, each tested as drawn, and the longest "
    "kept",
    rounds=_beams,
  ),
  Method(
    name="Medusa, nucleus",
    source=_MEDUSA,
    claim="samples at top-p",
    finding="every path has draws of its own, and after a miss there is "
    "another",
    rounds=_medusa_nucleus,
    warp=nucleus,
  ),
  Method(
    name="Medusa, typical acceptance",
    source="arXiv 2401.10774",
    claim="typical, not lossless",
    finding="a path is kept while it is typical; then the target's law",
    rounds=of_rule(rules.get("typical"), chain, TOP_K),
  ),
  Method(
    name="Medusa, typical acceptance, release",
    source=f"{_MEDUSA} (fast)",
    claim="typical, not lossless",
    finding="the same, and then the likeliest token",
    rounds=_medusa_typical,
  ),
)
