"""Recurrent drafter (Cheng et al., 2024), its release."""

from collections.abc import Iterator

import numpy as np

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  children,
  longest,
  normal,
  ratio,
)


def _beams(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """The two paths of a beam search, each tested as drawn from the draft."""
  rows = [()]
  value = lambda row: np.prod([draft(row[:i])[x] for i, x in enumerate(row)])
  for _ in range(depth):
    longer = [child for row in rows for child in children(draft, row)]
    rows = sorted(longer, key=value, reverse=True)[:2]
  test = lambda text, x: ratio(target(text)[x], draft(text)[x])
  for mass, tokens in longest(rows, test):
    left = normal(target(tokens) - draft(tokens))
    yield mass, tokens, target(tokens) if len(tokens) == depth else left


METHODS = (
  Method(
    name="Recurrent drafter",
    source="github.com/apple/ml-recurrent-drafter, "
    "recurrent_drafting/recurrent_drafting.py at d4f4a72; issue 6",
    finding="the paths of a beam search, each tested as drawn, and the longest "
    "kept",
    rounds=_beams,
  ),
)
