"""The target drafts for itself with a copy of its weights in few bits.

QuantSpec (Tiwari et al., ICML 2025) drafts so, with weights and cache of four
bits. Here the cache is the target's own, as it is stored: it holds what the
target made of every committed token, drafted tokens go to the slots after them,
and verification writes those anew (`specjax.drafters.layer_skip`).
"""

import dataclasses

from specjax.adaptive.policies import Policy
from specjax.drafters import layer_skip
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Drafter, LanguageModel


def drafter(
  model: LanguageModel,
  *,
  tree: Tree,
  siblings: Siblings | str = IID,
  vocab_size: int,
  depth: Policy | None = None,
) -> Drafter:
  """Drafts with `Params.draft` on the target's cache.

  Args:
    model: the target in few bits; it must take the target's cache.
    tree, siblings, vocab_size, depth: as of `layer_skip.drafter`.

  Returns:
    A `Drafter` without state of its own but what a policy remembers.

  Raises:
    ValueError, TypeError: as `layer_skip.drafter`.
  """
  found = layer_skip.drafter(
    model,
    tree=tree,
    siblings=siblings,
    vocab_size=vocab_size,
    depth=depth,
    weights=lambda params: params.draft,
  )
  return dataclasses.replace(found, name="quantised_self")
