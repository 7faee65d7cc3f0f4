"""HSD (Zhou et al., 2026): its text, and its release."""

import functools
from collections.abc import Iterator

import numpy as np

from launch.studies.audit.shape import Entry, Law, Method, normal, paths

_REPOSITORY = "github.com/ZhouYuxuanYX/Hierarchical-Speculative-Decoding"


def backwards(
  draft: Law, target: Law, depth: int, *, capped: bool
) -> Iterator[Entry]:
  """Hierarchical speculative decoding: a path is tested from its end.

  With `r_t` the product of target over draft along the first t tokens, the text
  (`capped`) caps it by its running maximum, `w_t = r_t / max(1, r_1, .., r_t)`,
  the weight of block verification; the release's last test has `r_G`.
  """
  for weight, tokens in paths(draft, depth):
    r, most = 1.0, 1.0
    passes, laws = [1.0], [normal(target(()) - draft(()))]
    for t, x in enumerate(tokens, start=1):
      r *= target(tokens[: t - 1])[x] / draft(tokens[: t - 1])[x]
      most = max(most, r)
      w, q = r / most, target(tokens[:t])
      if t == depth:
        passes.append(min(w if capped else r, 1.0))
        laws.append(q)
        continue
      gain = np.maximum(w * q - draft(tokens[:t]), 0)
      loss = gain.sum() + 1 - w
      passes.append(gain.sum() / loss if loss > 0 else 0.0)
      laws.append(normal(gain))
    for t in range(depth, -1, -1):
      yield weight * passes[t], tokens[:t], laws[t]
      weight *= 1 - passes[t]


METHODS = (
  Method(
    name="HSD, text",
    source="arXiv 2601.05724v1, Algorithm 2",
    finding="is block verification",
    rounds=functools.partial(backwards, capped=True),
  ),
  Method(
    name="HSD, release",
    source=f"{_REPOSITORY}, transformers/generation/utils.py at 747d259",
    finding="the whole draft passes with the ratio that is not capped",
    rounds=functools.partial(backwards, capped=False),
  ),
)
