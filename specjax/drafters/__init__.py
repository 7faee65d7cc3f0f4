"""Ways to propose a token tree, one file a family.

`model.drafter`, `heads.drafter`, `eagle.drafter`, `eagle.dynamic`,
`layer_skip.drafter`, `ngram.drafter`, `suffix.drafter`, `lookahead.drafter` and
`rasd.drafter` return a `specjax.types.Drafter`; `plain.drafter` proposes
nothing, which makes the decoding loop plain autoregressive sampling. What those
that draw trees share is in `levels`, what those that look continuations up
share is in `occurrences`, `corpus` and `tries`.
"""

from specjax.drafters import (
  corpus,
  eagle,
  heads,
  layer_skip,
  lookahead,
  model,
  ngram,
  plain,
  rasd,
  suffix,
)

__all__ = [
  "corpus",
  "eagle",
  "heads",
  "layer_skip",
  "lookahead",
  "model",
  "ngram",
  "plain",
  "rasd",
  "suffix",
]
