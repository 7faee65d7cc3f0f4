"""Multi-token prediction heads: one layer, or one for each drafted token.

At position i layer k of D reads the state of layer k - 1 there (the target's
for k = 1) and token i + k, and predicts token i + k + 1 and a state (DeepSeek's
V3 technical report, 2024, section 2.2). A head of one layer drafts like EAGLE
(`specjax.drafters.families.eagle`). After D tokens the first layer drafts
again, as if the states of the D drafted positions were the target's.

Every layer has a cache, whose slot i is position i. It is fed a position as
soon as the token is committed (`shared.committed`); later slots hold drafted
tokens. In a tree, children of a node of depth k are predicted by layer k + 1
after k positions of the node's own path, which are fed together and are
invisible to other nodes.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.cache import Cache
from specjax.drafters.families.eagle import of_one_layer
from specjax.drafters.shared import arguments, best_first, committed, levels
from specjax.drafters.shared.arguments import Drawing
from specjax.drafters.shared.committed import HeadState
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.structs import struct
from specjax.tree import Form, Tree
from specjax.types import Context, Drafter, FeatureModel, Params


def mtp(
  head: FeatureModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
) -> Drafter:
  """A multi-token prediction head, the target's own or another.

  Arguments, result and errors are those of `eagle`. If fewer tokens are drafted
  than the head has layers, only the first layers are used.
  """
  drawing = arguments.drawing(
    tokens, tree, siblings, vocab_size or head.vocab_size, policy, dynamic=True
  )
  models = (head, *head.later)[: drawing.tree.max_depth]
  if len(models) == 1:
    return of_one_layer("mtp", head, drawing)
  return of_layers(models, drawing)


def of_layers(models: tuple[FeatureModel, ...], drawing: Drawing) -> Drafter:
  """A drafter around a head of D layers, each with its own cache."""
  tree, top_k = drawing.tree, drawing.tree.max_children
  is_free = tree.form is Form.FREE
  if is_free:
    best_first.check(drawing, width=top_k)
  below = (top_k,) * (tree.max_depth - 1) if is_free else levels.fed(tree)
  # A node of depth k feeds k tokens.
  passes = tuple(depth * count for depth, count in enumerate(below, 1))
  fields = dict(
    passes=(tree.max_depth + 1,) * len(models) + passes,
    **committed.fields(
      models, more_slots=len(models) + max(passes, default=0)
    ),
  )  # fmt: skip

  if not is_free:
    begin = functools.partial(_begin, models, drawing)
    return levels.drafter(begin, drawing, name="mtp", **fields)

  def propose(params, state, target_cache, context):
    feed = functools.partial(_feed, models, params, state, context)
    draft, level = best_first.draft_tree(
      state.logits, feed, _root(state), context, drawing, width=top_k
    )
    state = dataclasses.replace(state, caches=level.caches)
    return draft, state, target_cache

  return Drafter(
    name="mtp", tree=tree, siblings=drawing.siblings, propose=propose,
    **fields,
  )  # fmt: skip


@struct
class _Level:
  """The W nodes of a depth k.

  Attributes:
    path: `i32[B, W, k]`, the tokens from the root to each.
    fed: `f[B, W, k, H]`, states of the layer that was fed them.
    hidden: `f[B, W, k + 1, H]`, the state before each token of the path, and
      the one after the node.
    caches: the layers'.
  """

  path: Array
  fed: Array
  hidden: Array
  caches: tuple[Cache, ...]


def _root(state: HeadState) -> _Level:
  """The root, as the one node of depth 0."""
  hidden = state.hidden[0][:, None, None]
  return _Level(
    path=jnp.zeros((len(hidden), 1, 0), jnp.int32),
    fed=hidden[:, :, :0],
    hidden=hidden,
    caches=state.caches,
  )


def _feed(
  models: tuple[FeatureModel, ...],
  params: Params,
  state: HeadState,
  context: Context,
  level: _Level,
  depth: int,
  tokens: Array,
  parents: Array,
) -> tuple[Array, _Level]:
  """Logits `f32[B, W, V']` after the children of `level`, and their level."""

  def of_parents(x):
    at = parents.reshape(*parents.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, at, axis=1)

  number, (rows, nodes) = depth % len(models), tokens.shape
  path = jnp.concatenate([of_parents(level.path), tokens[..., None]], axis=-1)
  drawn_after = of_parents(level.hidden)
  hidden = drawn_after
  if number:
    first = state.hidden[number - 1][:, None, None]
    above = of_parents(level.fed)
    first = jnp.broadcast_to(first, (rows, nodes, 1, first.shape[-1]))
    hidden = jnp.concatenate([first, above], axis=2)
  start = jnp.maximum(context.length, 2) - 1 - number
  place = start[:, None] + np.arange(depth)  # below 0 there is none
  exists = jnp.tile(place >= 0, (1, nodes))[:, None]
  on_path = np.kron(np.eye(nodes), np.tri(depth)).astype(bool)
  mask = exists & on_path | np.eye(nodes * depth, dtype=bool)
  flat = lambda x: x.reshape(rows, nodes * depth, *x.shape[3:])
  split = lambda x: x.reshape(rows, nodes, depth, *x.shape[2:])
  logits, hidden, cache = models[number].apply(
    params.draft,
    flat(path),
    flat(hidden),
    level.caches[number].replace(length=jnp.maximum(start, 0)),
    positions=jnp.tile(jnp.maximum(place, 0), (1, nodes)),
    mask=mask,
    logits_at=jnp.tile(depth * np.arange(1, nodes + 1) - 1, (rows, 1)),
  )
  fed = split(hidden)
  caches = (*level.caches[:number], cache, *level.caches[number + 1 :])
  hidden = jnp.concatenate([drawn_after, fed[:, :, -1:]], axis=2)
  level = _Level(path=path, fed=fed, hidden=hidden, caches=caches)
  return logits, level


def _sized(level: _Level, depth: int | None) -> _Level:
  """The level cut or padded to another depth, if one is given."""
  if depth is None:
    return level

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


def _begin(
  models: tuple[FeatureModel, ...],
  drawing: Drawing,
  params: Params,
  state: HeadState,
  target_cache: Cache,
  context: Context,
) -> chains.Passes:
  """The passes of a tree, level by level, or of a chain under a policy."""
  tree = drawing.tree
  # A policy may leave levels out, so all are carried in one size.
  most = tree.max_depth if drawing.policy else None

  def first(level, drafting):
    del drafting  # the head was fed everything committed
    return state.logits[:, None], level

  def feed(level, depth, drawn):
    parents = jnp.broadcast_to(levels.parents(tree, depth), drawn.shape)
    above = _sized(level, most and depth - 1)
    logits, level = _feed(
      models, params, state, context, above, depth, drawn, parents
    )
    return logits, _sized(level, most)

  def close(level, fed):
    del fed
    return dataclasses.replace(state, caches=level.caches), target_cache

  return chains.Passes(
    carry=_sized(_root(state), most), first=first, feed=feed, close=close,
  )  # fmt: skip
