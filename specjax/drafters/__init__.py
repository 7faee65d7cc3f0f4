"""Ways to propose a token tree, one file a family.

`model.drafter`, `heads.drafter`, `eagle.drafter`, `eagle.dynamic`,
`ngram.drafter` and `layer_skip.drafter` return a `specjax.types.Drafter`;
`plain.drafter` proposes nothing, which makes the decoding loop plain
autoregressive sampling. What those that draw trees share is in `levels`; how
deep a row drafts may be decided as it does (`depth`, and `adaptive`).
"""

from specjax.drafters import (
  adaptive,
  depth,
  eagle,
  heads,
  layer_skip,
  model,
  ngram,
  plain,
)

__all__ = [
  "adaptive",
  "depth",
  "eagle",
  "heads",
  "layer_skip",
  "model",
  "ngram",
  "plain",
]
