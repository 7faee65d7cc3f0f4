"""Speculative decoding in JAX: exact, batched, inside one `lax.while_loop`.

  decoder = specjax.make_decoder(target, drafter=drafter, rule="token")
  engine = specjax.Engine(decoder=decoder, params=params, max_new_tokens=64)
  completions = engine.complete(prompts)

Start with `types.py` for the interfaces and `decode.py` for the loop; `rules/`
verifies drafts, `drafters/` makes them.
"""

from specjax import (
  drafters,
  exact,
  rules,
  siblings,
  theory,
  tree,
  tree_search,
)
from specjax.cache import Cache
from specjax.decode import Decoder, make_decoder
from specjax.runtime.engine import Engine
from specjax.runtime.requests import Settings
from specjax.state import DecodeState, Origin, StopReason
from specjax.tree import Tree
from specjax.types import (
  Draft,
  Drafter,
  LanguageModel,
  ModelOutput,
  Params,
  Rule,
  Sampling,
  Verification,
)
from specjax.warp import make_sampling

__version__ = "0.1.0"

__all__ = [
  "Cache", "DecodeState", "Decoder", "Draft", "Drafter", "Engine",
  "LanguageModel", "ModelOutput", "Origin", "Params", "Rule", "Sampling",
  "Settings", "StopReason", "Tree", "Verification", "drafters", "exact",
  "make_decoder", "make_sampling", "rules", "siblings", "theory",
  "tree", "tree_search",
]  # fmt: skip
