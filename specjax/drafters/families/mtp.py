"""Heads of multi-token prediction: one layer, or one for each drafted token.

Layer k of D reads at place i the state that layer k - 1 left there, of k = 1
the target's, beside token i + k, and gives a law for token i + k + 1 and a
state (DeepSeek-V3's technical report, 2024, section 2.2). A head of one layer
drafts as EAGLE's do (`specjax.drafters.families.eagle`). The first token after
those of several layers is drafted as if the states of the D before it were the
target's: by the first layer again.

Every layer has a cache, whose slot i is place i. The last k places of layer k
read tokens that are drafted; so after a round the last D - 1 places of all
layers are cropped and read once more, with the target's states and what was
accepted. Below a node of depth k of a tree its law is that of layer k + 1 after
k places of its own path, which are fed together and seen by no other node.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import cache as cache_lib
from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.cache import Cache
from specjax.drafters.families.eagle import nothing, of_head
from specjax.drafters.shared import arguments, best_first, levels
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Form, Tree, take_node
from specjax.types import (
  Commit,
  Context,
  Draft,
  Drafter,
  EmptyRoundPolicy,
  FeatureModel,
)


def mtp(
  head: FeatureModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
  longest: int | None = None,
) -> Drafter:
  """A head of multi-token prediction: its target's own, or another one.

  Arguments, result and errors are those of `eagle`. Of a head of more layers
  than tokens are drafted the first ones are used.
  """
  form, kind = arguments.drawn(tokens, tree, siblings, policy, dynamic=True)
  count = min(1 + len(head.later), longest or form.max_depth)
  if count < 2:
    return of_head("mtp", head, form, kind, policy, vocab_size, longest)
  return of_layers(
    (head, *head.later)[:count], form, kind, policy,
    vocab_size or head.vocab_size, longest,
  )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
  """State of a head of D layers, for each row.

  Attributes:
    caches: of each layer.
    features: `f[B, G + D, F]`, the target's, of places `start ..`, which some
      layer has not read with accepted tokens alone; G of the deepest tree that
      works on the state.
    start: `i32[B]`.
  """

  caches: tuple[Cache, ...]
  features: Array
  start: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Root:
  """Laws and states before anything is drafted.

  Attributes:
    logits: `f32[B, V']`, after the newest token, by the first layer.
    hidden: of layer k `f[B, H]`, its state at its newest place of accepted
      tokens alone, `length - 1 - k`.
    caches: the layers', with all such places.
    length: `i32[B]`, tokens of the text; two where there is but one, for a pair
      of it and zeros.
  """

  logits: Array
  hidden: tuple[Array, ...]
  caches: tuple[Cache, ...]
  length: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Level:
  """The W nodes of a depth k.

  Attributes:
    path: `i32[B, W, k]`, the tokens down to each.
    fed: `f[B, W, k, H]`, states of the layer that read them, at its places.
    hidden: `f[B, W, k + 1, H]`, the state that each token of the path was drawn
      after, and that after the node: in place of the target's.
    caches: the layers'.
  """

  path: Array
  fed: Array
  hidden: Array
  caches: tuple[Cache, ...]


def of_layers(
  models: tuple[FeatureModel, ...],
  tree: Tree,
  siblings: Siblings,
  policy: Policy | None,
  vocab_size: int,
  longest: int | None,
) -> Drafter:
  """The drafter of a head of D layers.

  Args:
    models: the layers, each with a cache of its own; all take the parameters of
      the whole head.
    tree, siblings, policy, vocab_size, longest: as of `eagle`.
  """
  count, most = len(models), longest or tree.max_depth
  if tree.max_depth > most:
    raise ValueError(
      f"longest is {longest}, and the tree is {tree.max_depth} deep"
    )
  width, free = most + count, tree.form is Form.FREE
  passes = _passes(tree, siblings, vocab_size, longest)

  def init(params, batch, slots, inputs):
    del params, inputs
    slots += count + max(passes, default=0)
    return _State(
      caches=tuple(model.init_cache(batch, slots) for model in models),
      features=jnp.zeros((batch, width, models[0].num_features)),
      start=jnp.zeros((batch,), jnp.int32),
    )

  def propose(params, state, target_cache, context):
    root = _read(models, params, state, context)
    if tree.num_drafted:
      draft, caches = _grow(
        models, params, root, context,
        tree=tree, siblings=siblings, vocab_size=vocab_size,
      )  # fmt: skip
    else:
      draft, caches = nothing(tree, siblings, context), root.caches
    return draft, dataclasses.replace(state, caches=caches), target_cache

  whole = Drafter(
    name="eagle2" if free else "mtp",
    tree=tree,
    siblings=siblings,
    init=init,
    prefill=functools.partial(_prefill, models),
    propose=propose,
    commit=_commit,
    row_axes=_row_axes,
    passes=(width,) * count + passes,
    max_positions=models[0].max_positions,
    num_refed=width + 1,  # what was accepted in a round is not read yet
    empty_rounds=EmptyRoundPolicy.PROPOSE if longest else None,
    accepts_foreign_drafts=True,
  )
  if policy is not None:
    begin_chain = functools.partial(_begin_chain, models, most)
    return chains.drafter(
      begin_chain, inner=whole, policy=policy, vocab_size=vocab_size
    )
  if free:
    return whole
  return arguments.with_longer(
    whole,
    lambda tree, policy: of_layers(
      models, tree, siblings, policy, vocab_size, None
    ),
  )


def _passes(
  tree: Tree, siblings: Siblings, vocab_size: int, longest: int | None
) -> tuple[int, ...]:
  """Tokens of each pass below the root: a node of depth k feeds k of them.

  Raises:
    ValueError: if the tree does not suit the siblings or the vocabulary, or
      drafts nothing without `longest`.
  """
  if tree.form is Form.FREE:
    top_k = tree.max_children
    best_first.check(
      num_nodes=tree.num_drafted, depth=tree.max_depth, width=top_k,
      children=top_k, vocab_size=vocab_size,
    )  # fmt: skip
    widths = (top_k,) * (tree.max_depth - 1)
  else:
    if tree.num_drafted or not longest:
      arguments.check_tree(tree, siblings, vocab_size)
    widths = tuple(len(level) for level in tree.levels[1:-1])
  return tuple(depth * n for depth, n in enumerate(widths, 1))


# ---------------------------------------------------- what was committed


def _read(
  models: tuple[FeatureModel, ...], params: Any, state: _State, context: Context
) -> _Root:
  """Reads all places from `start` on, of accepted tokens."""
  length = jnp.maximum(context.length, 2)
  # Of one token the target has read nothing: a pair of it and zeros.
  first = state.start + context.length - length
  places = np.arange(state.features.shape[1])
  hidden = models[0].fuse(params.draft, state.features)
  logits, last, caches = [], [], []
  for k, model in enumerate(models, 1):
    at = jnp.clip(first[:, None] + k + places, 0, context.tokens.shape[1] - 1)
    said, hidden, cache = model.apply(
      params.draft,
      jnp.take_along_axis(context.tokens, at, axis=1),
      hidden,
      state.caches[k - 1].replace(length=state.start),
    )
    newest = jnp.maximum(length - 1 - k - state.start, 0)
    logits.append(take_node(said, newest))
    last.append(take_node(hidden, newest))
    caches.append(cache.replace(length=jnp.maximum(length - k, 0)))
  return _Root(
    logits=logits[0], hidden=tuple(last), caches=tuple(caches), length=length
  )


def _prefill(
  models: tuple[FeatureModel, ...], params: Any, state: _State, commit: Commit
) -> _State:
  """Reads a prompt; its last D - 1 places are left to `_read`."""
  count, width = len(models), state.features.shape[1]
  features = commit.features(state.features.shape[-1])
  features = features.astype(state.features.dtype)
  fed = commit.tokens.shape[1]
  hidden, caches = models[0].fuse(params.draft, features), []
  for k, model in enumerate(models, 1):
    cache = state.caches[k - 1]
    if fed > k:
      _, hidden, cache = model.apply(
        params.draft,
        commit.tokens[:, k:],
        hidden[:, : fed - k],
        cache.replace(length=commit.start),
      )
    caches.append(cache)
  last = jnp.maximum(commit.count - count, 0)
  at = last[:, None] + np.arange(width)
  pending = jnp.take_along_axis(
    features, jnp.minimum(at, fed - 1)[..., None], axis=1
  )
  pending = jnp.where((at < commit.count[:, None])[..., None], pending, 0)
  return _State(
    caches=tuple(caches), features=pending, start=commit.start + last
  )


def _commit(params: Any, state: _State, commit: Commit) -> _State:
  """Features of what was accepted, behind those of the last D - 1 places."""
  del params
  count, width = len(state.caches), state.features.shape[1]
  features = commit.features(state.features.shape[-1])
  features = features.astype(state.features.dtype)
  along = jnp.take_along_axis(features, commit.path[..., None], axis=1)
  behind = commit.start - state.start
  back = jnp.clip(behind, 0, count - 1)
  step = np.arange(width) - back[:, None]  # from the root on
  pick = lambda x, at: jnp.take_along_axis(
    x, jnp.clip(at, 0, x.shape[1] - 1)[..., None], axis=1
  )
  pending = jnp.where(
    step[..., None] < 0,
    pick(state.features, behind[:, None] + step),
    pick(along, step),
  )
  went_on = commit.count > 0
  return dataclasses.replace(
    state,
    features=jnp.where(went_on[:, None, None], pending, state.features),
    start=jnp.where(went_on, commit.start - back, state.start),
  )


def _row_axes(state: _State) -> Any:
  caches = tuple(map(cache_lib.row_axes, state.caches))
  return _State(caches=caches, features=0, start=0)  # type: ignore[arg-type]


# ------------------------------------------------------- what is drafted


def _begin(root: _Root) -> _Level:
  """The root, as the one node of depth 0."""
  hidden = root.hidden[0][:, None, None]
  return _Level(
    path=jnp.zeros((len(hidden), 1, 0), jnp.int32),
    fed=hidden[:, :, :0],
    hidden=hidden,
    caches=root.caches,
  )


def _feed(
  models: tuple[FeatureModel, ...],
  params: Any,
  root: _Root,
  level: _Level,
  depth: int,
  tokens: Array,
  parents: Array,
) -> tuple[Array, _Level]:
  """Logits `f32[B, W, V']` after the nodes of a depth, and their `_Level`.

  `tokens` and `parents` are `i32[B, W]`, the latter indices into `level`, the
  nodes of the depth above.
  """

  def of_parents(x):
    at = parents.reshape(*parents.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, at, axis=1)

  number, (rows, nodes) = depth % len(models), tokens.shape
  path = jnp.concatenate([of_parents(level.path), tokens[..., None]], axis=-1)
  drawn_after = of_parents(level.hidden)
  hidden = drawn_after
  if number:
    first = root.hidden[number - 1][:, None, None]
    above = of_parents(level.fed)
    first = jnp.broadcast_to(first, (rows, nodes, 1, first.shape[-1]))
    hidden = jnp.concatenate([first, above], axis=2)
  start = root.length - 1 - number
  place = start[:, None] + np.arange(depth)  # below 0 there is none
  exists = jnp.tile(place >= 0, (1, nodes))[:, None]
  on_path = np.kron(np.eye(nodes), np.tri(depth)).astype(bool)
  mask = exists & on_path | np.eye(nodes * depth, dtype=bool)
  flat = lambda x: x.reshape(rows, nodes * depth, *x.shape[3:])
  apart = lambda x: x.reshape(rows, nodes, depth, *x.shape[2:])
  logits, hidden, cache = models[number].apply(
    params.draft,
    flat(path),
    flat(hidden),
    level.caches[number].replace(length=jnp.maximum(start, 0)),
    positions=jnp.tile(jnp.maximum(place, 0), (1, nodes)),
    mask=mask,
  )
  fed = apart(hidden)
  caches = (*level.caches[:number], cache, *level.caches[number + 1 :])
  hidden = jnp.concatenate([drawn_after, fed[:, :, -1:]], axis=2)
  level = _Level(path=path, fed=fed, hidden=hidden, caches=caches)
  return apart(logits)[:, :, -1], level


def _grow(
  models: tuple[FeatureModel, ...],
  params: Any,
  root: _Root,
  context: Context,
  *,
  tree: Tree,
  siblings: Siblings,
  vocab_size: int,
) -> tuple[Draft, tuple[Cache, ...]]:
  """A draft of a tree, and the layers' caches with its nodes."""
  feed = functools.partial(_feed, models, params, root)
  if tree.form is Form.FREE:
    top_k = tree.max_children
    draft, level = best_first.draft_tree(
      root.logits, feed, _begin(root), context,
      tree=tree, width=top_k, children=top_k, vocab_size=vocab_size,
    )  # fmt: skip
    return draft, level.caches

  def next_nodes(level, depth, drawn):
    parents = jnp.broadcast_to(levels.parents(tree, depth), drawn.shape)
    return feed(level, depth, drawn, parents)

  draft, level = levels.draw_tree(
    root.logits, next_nodes, _begin(root), context,
    tree=tree, siblings=siblings, vocab_size=vocab_size,
  )  # fmt: skip
  return draft, level.caches


