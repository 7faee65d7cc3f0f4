"""Chains under a depth policy: drafting ends once no row continues.

The levels of a chain are unrolled, and a draft pass runs only if some row
continues. Rows that have stopped get masked nodes of a `MASKED` chain, decided
before their tokens are drawn.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions, warp
from specjax import siblings as siblings_lib
from specjax.adaptive import estimates
from specjax.adaptive import policies as depth_lib
from specjax.adaptive.estimates import FinishedRound
from specjax.adaptive.policies import Policy, PolicyContext, Token
from specjax.cache import Cache
from specjax.cond_in_place import cond_in_place
from specjax.siblings import Siblings
from specjax.structs import struct
from specjax.tree import Form, Tree
from specjax.types import Commit, Context, Draft, Drafter, Params


@struct
class Drawn:
  """Record of a draft until its round is over; G = 0 if nothing is recorded.

  Attributes:
    top, confidence: as in `FinishedRound`.
    log_p: `f32[B, G]`, each token's log-probability as it was drawn.
    drafted: `i32[B]`, number of drafted tokens.
  """

  top: Array
  confidence: Array
  log_p: Array
  drafted: Array

  @classmethod
  def zeros(cls, rows: int, depth: int) -> "Drawn":
    """The record of a draft without tokens."""
    each = jnp.zeros((rows, depth), jnp.float32)
    return cls(
      top=each, confidence=each, log_p=each,
      drafted=jnp.zeros(rows, jnp.int32),
    )  # fmt: skip


@struct
class State:
  """State of a drafter with a policy."""

  inner: Any
  memory: Any
  drawn: Drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
  """A round's draft passes over a chain, or a tree level by level.

  Attributes:
    carry: the first carry, a pytree.
    first: `(carry, drafting bool[B]) -> (logits f32[B, 1, V'], carry)`, after
      the root.
    feed: `(carry, depth, tokens i32[B, W]) -> (logits f32[B, W, V'], carry)`; a
      chain has one token at each depth.
    close: `(carry, fed) -> (own state, target's cache)`; `fed`, `i32[]`, counts
      the levels fed, -1 if not even the first pass ran.
  """

  carry: Any
  first: Callable[[Any, Array], tuple[Array, Any]]
  feed: Callable[[Any, int, Array], tuple[Array, Any]]
  close: Callable[[Any, Array], tuple[Any, Cache]]


def check(tree: Tree, siblings: Siblings, policy: Policy) -> None:
  """Raises unless a policy can end this tree."""
  if not isinstance(policy, Policy):
    raise TypeError(
      f"policy must be a specjax.adaptive.policies.Policy, got {policy!r}"
    )
  if not tree.is_chain or siblings is not siblings_lib.IID:
    raise ValueError(
      f"policy {policy.name!r} needs one path of tokens drawn 'iid', got "
      f"parents {tree.parents} and siblings {siblings.name!r}"
    )


def drafter(
  begin: Callable[[Params, Any, Cache, Context], Passes],
  *,
  inner: Drafter,
  policy: Policy,
  vocab_size: int,
) -> Drafter:
  """A drafter of chains that a policy ends, row by row.

  Args:
    begin: `(params, own state, target's cache, context) -> Passes`.
    inner: the drafter of whole chains; its `propose` is replaced.
    policy: decides whether a row continues.
    vocab_size: V, the number of real tokens.
  """
  check(inner.tree, inner.siblings, policy)
  tree = dataclasses.replace(inner.tree, form=Form.MASKED)
  most = tree.max_depth

  def init(params, batch, slots, inputs):
    kept = 0 if policy.learn is None else most
    return State(
      inner=inner.init(params, batch, slots, inputs),
      memory=policy.begin(batch, most),
      drawn=Drawn.zeros(batch, kept),
    )

  def propose(params, state: State, target_cache, context):
    passes = begin(params, state.inner, target_cache, context)
    return _draw(
      policy, state, passes, context, tree=tree,
      siblings=inner.siblings, vocab_size=vocab_size,
    )  # fmt: skip

  def prefill(params, state: State, commit: Commit):
    # Extended text is a prompt: no draft was verified on it.
    return dataclasses.replace(
      state,
      inner=inner.prefill(params, state.inner, commit),
      memory=policy.begin(len(commit.length), most),
    )

  def commit(params, state: State, commit: Commit):
    memory = state.memory
    if policy.learn is not None:
      memory = policy.learn(memory, _finished(state.drawn, commit))
    after = inner.commit(params, state.inner, commit)
    return dataclasses.replace(state, inner=after, memory=memory)

  def row_axes(state: State) -> Any:
    of_rows = lambda tree: jax.tree.map(lambda x: 0, tree)
    return State(
      inner=inner.row_axes(state.inner),
      memory=of_rows(state.memory),
      drawn=of_rows(state.drawn),
    )

  return dataclasses.replace(
    inner,
    name=f"{inner.name}, depth {policy.name}",
    # A policy that learns does so from its own drafts.
    accepts_foreign_drafts=inner.accepts_foreign_drafts
    and policy.learn is None,
    tree=tree,
    init=init,
    propose=propose,
    prefill=prefill,
    commit=commit,
    row_axes=row_axes,
  )


def _finished(drawn: Drawn, commit: Commit) -> FinishedRound:
  """The finished round of a recorded draft."""
  assert commit.target_log_probs is not None  # of a round
  depth = drawn.top.shape[1]
  log_q = distributions.token_log_prob(
    commit.target_log_probs[:, :depth], commit.tokens[:, 1 : depth + 1]
  )
  return FinishedRound(
    top=drawn.top,
    confidence=drawn.confidence,
    accept=distributions.acceptance(log_q.astype(jnp.float32), drawn.log_p),
    drafted=drawn.drafted,
    kept=commit.count - 1,
    active=commit.count > 0,
  )


def _draw(
  policy: Policy,
  state: State,
  passes: Passes,
  context: Context,
  *,
  tree: Tree,
  siblings: Siblings,
  vocab_size: int,
) -> tuple[Draft, State, Cache]:
  """Draws until no row continues; see `drafter`."""
  rows = len(context.length)
  even = -np.log(vocab_size)
  carry, fed = passes.carry, jnp.full((), -1, jnp.int32)
  drafting = jnp.ones(rows, bool)
  seen = PolicyContext(
    level=0,
    bins=jnp.full(rows, estimates.ROOT, jnp.int32),
    confidence=jnp.full(rows, jnp.inf, jnp.float32),
    survival=jnp.ones(rows, jnp.float32),
    memory=state.memory,
  )
  tokens, present = [context.root], [jnp.ones((rows, 1), bool)]
  drawn_from, known, log_p = [], [], []
  depth = tree.max_depth
  if policy.max_tokens is not None and policy.learn is None:
    depth = min(depth, policy.max_tokens)
  for level in range(depth):
    drafting = policy.continues(seen, drafting & (level < context.max_depth))

    def draft_on(carry, level=level, drafting=drafting, newest=tokens[-1]):
      if level == 0:
        logits, carry = passes.first(carry, drafting)
      else:
        logits, carry = passes.feed(carry, level, newest)
      logits = logits[:, 0, :vocab_size]
      log_probs = distributions.replace_nans(
        warp.warp(logits[:, None], context.sampling)[:, 0]
      )
      return (log_probs, depth_lib.plain_log_probs(logits)), carry

    (log_probs, plain), carry = _if_any(drafting, draft_on, carry, even)
    fed += jnp.any(drafting)
    drawn = context.draw(range(level + 1, level + 2), log_probs[:, None])[:, 0]
    token = Token(
      top=jnp.exp(jnp.max(plain, axis=-1)),
      confidence=jnp.exp(distributions.token_log_prob(plain, drawn)),
    )
    tokens.append(drawn[:, None])
    present.append(drafting[:, None])
    drawn_from.append(log_probs)
    known.append(token)
    of_drawn = distributions.token_log_prob(log_probs, drawn)
    log_p.append(of_drawn.astype(jnp.float32))
    if level + 1 < depth:
      accept = policy.accepts(state.memory, token)
      seen = PolicyContext(
        level=level + 1,
        bins=estimates.bin_of(token.top),
        confidence=token.confidence,
        survival=seen.survival * accept,
        memory=state.memory,
      )
  inner, target_cache = passes.close(carry, fed)
  absent = tree.max_depth - depth
  tokens.append(jnp.zeros((rows, absent), context.root.dtype))
  present.append(jnp.zeros((rows, absent), bool))
  dtype = jnp.result_type(jnp.float32, *drawn_from)
  none = jnp.full((rows, vocab_size), even, dtype)
  here = jnp.concatenate(present, axis=1)
  kept = state.drawn
  if policy.learn is not None:
    stacked = lambda name: jnp.stack([getattr(x, name) for x in known], axis=1)
    kept = dataclasses.replace(
      kept,
      top=stacked("top"),
      confidence=stacked("confidence"),
      log_p=jnp.stack(log_p, axis=1),
    )
  count = jnp.sum(here[:, 1:], axis=1, dtype=jnp.int32)
  state = dataclasses.replace(
    state,
    inner=inner,
    drawn=dataclasses.replace(kept, drafted=count),
  )
  draft = Draft(
    tree=tree,
    siblings=siblings,
    tokens=jnp.concatenate(tokens, axis=1),
    log_probs=jnp.stack([none, *drawn_from, *[none] * absent], axis=1),
    parents=jnp.where(here, np.array(tree.parents, np.int32), -1),
  )
  return draft, state, target_cache


def _if_any(
  rows: Array, function: Callable[[Any], tuple], carry: Any, otherwise: float
) -> tuple[Any, Any]:
  """Calls `carry -> (output, carry)` if any of the `rows` draft.

  Else every output is filled with `otherwise`.
  """
  shapes = jax.eval_shape(function, carry)[0]
  fill = lambda x: jnp.full(x.shape, otherwise, x.dtype)
  return cond_in_place(
    jnp.any(rows),
    lambda now: function(now[1]),
    (jax.tree.map(fill, shapes), carry),
  )
