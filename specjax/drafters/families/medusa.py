"""Medusa: one head per depth on the target's features.

The heads read the target's feature of the token before the newest; head k
predicts the k-th token after the newest (Cai et al., ICML 2024). The
distributions are marginals, from which `specjax.drafters.shared.marginals`
makes drafts: drawn, for any rule, or deterministic, for `match`.
"""

import jax.numpy as jnp
from jax import Array

from specjax.drafters.shared import arguments, marginals
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Commit, Drafter, MarginalModel


def medusa(
  head: MarginalModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  vocab_size: int | None = None,
) -> Drafter:
  """Medusa heads, one per depth (Cai et al., ICML 2024).

  The features are those of the newest token fed to the target; after a prompt
  of one token there are none, and the first round reads zeros.

  Args:
    head: the heads, whose parameters are `Params.draft`.
    tokens: how many to draft on each path; 4 by default.
    tree: the tree of every draft, not deeper than the heads; None for one path.
      A dynamic tree (`specjax.shapes.dynamic`) gets the likeliest nodes of the
      product distribution.
    siblings: how the children of a node are drawn, a `Siblings` or its name.
      GIVEN is deterministic: child r of a node is the token of rank r in the
      distribution of its depth.
    vocab_size: V, the number of real tokens; by default the heads'.

  Returns:
    The `Drafter`; its state is `f[B, F]`.

  Raises:
    ValueError: if the tree does not fit heads, siblings or vocabulary.
    TypeError: if `tree` is not a tree.
  """
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or head.vocab_size, default=4,
    dynamic=True, deterministic=True,
  )  # fmt: skip
  marginals.check("medusa", head.num_depths, drawing)

  def read(params, features: Array, commit: Commit) -> Array:
    del params
    return commit.newest_features(features)

  def propose(params, features, target_cache, context):
    logits = head.apply(params.draft, features)
    return marginals.draft(logits, context, drawing), features, target_cache

  return Drafter(
    name="medusa",
    tree=drawing.tree,
    siblings=drawing.siblings,
    init=lambda params, batch, slots, inputs: jnp.zeros(
      (batch, head.num_features)
    ),
    prefill=read,
    propose=propose,
    commit=read,
    row_axes=lambda state: 0,
    passes=(1,),
    accepts_foreign_drafts=True,
  )
