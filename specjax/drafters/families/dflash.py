"""DFlash: a block drafted in one pass over mask tokens (block diffusion).

DFlash (Chen et al., 2026) feeds the newest token and one mask per following
token through a few layers. They attend to each other and to the target's
features of all earlier tokens, and predict a distribution at every mask. These
are marginals, independent of each other's draws, from which
`specjax.drafters.shared.marginals` makes drafts, drawn or deterministic.

The published method takes the likeliest token at each mask: a deterministic
chain, lossless under `match`.

Slot i of the head's cache holds keys and values for the feature of token i, fed
as soon as the token is committed. A block is written after them and never kept.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specjax.cache import Cache
from specjax.drafters.shared import arguments, marginals
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import BlockModel, Commit, Context, Draft, Drafter, Params


def dflash(
  head: BlockModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  vocab_size: int | None = None,
) -> Drafter:
  """A diffusion head that predicts a block in one pass (DFlash, 2026).

  Args:
    head: the head, whose parameters are `Params.draft`; one pass over a block,
      whatever the tree.
    tokens: how many to draft on each path; 5 by default.
    tree, siblings, vocab_size: as in `specjax.drafters.medusa`; the tree must
      not be deeper than the block.

  Returns:
    The `Drafter`; its state is the head's cache. The target must return the
    features that the head reads.

  Raises:
    ValueError, TypeError: as in `specjax.drafters.medusa`.
  """
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or head.vocab_size, dynamic=True,
    deterministic=True,
  )  # fmt: skip
  marginals.check("dflash", head.num_depths, drawing)
  return of_block(
    "dflash",
    head,
    lambda params, logits, context: marginals.draft(logits, context, drawing),
    tree=drawing.tree,
    siblings=drawing.siblings,
  )


def of_block(
  name: str,
  head: BlockModel,
  draft: Callable[[Params, Any, Context], Draft],
  *,
  tree: Tree,
  siblings: Siblings,
) -> Drafter:
  """A drafter around a head that predicts a block.

  Args:
    name: the drafter's name.
    head: the head.
    draft: makes a draft from the output of `BlockModel.predict`.
    tree, siblings: the draft's.
  """
  slots_more = head.num_depths + 1

  def init(params, batch, slots, inputs):
    del params, inputs
    return head.init_cache(batch, slots + slots_more)

  def read(params, cache: Cache, commit: Commit) -> Cache:
    features = commit.features(head.num_features)
    along = jnp.take_along_axis(features, commit.path[..., None], axis=1)
    cache = cache.replace(length=commit.start)
    cache = head.read(params.draft, along, cache)
    return cache.replace(length=commit.length - 1)

  def propose(params, cache, target_cache, context):
    cache = cache.replace(length=context.length - 1)
    block, cache = head.predict(params.draft, context.root, cache)
    return draft(params, block, context), cache, target_cache

  return Drafter(
    name=name,
    tree=tree,
    siblings=siblings,
    init=init,
    prefill=read,
    propose=propose,
    commit=read,
    passes=(slots_more,),
    max_positions=head.max_positions,
    accepts_foreign_drafts=True,
  )
