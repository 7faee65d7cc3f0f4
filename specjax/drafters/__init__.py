"""Ways to propose a token tree, one file a family.

`model.drafter`, `heads.drafter`, `eagle.drafter`, `eagle.dynamic`,
`ngram.drafter` and `layer_skip.drafter` return a `specjax.types.Drafter`;
`plain.drafter` proposes nothing, which makes the decoding loop plain
autoregressive sampling. `online.drafter` gives any of them a memory to learn
from, `exits.drafter` ends a chain where its draft is in doubt. What those that
draw trees share is in `levels`.
"""

from specjax.drafters import (
  eagle,
  exits,
  heads,
  layer_skip,
  model,
  ngram,
  online,
  plain,
)

__all__ = [
  "eagle",
  "exits",
  "heads",
  "layer_skip",
  "model",
  "ngram",
  "online",
  "plain",
]
