"""SpecDec's drafter: a whole block at once, by a decoder that is not causal.

Xia et al. (Findings of EMNLP 2023): a decoder of an encoder-decoder is fed the
text so far and k mask tokens after it, all of which see each other, and says a
law at every mask. It keeps no cache of its own text: every round reads all of
it again, in one pass. Only what its cross-attention sees of the input is kept.

The laws are marginals: that of the second token does not know the first. Drawn
from (`iid`), they are a draft like any other, lossless under `token` or
`block`. As certain tokens (`given`, each the likeliest of its law) they are the
paper's block, which `top_beta` verifies: lossless with beta = 1, where it is
greedy decoding, and lossy by design beyond.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax import siblings as siblings_lib
from specjax.drafters.shared import marginals
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Drafter

# `(params, tokens i32[B, L], length i32[B], memory) -> f32[B, k, V]`: logits of
# the k tokens after the first `length` ones.
Blocks = Callable[[Any, Array, Array, Any], Array]


def drafter(
  blocks: Blocks,
  encode: Callable[[Any, Any], Any],
  *,
  num_masks: int,
  tree: Tree,
  siblings: Siblings | str = IID,
  vocab_size: int,
  name: str = "block",
) -> Drafter:
  """Drafts with a network whose parameters are `Params.draft`.

  Args:
    blocks: its decoder; of tokens from `length` on it sees none.
    encode: its encoder, as that of `specjax.types.LanguageModel`.
    num_masks: k, tokens it says at once.
    tree: what every proposal fills; not deeper than k.
    siblings: how the children of a node are drawn, or the name of it in
      `specjax.siblings`. GIVEN: they are not drawn, but certain; child r of a
      node is the token of rank r in the law of its depth.
    vocab_size: V, the number of real tokens.
    name: for messages and reports.

  Returns:
    The `Drafter`; its state is what the encoder made of the inputs. Each round
    has one pass, over the text and k tokens more (`Drafter.tokens_of_passes`).

  Raises:
    ValueError: if the tree does not suit the block, the siblings or the
      vocabulary.
  """
  siblings = siblings_lib.get(siblings)
  marginals.check(name, num_masks, tree, siblings, vocab_size)

  def init(params, batch, slots, inputs):
    del batch, slots
    if inputs is None:
      raise ValueError(f"{name} reads inputs, as encoder-decoders do, got none")
    return encode(params.draft, inputs)

  def propose(params, memory, target_cache, context):
    # What is stale is nobody's, whatever it says.
    place = jnp.arange(context.tokens.shape[1])
    tokens = jnp.where(
      place < context.length[:, None], context.tokens, context.root
    )
    logits = blocks(params.draft, tokens, context.length, memory)
    draft = marginals.draft(
      logits, context, tree=tree, siblings=siblings, vocab_size=vocab_size
    )  # fmt: skip
    return draft, memory, target_cache

  return Drafter(
    name=name,
    tree=tree,
    siblings=siblings,
    init=init,
    propose=propose,
    row_axes=lambda memory: jax.tree.map(lambda x: 0, memory),
    passes=(num_masks,),
    reads_text=True,
  )
