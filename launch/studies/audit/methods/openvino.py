"""OpenVINO GenAI with a draft model."""

import math
from collections.abc import Iterator

from launch.studies.audit.shape import Entry, Law, Method, paths


def _openvino(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """A drafted token stays if `r <= p(x) / q(y)`, y drawn from the target.

  So it is from the second round on; in the first, tokens are matched.
  r is one of 0, 0.01, .., 1. After a rejection the token is drawn at the next
  position, as if the rejected one stood, and put in its place.
  """
  for path_weight, tokens in paths(draft, depth):
    weight = path_weight
    for i, x in enumerate(tokens):
      p, q = draft(tokens[:i])[x], target(tokens[:i])
      accept = sum(
        q_y * min(1.0, (math.floor(100 * p / q_y + 1e-9) + 1) / 101)
        for q_y in q[q > 0]
      )
      yield weight * (1 - accept), tokens[:i], target(tokens[: i + 1])
      weight *= accept
    yield weight, tokens, target(tokens)


METHODS = (
  Method(
    name="OpenVINO GenAI, draft model",
    source="github.com/openvinotoolkit/openvino.genai, "
    "src/cpp/src/sampling/sampler.cpp at 02400d9; issue 4190",
    finding="the ratio is of two tokens; the replacement is drawn one "
    "position late",
    rounds=_openvino,
  ),
)
