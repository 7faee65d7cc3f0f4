"""Draws a chain under a depth policy: passes end as soon as no row goes on.

The levels of a chain are unrolled, and each pass of the draft stands in a
`lax.cond` that asks whether any row goes on. Rows that have stopped run along
as long as others do, and what is drawn for them is not there: nodes of a
`MASKED` chain, decided before they were drawn.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax import laws, warp
from specjax import siblings as siblings_lib
from specjax.cache import Cache
from specjax.drafters import depth as depth_lib
from specjax.drafters.depth import Estimates, Policy, Seen
from specjax.siblings import Siblings
from specjax.structs import struct
from specjax.tree import Form, Tree
from specjax.types import Commit, Context, Draft, Drafter, Params


@struct
class State:
  """What a drafter with a policy remembers.

  Attributes:
    own: the drafter's state without it.
    estimates: see `specjax.drafters.depth`.
  """

  own: Any
  estimates: Estimates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
  """A round's passes of something that drafts a chain.

  Attributes:
    carry: what they begin with, a pytree.
    first: `(carry, goes bool[B]) -> (logits f32[B, V'], carry, passes i32[])`:
      those after the root, and how many passes that took.
    feed: `(carry, depth, tokens i32[B, 1]) -> (logits f32[B, 1, V'], carry)`.
    close: `(carry, fed) -> (own state, target's cache)`, after so many levels
      were fed, `i32[]`, -1 if not even the first pass was made.
    before: passes that the round has made already.
  """

  carry: Any
  first: Callable[[Any, Array], tuple[Array, Any, Array]]
  feed: Callable[[Any, int, Array], tuple[Array, Any]]
  close: Callable[[Any, Array], tuple[Any, Cache]]
  before: int = 0


def check(tree: Tree, siblings: Siblings, policy: Policy) -> None:
  """Raises unless a policy can end that tree."""
  if not isinstance(policy, Policy):
    raise TypeError(
      f"depth must be a specjax.drafters.depth.Policy, got {policy!r}"
    )
  if not tree.is_chain or siblings is not siblings_lib.IID:
    raise ValueError(
      f"depth {policy.name!r} ends one path of tokens drawn 'iid', got "
      f"parents {tree.parents} and siblings {siblings.name!r}"
    )


def drafter(
  begin: Callable[[Params, Any, Cache, Context], Passes],
  *,
  inner: Drafter,
  policy: Policy,
  vocab_size: int,
) -> Drafter:
  """The drafter of a chain whose rows end by a policy.

  Args:
    begin: `(params, own state, target's cache, context) -> Passes`.
    inner: the drafter without it, of the whole chain; all but its `propose` is
      kept.
    policy: when rows go on.
    vocab_size: V, the number of real tokens.
  """
  check(inner.tree, inner.siblings, policy)
  tree = dataclasses.replace(inner.tree, form=Form.MASKED)

  def begun(rows: int) -> Estimates:
    remembered = tree.max_depth if policy.learns else 0
    return Estimates.zeros(rows, remembered, threshold=policy.threshold)

  def init(params, batch, slots, inputs):
    return State(
      own=inner.init(params, batch, slots, inputs), estimates=begun(batch)
    )

  def propose(params, state: State, target_cache, context):
    draft, estimates, own, target_cache = _draw(
      policy,
      state.estimates,
      begin(params, state.own, target_cache, context),
      context,
      tree=tree,
      siblings=inner.siblings,
      vocab_size=vocab_size,
    )
    return draft, State(own=own, estimates=estimates), target_cache

  def prefill(params, state: State, commit: Commit):
    # A text that goes on is a prompt: nothing is known of what follows it.
    return State(
      own=inner.prefill(params, state.own, commit),
      estimates=dataclasses.replace(
        begun(len(commit.length)), passes=state.estimates.passes
      ),
    )

  def commit(params, state: State, commit: Commit):
    estimates = state.estimates
    if policy.learns:
      estimates = depth_lib.learn(estimates, commit, policy.cost)
    if policy.moves is not None:
      estimates = depth_lib.move(policy, estimates, commit, tree.max_depth)
    return State(
      own=inner.commit(params, state.own, commit), estimates=estimates
    )

  return dataclasses.replace(
    inner,
    name=f"{inner.name}, depth {policy.name}",
    tree=tree,
    init=init,
    propose=propose,
    prefill=prefill,
    commit=commit,
    row_axes=lambda state: State(
      own=inner.row_axes(state.own), estimates=Estimates.row_axes()
    ),
  )


def _draw(
  policy: Policy,
  estimates: Estimates,
  passes: Passes,
  context: Context,
  *,
  tree: Tree,
  siblings: Siblings,
  vocab_size: int,
) -> tuple[Draft, Estimates, Any, Cache]:
  """Draws until no row goes on; see `drafter`."""
  rows = len(context.length)
  even = -np.log(vocab_size)
  carry, made = passes.carry, jnp.full((), passes.before, jnp.int32)
  fed = jnp.full((), -1, jnp.int32)
  goes = jnp.ones(rows, bool)
  seen = Seen(
    level=0,
    bins=jnp.full(rows, depth_lib.ROOT, jnp.int32),
    confidence=jnp.full(rows, jnp.inf, jnp.float32),
    survival=jnp.ones(rows, jnp.float32),
    estimates=estimates,
  )
  tokens, there = [context.root], [jnp.ones((rows, 1), bool)]
  drawn_from, top, confidence, log_p = [], [], [], []
  for level in range(tree.max_depth):
    goes = policy.goes_on(seen, goes & (level < context.max_depth))

    def go_on(carry, level=level, goes=goes, drawn=tokens[-1]):
      if level == 0:
        logits, carry, count = passes.first(carry, goes)
      else:
        logits, carry = passes.feed(carry, level, drawn)
        logits, count = logits[:, 0], jnp.ones((), jnp.int32)
      logits = logits[:, :vocab_size]
      law = laws.heal(warp.warp(logits[:, None], context.sampling)[:, 0])
      return law, depth_lib.plain_law(logits), carry, count

    kind = jax.eval_shape(go_on, carry)[0].dtype

    def skip(carry, kind=kind):
      uniform = lambda kind: jnp.full((rows, vocab_size), even, kind)
      nothing = jnp.zeros((), jnp.int32)
      return uniform(kind), uniform(jnp.float32), carry, nothing

    law, plain, carry, count = lax.cond(jnp.any(goes), go_on, skip, carry)
    made, fed = made + count, fed + (count > 0)
    drawn = context.draw(range(level + 1, level + 2), law[:, None])[:, 0]
    sure = jnp.exp(jnp.max(plain, axis=-1))
    own_bin = depth_lib.bin_of(sure)
    tokens.append(drawn[:, None])
    there.append(goes[:, None])
    drawn_from.append(law)
    top.append(sure)
    confidence.append(jnp.exp(laws.token_log_prob(plain, drawn)))
    log_p.append(laws.token_log_prob(law, drawn))
    seen = Seen(
      level=level + 1,
      bins=own_bin,
      confidence=confidence[-1],
      survival=seen.survival * estimates.acceptance(own_bin),
      estimates=estimates,
    )
  own, target_cache = passes.close(carry, fed)
  here = jnp.concatenate(there, axis=1)
  if policy.learns:
    estimates = dataclasses.replace(
      estimates,
      top=jnp.stack(top, axis=1),
      confidence=jnp.stack(confidence, axis=1),
      log_p=jnp.stack(log_p, axis=1).astype(jnp.float32),
    )
  estimates = dataclasses.replace(
    estimates,
    drafted=jnp.sum(here[:, 1:], axis=1, dtype=jnp.int32),
    passes=estimates.passes + made,
  )
  draft = Draft(
    tree=tree,
    siblings=siblings,
    tokens=jnp.concatenate(tokens, axis=1),
    log_probs=jnp.stack([drawn_from[0], *drawn_from], axis=1),
    parents=jnp.where(here, np.array(tree.parents, np.int32), -1),
  )
  return draft, estimates, own, target_cache
