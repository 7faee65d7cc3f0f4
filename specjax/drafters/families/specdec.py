"""SpecDec's drafter: a block in one pass of a bidirectional decoder.

Xia et al. (Findings of EMNLP 2023): the decoder of an encoder-decoder is fed
the text so far and k mask tokens, all of which see each other, and predicts a
distribution at every mask. It caches only cross-attention to the input; every
round feeds the text again, in one pass.

The distributions are marginals: the second token's does not depend on the
first. Tokens drawn from them (`iid`) are a draft like any other, lossless under
`token` or `block`. The paper's block is deterministic (`given`, the likeliest
token at each mask) and verified by `top_beta`: greedy decoding if beta = 1,
lossy by design above.
"""

import jax
import jax.numpy as jnp

from specjax.drafters.shared import arguments, marginals
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Drafter, TextBlockModel


def specdec(
  draft: TextBlockModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  vocab_size: int | None = None,
) -> Drafter:
  """A block in one pass, for encoder-decoders (SpecDec, Xia et al., 2023).

  Args:
    draft: the network, whose parameters are `Params.draft`.
    tokens: how many to draft on each path; 5 by default.
    tree, siblings, vocab_size: as in `specjax.drafters.medusa`; the tree must
      not be deeper than the block, nor dynamic.

  Returns:
    The `Drafter`; its state is the encoded input. Each round has one pass, over
    the text and a block (`Drafter.tokens_of_passes`).

  Raises:
    ValueError, TypeError: as in `specjax.drafters.medusa`.
  """
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or draft.vocab_size, deterministic=True
  )
  marginals.check("block", draft.num_depths, drawing)

  def init(params, batch, slots, inputs):
    del batch, slots
    if inputs is None:
      raise ValueError("specdec needs encoder inputs, got none")
    return draft.encode(params.draft, inputs)

  def propose(params, memory, target_cache, context):
    # Stale ids may be out of range; the network masks them anyway.
    place = jnp.arange(context.tokens.shape[1])
    tokens = jnp.where(
      place < context.length[:, None], context.tokens, context.root
    )
    logits = draft.predict(params.draft, tokens, context.length, memory)
    return marginals.draft(logits, context, drawing), memory, target_cache

  return Drafter(
    name="specdec",
    tree=drawing.tree,
    siblings=drawing.siblings,
    init=init,
    propose=propose,
    row_axes=lambda memory: jax.tree.map(lambda x: 0, memory),
    passes=(draft.num_depths,),
    reads_text=True,
    accepts_foreign_drafts=True,
  )
