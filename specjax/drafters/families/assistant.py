"""Assistants: draft layers that attend to the target's cache.

An assistant (Gemma 4's) drafts from a pair: the newest token's embedding and
the target's final hidden state at the token before it. Its layers attend to the
target's cached keys and values, so it has no cache, needs no prefill, and has
nothing to roll back after a rejection. For drafted tokens the assistant's own
hidden state at the parent replaces the target's.

All queries of a round have the newest token's position and see the same slots,
those of the tokens before it. Drafted tokens are not cached; they reach later
queries through hidden states only. So a level of a tree is one pass, without a
mask.

Tokens are drawn from the warped distribution of the unmodified logits, and
verified with it. With ordered embeddings (`models.networks.gemma_assistant`)
the logits of most tokens share a floor, which has mass: verifying without it
would be lossy. Dynamic, deterministic trees need `match`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.cache import Cache
from specjax.drafters.shared import arguments, best_first, levels
from specjax.drafters.shared.arguments import Drawing
from specjax.shapes import Shape
from specjax.siblings import GIVEN, IID, Siblings
from specjax.tree import Form, Tree
from specjax.types import CacheReader, Commit, Context, Drafter


def assistant(
  head: CacheReader,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
) -> Drafter:
  """Gemma 4's assistant, which reads the target's cache (Google, 2026).

  Args:
    head: the assistant, whose parameters are `Params.draft`.
    tokens, tree, siblings, policy, vocab_size: as in `specjax.drafters.eagle`.

  Returns:
    The `Drafter`; its state is the hidden state at the token before the newest,
    `f[B, F]`. The target must return its final hidden state.

  Raises:
    ValueError, TypeError: as in `specjax.drafters.eagle`.
  """
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or head.vocab_size, policy, dynamic=True
  )
  form = drawing.tree
  if form.form is Form.FREE:
    return _dynamic(head, drawing)

  def begin(params, state, target_cache, context):
    query = _query_fn(head, params.draft, target_cache, context)

    def first(hidden, drafting):
      del drafting
      return query(context.root, hidden)

    def feed(hidden, depth, drawn):
      return query(drawn, hidden[:, levels.parents(form, depth)])

    return chains.Passes(
      carry=state[:, None],
      first=first,
      feed=feed,
      close=lambda hidden, fed: (state, target_cache),
    )

  return levels.drafter(
    begin, drawing, name="assistant", passes=(1, *levels.fed(form)),
    **_fields(head),
  )  # fmt: skip


def _dynamic(model: CacheReader, drawing: Drawing) -> Drafter:
  """Drafts EAGLE-2's dynamic tree (`shared.best_first`)."""
  depth, top_k = drawing.tree.max_depth, drawing.tree.max_children
  best_first.check(drawing, width=top_k)

  def propose(params, state, target_cache, context):
    query = _query_fn(model, params.draft, target_cache, context)
    logits, hidden = query(context.root, state[:, None])

    def feed(hidden, level, tokens, parents):
      del level
      above = jnp.take_along_axis(hidden, parents[..., None], axis=1)
      return query(tokens, above)

    draft, _ = best_first.draft_tree(
      logits[:, 0], feed, hidden, context, drawing, width=top_k
    )
    return draft, state, target_cache

  return Drafter(
    name="assistant",
    tree=drawing.tree,
    siblings=GIVEN,
    propose=propose,
    passes=(1, *(top_k,) * (depth - 1)),
    **_fields(model),
  )


def _query_fn(model: CacheReader, params, cache: Cache, context: Context):
  """`(tokens i32[B, W], hidden f[B, W, F]) -> (f32[B, W, V'], f[B, W, F])`.

  Every token queries the slots before the newest token, from its position.
  """
  newest = context.length - 1
  cache = cache.replace(length=newest)

  def query(tokens: Array, hidden: Array) -> tuple[Array, Array]:
    positions = jnp.broadcast_to(newest[:, None], tokens.shape)
    logits, after = model.apply(
      params, tokens, hidden, cache, positions=positions
    )
    return logits, after.astype(hidden.dtype)

  return query


def _fields(model: CacheReader) -> dict[str, Any]:
  """The fields that the `Drafter`s of all assistants share."""

  def init(params, batch, slots, inputs):
    del params, slots, inputs
    return jnp.zeros((batch, model.num_features))

  def read(params, state: Array, commit: Commit) -> Array:
    """The hidden state at the last token that the target was fed."""
    del params
    return commit.newest_features(state)

  return dict(
    init=init,
    prefill=read,
    commit=read,
    row_axes=lambda state: jax.tree.map(lambda x: 0, state),
    max_positions=model.max_positions,
    accepts_foreign_drafts=True,
  )
