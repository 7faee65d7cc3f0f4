"""xLLM before its pull request 2175, by its description."""

from collections.abc import Iterator

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  normal,
  paths,
  point,
  ratio,
)


def _one_subtracted(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """After a rejection the drafted token alone has its draft mass taken off."""
  for path_weight, tokens in paths(draft, depth):
    weight = path_weight
    for i, x in enumerate(tokens):
      q, p = target(tokens[:i]), draft(tokens[:i])
      accept = ratio(q[x], p[x])
      yield weight * (1 - accept), tokens[:i], normal(q - p * point(x, len(p)))
      weight *= accept
    yield weight, tokens, target(tokens)


METHODS = (
  Method(
    name="xLLM before PR 2175",
    source="github.com/xLLM-AI/xllm, pull request 2175 (its description)",
    finding="the residual takes off the drafted token's mass alone",
    rounds=_one_subtracted,
  ),
)
