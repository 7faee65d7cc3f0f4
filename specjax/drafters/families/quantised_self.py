"""The target drafts for itself with a copy of its weights in few bits.

QuantSpec (Tiwari et al., ICML 2025) drafts so, with weights and cache of four
bits. Here the cache is the target's own, as it is stored: it holds what the
target made of every committed token, drafted tokens go to the slots after them,
and verification writes those anew (`layer_skip`).
"""

from specjax.adaptive.policies import Policy
from specjax.drafters.families.layer_skip import on_targets_cache
from specjax.drafters.shared import arguments
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Drafter, LanguageModel


def quantised_self(
  low: LanguageModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
  longest: int | None = None,
) -> Drafter:
  """The target's weights in few bits, on its own cache (QuantSpec, 2025).

  Args:
    low: the target in few bits, whose parameters are `Params.draft`; it must
      take the target's cache.
    tokens, tree, siblings, policy, vocab_size, longest: as of
      `specjax.drafters.model`.

  Returns:
    A `Drafter` without state of its own but what a policy remembers.

  Raises:
    ValueError, TypeError: as `specjax.drafters.model`.
  """
  form = arguments.drawn(tokens, tree, siblings, policy)
  return on_targets_cache(
    "quantised_self", low, lambda params: params.draft, *form, policy,
    vocab_size, longest,
  )  # fmt: skip
