"""Ways to propose a token tree, one file a family.

`model.drafter`, `heads.drafter`, `eagle.drafter`, `eagle.dynamic`,
`parallel.drafter`, `ngram.drafter` and `layer_skip.drafter` return a
`specjax.types.Drafter`; `plain.drafter` proposes nothing, which makes the
decoding loop plain autoregressive sampling. What they share is in `levels`
(trees that are drawn), `best_first` (the likeliest ones) and `marginals`.
"""

from specjax.drafters import (
  eagle,
  heads,
  layer_skip,
  model,
  ngram,
  parallel,
  plain,
)

__all__ = [
  "eagle",
  "heads",
  "layer_skip",
  "model",
  "ngram",
  "parallel",
  "plain",
]
