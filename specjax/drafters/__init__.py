"""Ways to propose a token tree, one file a family.

Each has a `drafter(...)` that returns a `specjax.types.Drafter` (`eagle` has
`dynamic` too); that of `plain` proposes nothing, which makes the decoding loop
plain autoregressive sampling. What they share is in `levels` (trees that are
drawn), `best_first` (the likeliest ones) and `marginals`.
"""

from specjax.drafters import (
  block,
  eagle,
  heads,
  layer_skip,
  model,
  ngram,
  parallel,
  plain,
)

__all__ = [
  "block",
  "eagle",
  "heads",
  "layer_skip",
  "model",
  "ngram",
  "parallel",
  "plain",
]