def _sized(level: _Level, depth: int) -> _Level:
  """The level as one of another depth: cut, or padded with anything."""

  def of_size(x, size):
    more = [(0, 0)] * x.ndim
    more[2] = (0, max(size - x.shape[2], 0))
    return jnp.pad(x, more)[:, :, :size]

  return _Level(
    path=of_size(level.path, depth),
    fed=of_size(level.fed, depth),
    hidden=of_size(level.hidden, depth + 1),
    caches=level.caches,
  )


def _begin_chain(
  models: tuple[FeatureModel, ...],
  most: int,
  params: Any,
  state: _State,
  target_cache: Cache,
  context: Context,
) -> chains.Passes:
  """The passes of a chain of at most `most` tokens, which a policy may end."""
  root = _read(models, params, state, context)
  parents = jnp.zeros((len(root.length), 1), jnp.int32)

  def first(level, goes):
    del goes
    return root.logits[:, None], level, jnp.zeros((), jnp.int32)

  def next_node(level, depth, drawn):
    above = _sized(level, depth - 1)
    logits, level = _feed(models, params, root, above, depth, drawn, parents)
    return logits, _sized(level, most)

  def close(level, fed):
    del fed
    return dataclasses.replace(state, caches=level.caches), target_cache

  return chains.Passes(
    carry=_sized(_begin(root), most), first=first, feed=next_node, close=close,
    before=len(models),
  )  # fmt: skip
