"""Ways to propose a token tree, one file a family.

Each has a `drafter(...)` that returns a `specjax.types.Drafter` (`eagle` and
`assistant` have `dynamic` too); that of `plain` proposes nothing, which makes
the decoding loop plain autoregressive sampling. `online` gives another one a
memory to learn from, `repeats` reads on where a text repeats itself. What
several share is in `shared/`; what ends chains early, in `specjax.adaptive`.
"""

from specjax.drafters import (
  assistant,
  dflash,
  eagle,
  layer_skip,
  lookahead,
  medusa,
  model,
  ngram,
  online,
  plain,
  quantised_self,
  rasd,
  repeats,
  specdec,
  suffix,
)

__all__ = [
  "assistant",
  "dflash",
  "eagle",
  "layer_skip",
  "lookahead",
  "medusa",
  "model",
  "ngram",
  "online",
  "plain",
  "quantised_self",
  "rasd",
  "repeats",
  "specdec",
  "suffix",
]
