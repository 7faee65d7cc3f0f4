"""Medusa (Cai et al., 2024): typical acceptance, and its release."""

from collections.abc import Iterator

import numpy as np

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  children,
  longest,
  most_likely,
  normal,
  of_rule,
  point,
)
from specjax import rules
from specjax.siblings import TOP_K
from specjax.tree import chain

_MEDUSA = "github.com/FasterDecoding/Medusa, medusa/model/utils.py at 2b89814"


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


def _medusa_nucleus(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """A draw of its own for every path and token; after a miss one anew."""
  q, rows = nucleus(target), [()]
  for _ in range(depth):
    rows = [child for row in rows for child in children(draft, row)]
  for mass, tokens in longest(rows, lambda text, x: q(text)[x]):
    yield mass, tokens, q(tokens)


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


METHODS = (
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
