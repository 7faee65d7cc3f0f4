"""EAGLE: a layer that drafts from the target's features, and its own.

EAGLE (Li et al., ICML 2024) reads at place i the target's feature of token i
beside token i + 1, and gives a law for token i + 2 and a hidden state, which
stands for the feature that the target has not made yet: fed back with the token
drawn, it drafts the next. EAGLE-2 (EMNLP 2024) grows the tree where the head is
confident, EAGLE-3 (NeurIPS 2025) fuses features of several layers; to this file
they are one thing, a `specjax.types.FeatureModel`.

A draft is sampled, over a static tree, or certain: EAGLE-2's dynamic tree keeps
the N nodes of the largest cumulative probability (`best_first`). No token of it
is drawn, so its shape may depend on tokens, and the rule that fits is `match`,
which is optimal for it. To accept its tokens with min(1, q/p) of the head's law
p would be lossy: they were not drawn from p.

The head's cache holds a pair (feature i, token i + 1) in slot i. What was
drafted is thrown away after each round, since it was made of the head's own
states, and the committed pairs are read again with the target's features.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import cache as cache_lib
from specjax import tree as tree_lib
from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.cache import Cache
from specjax.drafters.shared import arguments, best_first, levels
from specjax.shapes import Shape
from specjax.siblings import GIVEN, IID, Siblings
from specjax.tree import Form, Tree, take_node
from specjax.types import (
  Commit,
  Context,
  Draft,
  Drafter,
  EmptyRoundPolicy,
  FeatureModel,
  Params,
)


def eagle(
  head: FeatureModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
  longest: int | None = None,
) -> Drafter:
  """An EAGLE head, static or dynamic trees (Li et al., ICML and EMNLP 2024).

  Args:
    head: the head, whose parameters are `Params.draft`.
    tokens: drafted on each path; 5 by default.
    tree: what every proposal fills; None for one path. Of one whose parents are
      data (`specjax.shapes.dynamic`) the nodes are EAGLE-2's: the root gets its
      `top_k` likeliest tokens, at every further depth each of `top_k` nodes,
      those of the largest cumulative probability of the depth above, gets as
      many, and of all nodes the best by cumulative probability are verified, a
      parent before its child where both have the same. The published code's
      `depth` is one less than the tree's.
    siblings: how the children of a node are drawn, or the name of it in
      `specjax.siblings`; those of a dynamic tree are certain.
    policy: when a row of a chain ends before that, of
      `specjax.adaptive.policies`; None: never. The pass that reads committed
      pairs is made in every round.
    vocab_size: V, the number of real tokens; by default the head's.
    longest: G of the deepest tree whose rounds go on with the same state
      (`specjax.adaptive.rungs`); then `tree` may be of no tokens, for rounds
      that read committed pairs and draft nothing. None: of the tree.

  Returns:
    The `Drafter`. Its target has to give the features that the head reads.
    Rules that take dynamic trees are `match` and those that verify any certain
    tree.

  Raises:
    ValueError: if the tree drafts nothing, without `longest`, is deeper than
      that, or does not suit the siblings, the policy or the vocabulary.
    TypeError: if the tree is none, or the policy no `Policy`.
  """
  form = arguments.drawn(tokens, tree, siblings, policy, dynamic=True)
  return of_head("eagle", head, *form, policy, vocab_size, longest)


def eagle3(
  head: FeatureModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
  longest: int | None = None,
) -> Drafter:
  """An EAGLE-3 head (Li et al., 2025).

  Arguments, result and errors are those of `eagle`.
  """
  form = arguments.drawn(tokens, tree, siblings, policy, dynamic=True)
  return of_head("eagle3", head, *form, policy, vocab_size, longest)


def of_head(
  name: str,
  model: FeatureModel,
  tree: Tree,
  siblings: Siblings,
  policy: Policy | None,
  vocab_size: int | None,
  longest: int | None,
) -> Drafter:
  """The drafter of a head, under its name; see `eagle`."""
  vocab_size = vocab_size or model.vocab_size
  if tree.form is Form.FREE:
    return _dynamic(model, tree, vocab_size)
  made = functools.partial(
    _made, model, tree=tree, siblings=siblings, name=name, longest=longest
  )
  if longest and not tree.num_drafted:

    def read_alone(params, state, target_cache, context):
      read = dataclasses.replace(
        state, cache=_read(model, params, state, context).cache
      )
      return nothing(tree, siblings, context), read, target_cache

    return made(read_alone, passes=())
  arguments.check_tree(tree, siblings, vocab_size)

  def begin(params, state, target_cache, context):
    root = _read(model, params, state, context)

    def first(carry, goes):
      del goes
      return root.logits[:, None], carry, jnp.zeros((), jnp.int32)

    def feed(carry, depth, drawn):
      hidden, cache = carry
      logits, hidden, cache = model.apply(
        params.draft,
        drawn,
        hidden[:, levels.parents(tree, depth)],
        cache,
        positions=levels.positions(_place(context), depth, drawn),
        mask=levels.mask(tree, depth),
      )
      return logits, (hidden, cache)

    def close(carry, fed):
      del fed
      return dataclasses.replace(state, cache=carry[1]), target_cache

    return chains.Passes(
      carry=(root.hidden[:, None], root.cache),
      first=first, feed=feed, close=close, before=1,
    )  # fmt: skip

  whole = made(
    levels.proposer(begin, tree=tree, siblings=siblings, vocab_size=vocab_size),
    passes=tuple(len(level) for level in tree.levels[1:-1]),
  )
  if policy is not None:
    return chains.drafter(
      begin, inner=whole, policy=policy, vocab_size=vocab_size
    )
  return arguments.with_longer(
    whole,
    lambda tree, policy: of_head(
      name, model, tree, siblings, policy, vocab_size, None
    ),
  )


def nothing(tree: Tree, siblings: Siblings, context: Context) -> Draft:
  """No token below the root."""
  return Draft(
    tree=tree, siblings=siblings, tokens=context.root, log_probs=None
  )


def _dynamic(
  model: FeatureModel,
  tree: Tree,
  vocab_size: int,
  form: Tree | None = None,
) -> Drafter:
  """Drafts EAGLE-2's dynamic tree of deterministic tokens (its section 4)."""
  depth, top_k = tree.max_depth, tree.max_children
  form = tree if form is None else form
  best_first.check(
    num_nodes=tree.num_drafted, depth=depth, width=top_k, children=top_k,
    vocab_size=vocab_size,
  )  # fmt: skip

  def propose(params, state, target_cache, context):
    root = _read(model, params, state, context)

    def feed(carry, level, tokens, parents):
      hidden, seen, cache = carry
      parents = parents[..., None]
      hidden = jnp.take_along_axis(hidden, parents, axis=1)
      among_fed = jnp.broadcast_to(
        jnp.eye(tokens.shape[1], dtype=bool), (*tokens.shape, tokens.shape[1])
      )
      if seen is not None:  # of what was fed, which is above
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

    draft, (_, _, cache) = best_first.draft_tree(
      root.logits, feed, (root.hidden[:, None], None, root.cache), context,
      tree=tree, width=top_k, children=top_k, vocab_size=vocab_size,
    )  # fmt: skip
    draft = best_first.within(draft, form)
    return draft, dataclasses.replace(state, cache=cache), target_cache

  def longer(tokens: int) -> Drafter:
    nodes = max(tree.num_drafted, tokens + top_k - 1)
    return _dynamic(
      model, tree, vocab_size, tree_lib.bound(nodes, tokens, top_k)
    )

  made = _made(
    model, propose, tree=form, siblings=GIVEN, name="eagle2",
    passes=(top_k,) * (depth - 1), more_slots=top_k * (depth - 1),
  )  # fmt: skip
  return dataclasses.replace(made, longer=longer)


