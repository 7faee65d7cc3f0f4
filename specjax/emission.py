"""What a round emits, cut at stop tokens and budgets, and how it is counted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.tree import Tree
from specjax.types import DecodeState, Draft, Origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emission:
  """The outcome of a round, cut at stop tokens and at each row's budget.

  Attributes:
    path: `i32[B, G + 1]`, nodes from the root to the deepest accepted one.
    depth: `i32[B]`, that node's depth.
    tokens: `i32[B, G + 1]`; entry `depth` is the residual or bonus token, those
      after it repeat it.
    origins: `i8[B, G + 1]`.
    count: `i32[B]`, how many of `tokens` are emitted.
    hit_stop: `bool[B]`, whether the last of them is a stop token.
    healthy: `bool[B]`, whether none of them came after a broken node.
  """

  path: Array
  depth: Array
  tokens: Array
  origins: Array
  count: Array
  hit_stop: Array
  healthy: Array


def emit(
  tree: Tree,
  state: DecodeState,
  draft: Draft,
  node: Array,
  next_token: Array,
  broken: Array,
) -> Emission:
  """The accepted path and the token after it, cut.

  Args:
    tree: the static tree.
    state: before the round.
    draft: what was drafted.
    node: `i32[B]`, the deepest accepted node.
    next_token: `i32[B]`, drawn after it.
    broken: `bool[B, N + 1]`, the nodes after which no token can be drawn.

  Returns:
    The `Emission`; a row that is done, or met a broken node, emits nothing.
  """
  width = tree.max_depth + 1
  index = jnp.arange(width, dtype=jnp.int32)
  depth = jnp.asarray(tree.depth)[node]
  path = jnp.asarray(tree.paths)[node]  # [B, G + 1]
  along = jnp.take_along_axis(draft.tokens, path, axis=1)
  along = jnp.concatenate([along[:, 1:], next_token[:, None]], axis=1)
  accepted = index < depth[:, None]
  tokens = jnp.where(accepted, along, next_token[:, None])
  is_leaf = jnp.asarray([not c for c in tree.children])[node]
  drawn = jnp.where(is_leaf, Origin.BONUS, Origin.RESIDUAL)
  origins = jnp.where(accepted, Origin.ACCEPTED, drawn[:, None])
  stop = _is_stop(state, tokens) & (index <= depth[:, None])
  until_stop = jnp.min(jnp.where(stop, index, width), axis=1)
  count = jnp.minimum(depth, until_stop) + 1
  count = jnp.minimum(count, state.max_length - state.length)
  # Emitted token i was drawn after node i of the path.
  met = jnp.take_along_axis(broken, path, axis=1) & (index < count[:, None])
  healthy = ~met.any(axis=1)
  count = jnp.where(state.done | ~healthy, 0, count)
  return Emission(
    path=path,
    depth=depth,
    tokens=tokens,
    origins=origins.astype(jnp.int8),
    count=count,
    hit_stop=until_stop < count,
    healthy=healthy,
  )


def _is_stop(state: DecodeState, tokens: Array) -> Array:
  return jnp.any(tokens[..., None] == state.stop_tokens, axis=-1)


def kept_depth(tree: Tree, state: DecodeState, draft: Draft) -> Array:
  """Drafted tokens emitted if node n is the deepest accepted: `i32[B, N + 1]`.

  A path is cut after its first stop token and at the row's budget.
  """
  stop = _is_stop(state, draft.tokens) & (tree.depth > 0)  # [B, N + 1]
  cut = np.where(tree.ancestors, tree.depth, tree.max_depth)  # [n, ancestor]
  kept = jnp.where(stop[:, None, :], cut, tree.max_depth).min(-1)
  kept = jnp.minimum(kept, tree.depth)
  return jnp.minimum(kept, (state.max_length - state.length)[:, None])


def by_rank(tree: Tree, node_probs: Array) -> tuple[Array, Array]:
  """How often the walk met a child of each rank, and went on to it.

  Args:
    tree: the static tree.
    node_probs: `f32[B, N + 1]`.

  Returns:
    Two arrays `f32[B, C]` of probabilities summed over nodes.
  """
  times = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
  reach = times(node_probs, tree.ancestors.astype(np.float32))  # [B, N + 1]
  ranks = np.arange(tree.max_children)
  is_rank = (tree.rank[:, None] == ranks) & (tree.depth > 0)[:, None]
  has_rank = np.array([len(c) for c in tree.children])[:, None] > ranks
  total = lambda x: times(reach, x.astype(np.float32))
  return total(has_rank), total(is_rank)


def log_probs(logits: Array, emission: Emission) -> Array:
  """Unwarped log-probabilities of `emission.tokens`, `f32[B, G + 1]`."""
  rows = jnp.arange(logits.shape[0])[:, None]
  log_z = jax.nn.logsumexp(logits, axis=-1)  # [B, N + 1]
  picked = logits[rows, emission.path, emission.tokens]
  return picked - jnp.take_along_axis(log_z, emission.path, axis=1)
