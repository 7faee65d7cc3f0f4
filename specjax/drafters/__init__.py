"""Ways to propose a token tree, one file a family.

`model.drafter`, `heads.drafter`, `block.drafter`, `eagle.drafter`,
`eagle.dynamic`, `ngram.drafter` and `layer_skip.drafter` return a
`specjax.types.Drafter`; `plain.drafter` proposes nothing, which makes the
decoding loop plain autoregressive sampling. What those that draw trees share is
in `levels`.
"""

from specjax.drafters import (
  block,
  eagle,
  heads,
  layer_skip,
  model,
  ngram,
  plain,
)

__all__ = ["block", "eagle", "heads", "layer_skip", "model", "ngram", "plain"]
