"""Drafters: functions that return a `specjax.types.Drafter`.

They have the same names on the command line: `eagle3(head, tokens=7)` is
`--config.drafter='eagle3("DIR", tokens=7)'` with a model instead of a path.
`plain` drafts nothing: plain autoregressive sampling. `online` gives another
drafter a memory to learn from; `repeats` adds look-ups where text repeats.

`families/` has one file for each (`specjax.drafters.eagle` is the function, not
the file), `shared/` what they have in common; `specjax.adaptive` ends chains
early.
"""

from specjax.drafters.families.assistant import assistant
from specjax.drafters.families.dflash import dflash
from specjax.drafters.families.dflash2 import dflash2
from specjax.drafters.families.dspark import dspark
from specjax.drafters.families.eagle import eagle, eagle3, p_eagle
from specjax.drafters.families.layer_skip import layer_skip, quantized_self
from specjax.drafters.families.lookahead import lookahead
from specjax.drafters.families.medusa import medusa
from specjax.drafters.families.model import model
from specjax.drafters.families.mtp import mtp
from specjax.drafters.families.ngram import ngram
from specjax.drafters.families.online import online
from specjax.drafters.families.plain import plain
from specjax.drafters.families.rasd import rasd
from specjax.drafters.families.repeats import repeats
from specjax.drafters.families.specdec import specdec
from specjax.drafters.families.suffix import rest, suffix

__all__ = [
  "assistant", "dflash", "dflash2", "dspark", "eagle", "eagle3", "layer_skip",
  "lookahead", "medusa", "model", "mtp", "ngram", "online", "p_eagle", "plain",
  "quantized_self", "rasd", "repeats", "rest", "specdec", "suffix",
]  # fmt: skip