# ------------------------------------------------- what both have in common


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
  """State of the head.

  Attributes:
    cache: pairs (feature i, token i + 1) in slots i.
    features: `f[B, G + 1, F]`, the target's, of tokens `start ..`: those that
      were committed in the last round and are not cached yet; G of the deepest
      tree that works on the state.
    start: `i32[B]`.
  """

  cache: Cache
  features: Array
  start: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Root:
  """Output of the head at the newest token.

  Attributes:
    logits: `f32[B, V']`.
    hidden: `f[B, H]`.
    cache: with all committed pairs, `length - 1` of them.
  """

  logits: Array
  hidden: Array
  cache: Cache


def _read(
  model: FeatureModel, params: Any, state: _State, context: Context
) -> _Root:
  """Reads the pairs committed in the last round."""
  # Of one token the target has read nothing: a pair of it and zeros.
  count = jnp.maximum(context.length - 1 - state.start, 1)
  width = state.features.shape[1]
  place = (context.length - count)[:, None] + np.arange(width)
  tokens = jnp.take_along_axis(
    context.tokens, jnp.minimum(place, context.tokens.shape[1] - 1), axis=1
  )
  logits, hidden, cache = model.apply(
    params.draft,
    tokens,
    model.fuse(params.draft, state.features),
    state.cache.replace(length=state.start),
  )
  return _Root(
    logits=take_node(logits, count - 1),
    hidden=take_node(hidden, count - 1),
    cache=cache.replace(length=state.start + count),
  )


