"""Ways to propose a token tree, one file a family.

`model.drafter`, `ngram.drafter` and `layer_skip.drafter` return a
`specjax.types.Drafter`; `plain.drafter` proposes nothing, which makes the
decoding loop plain autoregressive sampling.
"""

from specjax.drafters import layer_skip, model, ngram, plain

__all__ = ["layer_skip", "model", "ngram", "plain"]
