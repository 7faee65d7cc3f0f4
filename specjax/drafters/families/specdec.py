"""SpecDec's drafter: a whole block at once, by a decoder that is not causal.

Xia et al. (Findings of EMNLP 2023): a decoder of an encoder-decoder is fed the
text so far and k mask tokens after it, all of which see each other, and says a
distribution at every mask. It keeps no cache of its own text: every round reads
all of it again, in one pass. Only what its cross-attention sees of the input is
kept.

The distributions are marginals: that of the second token does not know the
first. Drawn from (`iid`), they are a draft like any other, lossless under
`token` or `block`. As deterministic tokens (`given`, each the likeliest of its
distribution) they are the paper's block, which `top_beta` verifies: lossless
with beta = 1, where it is greedy decoding, and lossy by design beyond.
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
    tokens: drafted on each path; 5 by default.
    tree, siblings, vocab_size: as of `specjax.drafters.medusa`; the tree is not
      deeper than the block, nor dynamic.

  Returns:
    The `Drafter`; its state is what the encoder made of the inputs. Each round
    has one pass, over the text and a block more (`Drafter.tokens_of_passes`).

  Raises:
    ValueError, TypeError: as `specjax.drafters.medusa`.
  """
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or draft.vocab_size, deterministic=True
  )
  marginals.check("block", draft.num_depths, drawing)

  def init(params, batch, slots, inputs):
    del batch, slots
    if inputs is None:
      raise ValueError("block reads inputs, as encoder-decoders do, got none")
    return draft.encode(params.draft, inputs)

  def propose(params, memory, target_cache, context):
    # What is stale is nobody's, whatever it says.
    place = jnp.arange(context.tokens.shape[1])
    tokens = jnp.where(
      place < context.length[:, None], context.tokens, context.root
    )
    logits = draft.say(params.draft, tokens, context.length, memory)
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
