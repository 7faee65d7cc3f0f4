"""No drafting: the empty tree, for plain autoregressive decoding."""

from specjax.siblings import IID
from specjax.tree import chain
from specjax.types import Draft, Drafter


def plain() -> Drafter:
  """Plain decoding: the tree is the root alone.

  Returns:
    A `Drafter` without state, for any rule.
  """
  tree = chain(0)

  def propose(params, state, target_cache, context):
    del params
    draft = Draft(tree=tree, siblings=IID, tokens=context.root, log_probs=None)
    return draft, state, target_cache

  return Drafter(name="plain", tree=tree, siblings=IID, propose=propose)
