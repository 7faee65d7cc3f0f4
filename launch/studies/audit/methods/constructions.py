"""Two constructions: top-k children tested as drawn ones, and reranking."""

import functools
from collections.abc import Iterator

import numpy as np

from launch.studies.audit.methods.eagle import certain
from launch.studies.audit.shape import Entry, Law, Method, token_by_token


def _reranked(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """Two draws, of which the likelier is kept and tested as the only one."""
  p = draft(())
  for x, y in np.ndindex(len(p), len(p)):
    kept = x if p[x] >= p[y] else y
    yield from token_by_token(p[x] * p[y], (kept,), draft, target)


METHODS = (
  Method(
    name="Sampled tests on a top-k tree",
    source="a construction: SpecInfer's test, arXiv 2305.09781, on EAGLE-2's "
    "children, arXiv 2406.16858",
    claim="none",
    finding="certain children tested as drawn from the softmax",
    depth=1,
    rounds=functools.partial(certain, said=True),
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
)
