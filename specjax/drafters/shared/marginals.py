"""Drafts from marginals: laws of each depth that know nothing of each other.

Heads that say all depths at once (`medusa`, `dflash`) give one law for each,
so a node of a tree has the law of its depth, whatever stands above it. That
makes a draft in three ways:

- Each token is drawn from its own law. The product is a draft like any other:
  lossless under every rule.
- A certain tree of static form: child r of a node is the token of rank r in the
  law of its depth (Medusa's Cartesian trees).
- The certain tree of the N likeliest paths of the product law, found anew in
  every round (`best_first`).

No token of a certain tree is drawn: `match` is the rule that fits, and the best
that there is for such a tree.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters.shared import best_first, levels
from specjax.drafters.shared.arguments import check_tree
from specjax.siblings import GIVEN, Siblings
from specjax.tree import Form, Tree
from specjax.types import Context, Draft


def check(
  name: str, num_depths: int, tree: Tree, siblings: Siblings, vocab_size: int
) -> None:
  """Raises ValueError if marginals of so many depths make no such draft.

  Args:
    name: of the drafter, for messages.
    num_depths: K, depths that have a law.
    tree: what every proposal fills; of one whose parents are data (`FREE`) the
      best N nodes.
    siblings: how the children of a node are drawn.
    vocab_size: V.
  """
  if tree.form is Form.FREE:
    best_first.check(
      num_nodes=tree.num_drafted, depth=tree.max_depth, width=tree.num_drafted,
      children=tree.max_children, vocab_size=vocab_size,
    )  # fmt: skip
  else:
    check_tree(tree, siblings, vocab_size, certain=True)
  if tree.max_depth > num_depths:
    raise ValueError(
      f"{name} says {num_depths} tokens ahead, got a tree of depth "
      f"{tree.max_depth}: draft no more than it says, as by "
      f"tokens={num_depths}"
    )


def draft(
  logits: Array,
  context: Context,
  *,
  tree: Tree,
  siblings: Siblings,
  vocab_size: int,
) -> Draft:
  """A draft of that form.

  Args:
    logits: `f32[B, K, V']`, of K >= G depths.
    context: the round's.
    tree, siblings: as `check` was given them.
    vocab_size: V, the number of real tokens.
  """
  if tree.form is Form.FREE:
    # No more than N nodes of a depth can be among the best N of all.
    drafts, _ = best_first.draft_tree(
      logits[:, 0],
      lambda carry, depth, tokens, parents: (
        _everywhere(logits, depth, tokens), carry
      ),
      None, context, tree=tree, width=tree.num_drafted,
      children=tree.max_children, vocab_size=vocab_size,
    )  # fmt: skip
    return drafts
  if siblings is GIVEN:
    return _ranked(logits[..., :vocab_size], context, tree)
  drafts, _ = levels.draw_tree(
    logits[:, 0],
    lambda carry, depth, drawn: (_everywhere(logits, depth, drawn), carry),
    None, context, tree=tree, siblings=siblings, vocab_size=vocab_size,
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
