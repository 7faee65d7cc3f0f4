"""DFlash 2: a block in which each token selects the next of a few candidates.

DFlash 2 (z-lab and Inco, 2026) keeps, of every place of a block, the tokens of
largest logits (16 of them), and scores each again by the token before it. That
is a Markov chain, as DSpark's, whose distributions have no mass elsewhere: the
candidates are known before a token is drawn, so the draft is lossless under
every rule that suits its tree. Siblings without replacement beyond the
candidates are other tokens.
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
  """A block in which each token selects the next (DFlash 2, 2026).

  Args:
    head: the head, with a `MarkovModel`; its parameters are `Params.draft`.
    tokens, tree, siblings, vocab_size: as of `specjax.drafters.dspark`.

  Returns:
    The `Drafter`, as `specjax.drafters.dspark` returns it.

  Raises:
    ValueError, TypeError: as `specjax.drafters.dspark`.
  """
  return dspark.of_markov(
    "dflash2", head, tokens=tokens, tree=tree, siblings=siblings, threshold=0,
    vocab_size=vocab_size,
  )  # fmt: skip
