"""DFlash 2: a block whose tokens are picked from a few candidates, in turn.

DFlash 2 (z-lab and Inco, 2026) keeps the tokens of largest logits (16 of them)
at every position of a block, and rescores them given the token before. That is
a Markov chain like DSpark's, with no mass outside the candidates. These are
known before a token is drawn, so drafts are lossless under every rule that
suits the tree. Once no candidates are left, siblings drawn without replacement
are other tokens.
"""

from specjax.drafters.families import dspark
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import BlockModel, Drafter


def dflash2(
  head: BlockModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  vocab_size: int | None = None,
) -> Drafter:
  """A block whose tokens rescore the next one's candidates (DFlash 2, 2026).

  Args:
    head: the head, with a `MarkovModel`; its parameters are `Params.draft`.
    tokens, tree, siblings, vocab_size: as in `specjax.drafters.dspark`.

  Returns:
    The `Drafter`, as from `specjax.drafters.dspark`.

  Raises:
    ValueError, TypeError: as in `specjax.drafters.dspark`.
  """
  return dspark.of_markov(
    "dflash2", head, tokens=tokens, tree=tree, siblings=siblings, threshold=0,
    vocab_size=vocab_size,
  )  # fmt: skip
