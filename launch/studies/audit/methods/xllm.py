"""xLLM before its pull request 2175, by its description."""

from collections.abc import Iterator

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  paths,
  point,
  token_by_token,
)


def _one_subtracted(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """After a rejection the drafted token alone has its draft mass taken off."""
  left = lambda q, p, x: q - p * point(x, len(p))
  for weight, tokens in paths(draft, depth):
    yield from token_by_token(weight, tokens, draft, target, left)


METHODS = (
  Method(
    name="xLLM before PR 2175",
    source="github.com/xLLM-AI/xllm, pull request 2175 (its description)",
    finding="the residual takes off the drafted token's mass alone",
    rounds=_one_subtracted,
  ),
)
