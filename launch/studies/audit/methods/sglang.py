"""SGLang's target-only tree: one coin a node, which reads no law of a draft."""

from collections.abc import Iterator

import numpy as np

from launch.studies.audit.shape import Entry, Law, Method, point


def _single_coin(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """One coin a node against the running sum of its children's target mass."""
  del depth  # a node, its two children
  first, second = np.argsort(-draft(()), kind="stable")[:2].tolist()
  q = target(())
  for x in (first, second):
    yield q[x], (x,), target((x,))
  rest = q * (1 - point(first, len(q)) - point(second, len(q)))
  if total := rest.sum():
    yield total, (), rest / total


METHODS = (
  Method(
    name="SGLang, target-only tree, thresholds 1",
    source="github.com/sgl-project/sglang, "
    "sgl-kernel/csrc/speculative/speculative_sampling.cuh at 120affb",
    finding="one coin a node draws among children and the rest",
    depth=1,
    rounds=_single_coin,
  ),
)
