"""A chain that ends where its draft is in doubt; how much, it learns.

Draft and Verify (Zhang et al., ACL 2024, section 4.1): a row stops drafting
after a token that its draft gave less than a threshold, and the threshold
follows what is accepted. The token that fell below is still verified: it was
drawn, and to drop it for its value would be lossy. So whether there is a next
token is decided by the tokens above it, before it is drawn, and every rule that
takes a chain of form `MASKED` stays lossless. The threshold itself is a
function of rounds that are over.

Passes of the draft that no row of the batch asks for are not made.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.cache import Cache
from specjax.drafters import levels
from specjax.drafters.levels import Feed
from specjax.structs import struct
from specjax.tree import Form
from specjax.types import Context, Draft, Drafter

# As `levels.draw_tree`.
Grow = Callable[..., tuple[Draft, Any]]


@struct
class ExitState:
  """What a drafter with exits remembers of a row.

  Attributes:
    inner: the state of the drafter without.
    threshold: `f32[B]`, least probability at which drafting goes on.
    matched: `f32[B]`, running mean of the share of drafted tokens that stood.
    drafted: `i32[B]`, tokens drafted in the round at hand.
  """

  inner: Any
  threshold: Array
  matched: Array
  drafted: Array


def drafter(
  make: Callable[..., Drafter],
  *,
  acceptance: float = 0.9,
  threshold: float = 0.6,
  step: float = 0.01,
  keep_matched: float = 0.5,
  keep_threshold: float = 0.9,
) -> Drafter:
  """Drafts with exits.

  With m the running mean of matched / drafted and h the threshold, after every
  round of a row

    m <- keep_matched m + (1 - keep_matched) matched / drafted
    h <- keep_threshold h + (1 - keep_threshold) t,

  where t is h + step if m < acceptance, else h if the chain was drafted whole,
  else h - step; h stays in [0, 1]. The paper begins a run with m = 0 and one
  threshold for all its prompts; here each row has its own, and begins anew with
  its prompt.

  Args:
    make: `(grow=...) -> Drafter`, of a chain, as `drafters.model.drafter` or
      `drafters.layer_skip.drafter` with all other arguments given
      (`functools.partial`).
    acceptance: the share of drafted tokens that is aimed at; alpha there.
    threshold: the first one, of the draft's law at temperature 1.
    step: epsilon there.
    keep_matched, keep_threshold: beta_1 and beta_2 there.

  Returns:
    The `Drafter`, whose tree is the chain with form `MASKED`.

  Raises:
    ValueError: for numbers out of range, or a tree that is no chain.
  """
  shares = {
    "acceptance": acceptance, "threshold": threshold, "step": step,
    "keep_matched": keep_matched, "keep_threshold": keep_threshold,
  }  # fmt: skip
  for name, value in shares.items():
    if not 0 <= value <= 1:
      raise ValueError(f"{name} must be in [0, 1], got {value}")
  whole = make(grow=levels.draw_tree)
  if not whole.tree.is_chain:
    raise ValueError(
      f"a draft with exits is a chain, got parents {whole.tree.parents}"
    )
  tree = dataclasses.replace(whole.tree, form=Form.MASKED)

  def init(params, batch, slots, inputs):
    return ExitState(
      inner=whole.init(params, batch, slots, inputs),
      threshold=jnp.full((batch,), threshold, jnp.float32),
      matched=jnp.zeros((batch,), jnp.float32),
      drafted=jnp.zeros((batch,), jnp.int32),
    )

  def propose(params, state: ExitState, target_cache: Cache, context: Context):
    def grow(root_logits, feed, carry, context, **static):
      return _grown(
        root_logits, feed, carry, context, state.threshold, **static
      )

    inner = make(grow=grow)
    draft, own, cache = inner.propose(
      params, state.inner, target_cache, context
    )
    assert draft.parents is not None
    there = jnp.sum(draft.parents >= 0, axis=1, dtype=jnp.int32)
    draft = dataclasses.replace(draft, tree=tree)
    state = dataclasses.replace(state, inner=own, drafted=there)
    return draft, state, cache

  def prefill(params, state: ExitState, commit):
    inner = whole.prefill(params, state.inner, commit)
    return dataclasses.replace(state, inner=inner)

  def commit(params, state: ExitState, commit):
    inner = whole.commit(params, state.inner, commit)
    share = (commit.count - 1) / jnp.maximum(state.drafted, 1)
    matched = keep_matched * state.matched + (1 - keep_matched) * share
    h = state.threshold
    down = jnp.where(state.drafted == tree.max_depth, h, h - step)
    moved = jnp.where(matched < acceptance, h + step, down)
    moved = keep_threshold * h + (1 - keep_threshold) * moved
    moved = jnp.clip(moved, 0, 1)
    counts = (commit.count > 0) & (state.drafted > 0)
    return dataclasses.replace(
      state,
      inner=inner,
      matched=jnp.where(counts, matched, state.matched),
      threshold=jnp.where(counts, moved, h),
    )

  def row_axes(state: ExitState):
    axes = jax.tree.map(lambda x: 0, state)
    return dataclasses.replace(axes, inner=whole.row_axes(state.inner))

  return dataclasses.replace(
    whole,
    name=f"{whole.name} with exits",
    tree=tree,
    init=init,
    propose=propose,
    prefill=prefill,
    commit=commit,
    row_axes=row_axes,
  )


def _grown(
  root_logits: Array,
  feed: Feed,
  carry: Any,
  context: Context,
  threshold: Array,
  **static,
) -> tuple[Draft, Any]:
  """`levels.draw_tree` of a chain; `parents` say where each row ended."""
  vocab_size = static["vocab_size"]
  going = [context.max_depth >= 1]  # by depth: whether there is such a node

  def on(carry, depth, drawn):
    own, logits, goes_on = carry
    law = jax.nn.log_softmax(logits[..., :vocab_size].astype(jnp.float32))
    sure = jnp.take_along_axis(law, drawn, axis=-1)[:, 0]
    goes_on &= (sure >= jnp.log(threshold)) & (context.max_depth > depth)
    going.append(goes_on)

    def skip(own):
      like, _ = jax.eval_shape(lambda own: feed(own, depth, drawn), own)
      return jnp.zeros(like.shape, like.dtype), own

    def read(own):
      return feed(own, depth, drawn)

    logits, own = lax.cond(jnp.any(goes_on), read, skip, own)
    return logits, (own, logits[:, 0], goes_on)

  draft, (own, _, _) = levels.draw_tree(
    root_logits, on, (carry, root_logits, going[0]), context, **static
  )
  depths = jnp.stack(going, axis=1)  # [B, G]
  above = jnp.arange(depths.shape[1], dtype=jnp.int32)
  parents = jnp.where(depths, above, -1)
  parents = jnp.pad(parents, ((0, 0), (1, 0)), constant_values=-1)
  return dataclasses.replace(draft, parents=parents), own
