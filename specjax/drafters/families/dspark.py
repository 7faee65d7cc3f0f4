"""DSpark: DFlash's block, with tokens that depend on those before them.

DSpark (DeepSeek-AI, 2026) predicts a block in one pass; a small Markov head
then conditions each position's distribution on the token before it. A tree
needs one product per level and no further pass of the network, and every node
has the distribution of its own path, known before its token is drawn. Such
drafts are lossless under every rule that suits the tree.

The published head also estimates the probability that the next token will be
accepted. The estimate reads the tokens above that position, not the token drawn
there, so a path may end where it is low, even at temperatures above 0. Ending
it by the probability of the drawn token would be lossy.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.drafters.families import dflash
from specjax.drafters.shared import arguments, best_first, levels
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Form, Tree
from specjax.types import BlockModel, Drafter


def dspark(
  head: BlockModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  threshold: float = 0.0,
  vocab_size: int | None = None,
) -> Drafter:
  """A block whose tokens depend on those before them (DSpark, 2026).

  Args:
    head: the head, whose parameters are `Params.draft`; one pass over a block,
      whatever the tree.
    tokens: how many to draft on each path; 5 by default.
    tree, siblings, vocab_size: as in `specjax.drafters.eagle`; the tree must
      not be deeper than the block.
    threshold: in [0, 1]; a node gets children if the head estimates that one is
      accepted with at least this probability; at 0, always.

  Returns:
    The `Drafter`; its state is the head's cache. The target must return the
    features that the head reads.

  Raises:
    ValueError: as in `specjax.drafters.eagle`, and for a tree deeper than the
      block, a head without a `MarkovModel`, or a threshold on a dynamic tree.
    TypeError: if `tree` is not a tree.
  """
  return of_markov(
    "dspark", head, tokens=tokens, tree=tree, siblings=siblings,
    threshold=threshold, vocab_size=vocab_size,
  )  # fmt: skip


def of_markov(
  name: str,
  head: BlockModel,
  *,
  tokens: int | None,
  tree: Tree | Shape | None,
  siblings: Siblings | str,
  threshold: float,
  vocab_size: int | None,
) -> Drafter:
  """A drafter around a head with a `MarkovModel`; see `dspark`."""
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or head.vocab_size, dynamic=True
  )
  tree, markov = drawing.tree, head.markov
  dynamic = tree.form is Form.FREE
  if markov is None:
    raise ValueError(f"{name} needs a head with a MarkovModel")
  arguments.check_depth(name, head.num_depths, tree)
  if not 0 <= threshold <= 1:
    raise ValueError(f"threshold must be in [0, 1], got {threshold}")
  if threshold and not markov.estimates:
    raise ValueError("this head estimates no acceptance: leave out threshold")
  if dynamic:
    best_first.check(drawing, width=tree.max_children)
    if threshold:
      raise ValueError("a dynamic tree ranks its nodes: leave out threshold")

  def draft(params, block, context):
    def after(depth: int, tokens: Array, state: Array):
      """Logits, states and confidence after the nodes of a depth."""
      row = jax.tree.map(lambda x: x[:, depth, None], block)
      return markov.apply(params.draft, row, tokens, state)

    rows = len(context.root)
    nothing = jnp.zeros((rows, 1, markov.state_size))
    logits, state, sure = after(0, context.root, nothing)
    if dynamic:

      def feed_best(state, depth, tokens, parents):
        state = jnp.take_along_axis(state, parents[..., None], axis=1)
        logits, state, _ = after(depth, tokens, state)
        return logits, state

      drafts, _ = best_first.draft_tree(
        logits[:, 0], feed_best, state, context, drawing,
        width=tree.max_children,
      )  # fmt: skip
      return drafts

    def feed(carry, depth, tokens):
      state, known = carry
      state = state[:, levels.parents(tree, depth)]
      logits, state, sure = after(depth, tokens, state)
      return logits, (state, [*known, sure])

    drafts, (_, known) = levels.draw_tree(
      logits[:, 0], feed, (state, [sure]), context, drawing
    )
    if not threshold:
      return drafts
    return dataclasses.replace(
      drafts,
      tree=masked,
      parents=_sure_nodes(tree, jnp.concatenate(known, axis=1) >= threshold),
    )

  masked = dataclasses.replace(tree, form=Form.MASKED) if threshold else tree
  return dflash.of_block(
    name, head, draft, tree=masked, siblings=drawing.siblings
  )


def _sure_nodes(tree: Tree, continues: Array) -> Array:
  """Parents `i32[B, N]` of nodes whose ancestors all go on, -1 for the others.

  Args:
    tree: the whole tree.
    continues: `bool[B, M]`, for all nodes above the deepest level.
  """
  here = [jnp.ones(len(continues), bool)]
  for parent in tree.parents[1:]:
    here.append(here[parent] & continues[:, parent])
  return jnp.where(
    jnp.stack(here, axis=1), np.array(tree.parents, np.int32), -1
  )
