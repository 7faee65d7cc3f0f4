"""Ways to propose a token tree, one file a family.

Each has a `drafter(...)` that returns a `specjax.types.Drafter` (`eagle` has
`dynamic` too); that of `plain` proposes nothing, which makes the decoding loop
plain autoregressive sampling. `online` gives another one a memory to learn
from, `adaptive` ends chains early, by a policy of `depth`, `repeats` reads on
where a text repeats itself. What they share is
in `levels` (trees that are drawn), `best_first` (the likeliest ones) and
`marginals`; in `occurrences`, `corpus` and `tries` what those share that look
continuations up.
"""

from specjax.drafters import (
  adaptive,
  block,
  corpus,
  depth,
  eagle,
  heads,
  layer_skip,
  lookahead,
  model,
  ngram,
  online,
  parallel,
  plain,
  rasd,
  repeats,
  suffix,
)

__all__ = [
  "adaptive",
  "block",
  "corpus",
  "depth",
  "eagle",
  "heads",
  "layer_skip",
  "lookahead",
  "model",
  "ngram",
  "online",
  "parallel",
  "plain",
  "rasd",
  "repeats",
  "suffix",
]