def _made(
  model: FeatureModel,
  propose: Callable[[Params, Any, Cache, Context], tuple[Draft, Any, Cache]],
  *,
  tree: Tree,
  siblings: Siblings,
  name: str,
  passes: tuple[int, ...],
  more_slots: int = 0,
  longest: int | None = None,
) -> Drafter:
  """The drafter of a head; `propose` reads committed pairs (`_read`).

  `passes` are tokens of each pass after that one, `more_slots` those of the
  head's cache for nodes that are not verified.
  """
  width = (longest or tree.max_depth) + 1
  if tree.max_depth >= width:
    raise ValueError(
      f"longest is {longest}, and the tree is {tree.max_depth} deep"
    )

  def init(params, batch, slots, inputs):
    del params, inputs
    return _State(
      cache=model.init_cache(batch, slots + more_slots),
      features=jnp.zeros((batch, width, model.num_features)),
      start=jnp.zeros((batch,), jnp.int32),
    )

  def prefill(params, state: _State, commit: Commit) -> _State:
    features = commit.features(model.num_features)
    features = features.astype(state.features.dtype)
    cache = state.cache
    if commit.tokens.shape[1] > 1:
      _, _, cache = model.apply(
        params.draft,
        commit.tokens[:, 1:],
        model.fuse(params.draft, features[:, :-1]),
        cache.replace(length=commit.start),
      )
    # The newest pair is read again, for what the head says after it.
    last = jnp.maximum(commit.count - 1, 0)
    newest = take_node(features, last)
    newest = jnp.where(commit.count[:, None] > 0, newest, 0)
    pending = jnp.zeros_like(state.features).at[:, 0].set(newest)
    return _State(cache=cache, features=pending, start=commit.start + last)

  def commit(params, state: _State, commit: Commit) -> _State:
    del params
    features = commit.features(model.num_features)
    features = features.astype(state.features.dtype)
    along = jnp.take_along_axis(features, commit.path[..., None], axis=1)
    more = width - along.shape[1]  # a deeper tree's, which this one has not
    along = jnp.pad(along, ((0, 0), (0, more), (0, 0)))
    went_on = commit.count > 0
    return dataclasses.replace(
      state,
      features=jnp.where(went_on[:, None, None], along, state.features),
      start=jnp.where(went_on, commit.start, state.start),
    )

  def row_axes(state: _State) -> Any:
    return _State(cache=cache_lib.row_axes(state.cache), features=0, start=0)  # type: ignore[arg-type]

  return Drafter(
    name=name,
    tree=tree,
    siblings=siblings,
    init=init,
    prefill=prefill,
    propose=propose,
    commit=commit,
    row_axes=row_axes,
    passes=(width, *passes),
    max_positions=model.max_positions,
    num_refed=width + 1,  # a round's committed pairs are not cached yet
    # It reads committed pairs when it proposes, and keeps it for one round
    # only.
    empty_rounds=EmptyRoundPolicy.PROPOSE if longest else None,
    accepts_foreign_drafts=True,
  )


def _place(context: Context) -> Array:
  """`i32[B]`, place of the newest pair: its feature's position."""
  return jnp.maximum(context.length - 2, 0)
