"""DFlash: a block drafted in one pass, of masks that all see each other.

DFlash (Chen et al., 2026) feeds the newest token and a mask for each token
after it through a few layers, which read the target's features of all tokens
before, and gives at every mask a distribution for the token that belongs there.
The distributions are of one pass, and none knows what is drawn from the others:
marginals, of which `specjax.drafters.shared.marginals` makes drafts, drawn or
deterministic.

What was published takes the likeliest token of each mask and lets the target
decide: a deterministic chain under `match`, which is lossless.

The head's cache holds what its layers read of the feature of token i in slot i.
Features are read as soon as their tokens are committed; a block is written
behind them and never kept.
"""

import jax.numpy as jnp

from specjax.cache import Cache
from specjax.drafters.shared import arguments, marginals
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import BlockModel, Commit, Drafter


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
    tokens: drafted on each path; 5 by default.
    tree, siblings, vocab_size: as of `specjax.drafters.medusa`; the tree is not
      deeper than the block.

  Returns:
    The `Drafter`, whose state is the head's cache. Its target has to give the
    features that the head reads.

  Raises:
    ValueError, TypeError: as `specjax.drafters.medusa`.
  """
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or head.vocab_size, dynamic=True,
    deterministic=True,
  )  # fmt: skip
  marginals.check("dflash", head.num_depths, drawing)

  def init(params, batch, slots, inputs):
    del params, inputs
    return head.init_cache(batch, slots + head.num_depths + 1)

  def read(params, cache: Cache, commit: Commit) -> Cache:
    features = commit.features(head.num_features)
    along = jnp.take_along_axis(features, commit.path[..., None], axis=1)
    cache = cache.replace(length=commit.start)
    cache = head.read(params.draft, along, cache)
    return cache.replace(length=commit.length - 1)

  def propose(params, cache, target_cache, context):
    cache = cache.replace(length=context.length - 1)
    logits, cache = head.say(params.draft, context.root, cache)
    return marginals.draft(logits, context, drawing), cache, target_cache

  return Drafter(
    name="dflash",
    tree=drawing.tree,
    siblings=drawing.siblings,
    init=init,
    prefill=read,
    propose=propose,
    commit=read,
    passes=(head.num_depths + 1,),
    max_positions=head.max_positions,
    accepts_foreign_drafts=True,
  )
