"""EAGLE: a layer that drafts from the target's features, then from its own.

At position i EAGLE (Li et al., ICML 2024) reads the target's feature of token i
and token i + 1, and predicts token i + 2 and a hidden state. Fed back with the
drawn token, in place of the target's next feature, that state drafts the next
token. EAGLE-2 (EMNLP 2024) grows the tree where the head is confident; EAGLE-3
(NeurIPS 2025) fuses features of several layers. Here all of them are a
`specjax.types.FeatureModel`.

A draft is either sampled over a static tree or deterministic: EAGLE-2's dynamic
tree keeps the N nodes with the largest cumulative probability (`best_first`).
None of its tokens is drawn, so its shape may depend on tokens; `match` is
optimal for it. Accepting its tokens with min(1, q/p) for the head's
distribution p would be lossy: they were not drawn from p.

P-EAGLE (2026) is an EAGLE-3 head with a learned vector for unknown features:
one pass over the newest pair and masks predicts every depth. The distributions
do not depend on each other's draws (`shared.marginals`).

Committed pairs of a feature and a token are fed to the head as soon as both are
known (`shared.committed`). Drafted pairs use the head's own states, and are
overwritten by committed ones.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.cache import Cache
from specjax.drafters.shared import (
  arguments,
  best_first,
  committed,
  levels,
  marginals,
)
from specjax.drafters.shared.arguments import Drawing
from specjax.drafters.shared.committed import HeadState
from specjax.shapes import Shape
from specjax.siblings import GIVEN, IID, Siblings
from specjax.tree import Form, Tree
from specjax.types import Context, Drafter, FeatureModel


def eagle(
  head: FeatureModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
) -> Drafter:
  """An EAGLE head, on static or dynamic trees (Li et al., ICML, EMNLP 2024).

  Args:
    head: the head, whose parameters are `Params.draft`.
    tokens: how many to draft on each path; 5 by default.
    tree: the tree of every draft; None for one path. A dynamic tree
      (`specjax.shapes.dynamic`) is EAGLE-2's: at every depth the `top_k` best
      nodes by cumulative probability get their `top_k` likeliest tokens, and
      the best overall are verified. The published code's `depth` is one less.
    siblings: how the children of a node are drawn, a `Siblings` or its name; a
      dynamic tree is deterministic.
    policy: a `specjax.adaptive.policies` policy that ends a row's chain early;
      None for whole chains.
    vocab_size: V, the number of real tokens; by default the head's.

  Returns:
    The `Drafter`. The target must return the features that the head reads.

  Raises:
    ValueError: if the tree drafts nothing, or does not fit siblings, policy or
      vocabulary.
    TypeError: if `tree` is not a tree, or `policy` not a `Policy`.
  """
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or head.vocab_size, policy, dynamic=True
  )
  return of_one_layer("eagle", head, drawing)


def eagle3(
  head: FeatureModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
) -> Drafter:
  """An EAGLE-3 head (Li et al., 2025).

  Arguments, result and errors are those of `eagle`.
  """
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or head.vocab_size, policy, dynamic=True
  )
  return of_one_layer("eagle3", head, drawing)


def p_eagle(
  head: FeatureModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  vocab_size: int | None = None,
) -> Drafter:
  """An EAGLE-3 head that predicts all depths in one pass (P-EAGLE, 2026).

  Args:
    head: the head, with a `mask`.
    tokens: how many to draft on each path; 5 by default.
    tree, siblings, vocab_size: as in `specjax.drafters.medusa`.

  Returns:
    The `Drafter`. The target must return the features that the head reads.

  Raises:
    ValueError, TypeError: as in `specjax.drafters.medusa`, and for a head
      without a mask.
  """
  if head.mask is None:
    raise ValueError("p_eagle needs a head with a mask")
  mask_of = head.mask
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or head.vocab_size, dynamic=True,
    deterministic=True,
  )  # fmt: skip
  depth = drawing.tree.max_depth
  marginals.check("p_eagle", depth, drawing)
  masks = depth - 1  # the newest pair predicts the first token

  def propose(params, state: HeadState, target_cache, context):
    if not masks:
      draft = marginals.draft(state.logits[:, None], context, drawing)
      return draft, state, target_cache
    rows = len(context.root)
    token, features = mask_of(params.draft)
    hidden = head.fuse(params.draft, features[None, None])
    rest, _, cache = head.apply(
      params.draft,
      jnp.full((rows, masks), token, context.root.dtype),
      jnp.broadcast_to(hidden, (rows, masks, hidden.shape[-1])),
      state.caches[0],
      positions=_place(context)[:, None] + 1 + np.arange(masks),
    )
    logits = jnp.concatenate([state.logits[:, None], rest], axis=1)
    draft = marginals.draft(logits, context, drawing)
    return draft, _with_cache(state, cache), target_cache

  return Drafter(
    name="p_eagle",
    tree=drawing.tree,
    siblings=drawing.siblings,
    propose=propose,
    passes=(depth + 1, *([masks] if masks else [])),
    **committed.fields((head,), more_slots=masks),
  )


def of_one_layer(name: str, model: FeatureModel, drawing: Drawing) -> Drafter:
  """A drafter around a head of one layer; see `eagle`."""
  tree = drawing.tree
  if tree.form is Form.FREE:
    return _dynamic(name, model, drawing)

  def begin(params, state: HeadState, target_cache, context):
    def first(carry, drafting):
      del drafting  # the head was fed everything committed
      return state.logits[:, None], carry

    def feed(carry, depth, drawn):
      hidden, cache = carry
      logits, hidden, cache = model.apply(
        params.draft,
        drawn,
        hidden[:, levels.parents(tree, depth)],
        cache,
        positions=levels.positions(_place(context), depth, drawn),
        mask=levels.mask(tree, depth, drawn),
      )
      return logits, (hidden, cache)

    def close(carry, fed):
      del fed
      return _with_cache(state, carry[1]), target_cache

    return chains.Passes(
      carry=(state.hidden[0][:, None], state.caches[0]),
      first=first, feed=feed, close=close,
    )  # fmt: skip

  return levels.drafter(
    begin, drawing, name=name, passes=(tree.max_depth + 1, *levels.fed(tree)),
    **committed.fields((model,)),
  )  # fmt: skip


def _dynamic(name: str, model: FeatureModel, drawing: Drawing) -> Drafter:
  """Drafts EAGLE-2's dynamic tree of deterministic tokens (its section 4)."""
  depth, top_k = drawing.tree.max_depth, drawing.tree.max_children
  best_first.check(drawing, width=top_k)

  def propose(params, state: HeadState, target_cache, context):
    def feed(carry, level, tokens, parents):
      hidden, seen, cache = carry
      parents = parents[..., None]
      hidden = jnp.take_along_axis(hidden, parents, axis=1)
      among_fed = jnp.broadcast_to(
        jnp.eye(tokens.shape[1], dtype=bool), (*tokens.shape, tokens.shape[1])
      )
      if seen is not None:  # ancestors among the nodes already fed
        among_fed = jnp.concatenate(
          [jnp.take_along_axis(seen, parents, axis=1), among_fed], axis=-1
        )
      logits, hidden, cache = model.apply(
        params.draft,
        tokens,
        hidden,
        cache,
        positions=levels.positions(_place(context), level, tokens),
        mask=among_fed,
      )
      return logits, (hidden, among_fed, cache)

    carry = state.hidden[0][:, None], None, state.caches[0]
    draft, (_, _, cache) = best_first.draft_tree(
      state.logits, feed, carry, context, drawing, width=top_k
    )
    return draft, _with_cache(state, cache), target_cache

  return Drafter(
    name=name,
    tree=drawing.tree,
    siblings=GIVEN,
    propose=propose,
    passes=(depth + 1, *(top_k,) * (depth - 1)),
    **committed.fields((model,), more_slots=top_k * (depth - 1)),
  )


def _with_cache(state: HeadState, cache: Cache) -> HeadState:
  """The state with the first layer's cache replaced."""
  return dataclasses.replace(state, caches=(cache, *state.caches[1:]))


def _place(context: Context) -> Array:
  """`i32[B]`, the position of the newest pair: that of its feature."""
  return jnp.maximum(context.length - 2, 0)
