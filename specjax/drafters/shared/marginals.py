"""Drafts from marginals: one distribution per depth, independent of the path.

Heads that predict all depths at once (`medusa`, `dflash`) give one distribution
for each, so a node of a tree has the distribution of its depth, whatever its
ancestors are. There are three kinds of draft:

- Each token is drawn from its own distribution. The product is a draft like any
  other: lossless under every rule.
- A static deterministic tree: child r of a node is the token of rank r in the
  distribution of its depth (Medusa's Cartesian trees).
- The deterministic tree of the N likeliest paths of the product distribution,
  found anew in every round, or JetSpec's of whole families (`best_first`).

No token of a deterministic tree is drawn; `match` is the optimal rule for it.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters.shared import arguments, best_first, levels
from specjax.drafters.shared.arguments import Drawing
from specjax.siblings import GIVEN
from specjax.tree import Form, Tree
from specjax.types import Context, Draft


def check(name: str, num_depths: int, drawing: Drawing) -> None:
  """Raises ValueError if heads of K depths cannot fill the tree.

  Args:
    name: the drafter's, for messages.
    num_depths: K.
    drawing: what is drafted; for a `FREE` tree the best N nodes.
  """
  tree = drawing.tree
  if tree.form is Form.FREE:
    best_first.check(drawing, width=tree.num_drafted)
  arguments.check_depth(name, num_depths, tree)


def draft(logits: Array, context: Context, drawing: Drawing) -> Draft:
  """Makes a draft from the logits of each depth.

  Args:
    logits: `f32[B, K, V']`, for K >= G depths.
    context: the round's.
    drawing: as in `check`.
  """
  everywhere = lambda depth, tokens: _everywhere(logits, depth, tokens)
  if drawing.families:
    return best_first.draft_families(logits, context, drawing)
  if drawing.tree.form is Form.FREE:
    # At most N nodes of a depth can be among the best N.
    drafts, _ = best_first.draft_tree(
      logits[:, 0],
      lambda carry, depth, tokens, parents: (everywhere(depth, tokens), carry),
      None, context, drawing, width=drawing.tree.num_drafted,
    )  # fmt: skip
    return drafts
  if drawing.siblings is GIVEN:
    return _ranked(logits[..., : drawing.vocab_size], context, drawing.tree)
  drafts, _ = levels.draw_tree(
    logits[:, 0],
    lambda carry, depth, drawn: (everywhere(depth, drawn), carry),
    None, context, drawing,
  )  # fmt: skip
  return drafts


def _everywhere(logits: Array, depth: int, tokens: Array) -> Array:
  """`f32[B, W, V']`: the logits after a depth are the same at all its nodes."""
  here = logits[:, depth, None]
  return jnp.broadcast_to(here, (*tokens.shape, here.shape[-1]))


def _ranked(logits: Array, context: Context, tree: Tree) -> Draft:
  """The static tree of ranks."""
  logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
  _, ranked = jax.lax.top_k(logits[:, : tree.max_depth], tree.max_children)
  drafted = ranked[:, tree.depth[1:] - 1, tree.rank[1:]]
  tokens = jnp.concatenate([context.root, drafted], axis=1)
  return Draft(
    tree=tree, siblings=GIVEN, tokens=tokens.astype(jnp.int32), log_probs=None
  )
