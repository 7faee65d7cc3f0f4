"""Theory of speculative decoding, which predicts the decoder's measurements.

From Yin et al. (NeurIPS 2024): `rejections` (Theorems 1 to 3 and the limit) and
`tradeoff` (Theorems 4 and 5). `throughput` predicts tokens per second,
`stopping` how deep to draft, `experts` the cost of verification on a mixture of
experts. `optimum` is the best possible verification of several drafts at one
position, `joint` that of a whole draft. `markov` has chains on which all of it
can be computed.
"""

from specjax.theory import (
  experts,
  joint,
  markov,
  optimum,
  rejections,
  stopping,
  throughput,
  tradeoff,
)

__all__ = [
  "experts", "joint", "markov", "optimum", "rejections", "stopping",
  "throughput", "tradeoff",
]  # fmt: skip
