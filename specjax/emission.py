"""Emits a round: cuts it at stop tokens and budgets, counts it, writes it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.state import (
  Counters,
  DecodeState,
  Likeliest,
  Origin,
  Round,
  StopReason,
)
from specjax.structs import struct
from specjax.tree import take_node


@struct
class Emission:
  """The outcome of a round, cut at stop tokens and at each row's budget.

  Attributes:
    path: `i32[B, G + 1]`, nodes from the root to the deepest accepted one.
    depth: `i32[B]`, that node's depth.
    tokens: `i32[B, G + 1]`; entry `depth` is the residual or bonus token, and
      later entries repeat it.
    origins: `i8[B, G + 1]`.
    count: `i32[B]`, how many of `tokens` are emitted.
    hit_stop: `bool[B]`, whether the last of them is a stop token.
    healthy: `bool[B]`, whether none of them follows a broken node.
  """

  path: Array
  depth: Array
  tokens: Array
  origins: Array
  count: Array
  hit_stop: Array
  healthy: Array


def emit(
  state: DecodeState, now: Round, node: Array, next_token: Array
) -> Emission:
  """Emits the accepted path and the token after it, cut to what is allowed.

  A row that is done, or that met a broken node, emits nothing.
  """
  draft, topology = now.draft, now.topology
  width = draft.tree.max_depth + 1
  index = jnp.arange(width, dtype=jnp.int32)
  depth = _of_node(topology.depth, node)
  path = _of_node(topology.paths, node)  # [B, G + 1]
  along = jnp.take_along_axis(draft.tokens, path, axis=1)
  along = jnp.concatenate([along[:, 1:], next_token[:, None]], axis=1)
  accepted = index < depth[:, None]
  tokens = jnp.where(accepted, along, next_token[:, None])
  is_leaf = _of_node(topology.num_children, node) == 0
  drawn = jnp.where(is_leaf, Origin.BONUS, Origin.RESIDUAL)
  origins = jnp.where(accepted, Origin.ACCEPTED, drawn[:, None])
  stop = _is_stop(state, tokens) & (index <= depth[:, None])
  until_stop = jnp.min(jnp.where(stop, index, width), axis=1)
  count = jnp.minimum(depth, until_stop) + 1
  count = jnp.minimum(count, state.max_length - state.length)
  # Emitted token i was drawn after node i of the path.
  met = jnp.take_along_axis(now.broken, path, axis=1) & (index < count[:, None])
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


def _of_node(per_node: np.ndarray | Array, node: Array) -> Array:
  """`per_node[b, node[b]]`, where all rows may share one row of `per_node`."""
  if isinstance(per_node, np.ndarray):
    return jnp.asarray(per_node[0])[node]
  return take_node(per_node, node)


def _is_stop(state: DecodeState, tokens: Array) -> Array:
  """`bool[B, T]`, tokens of `i32[B, T]` that end their row."""
  stops = jnp.any(tokens[..., None] == state.stop_tokens, axis=-1)
  stops &= ~state.ignores_stop[:, None]
  if (penalties := state.sampling.penalties) is not None:
    row_stops = penalties.stop_tokens[:, None]
    stops |= jnp.any(tokens[..., None] == row_stops, axis=-1)
  return stops


def kept_depth(state: DecodeState, now: Round) -> Array:
  """Drafted tokens emitted if node n is the deepest accepted, `i32[B, N + 1]`.

  A path is cut after its first stop token and at the row's budget.
  """
  topology, tokens = now.topology, now.draft.tokens
  nodes, deepest = now.draft.tree.num_nodes, now.draft.tree.max_depth
  xp = np if isinstance(topology.depth, np.ndarray) else jnp
  depth = topology.depth[:, :nodes]
  above = topology.ancestors[:, :nodes, :nodes]
  stop = _is_stop(state, tokens[:, :nodes]) & (depth > 0)  # [B, N + 1]
  cut = xp.where(above, depth[:, None, :], deepest)  # [n, ancestor]
  kept = jnp.where(stop[:, None, :], cut, deepest).min(-1)
  kept = jnp.minimum(kept, depth)
  return jnp.minimum(kept, (state.max_length - state.length)[:, None])


def _total(values: Array, chosen: np.ndarray | Array) -> Array:
  """Sums of values `f32[B, n]` over the chosen, `bool[B or 1, n, m]`."""
  times = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
  chosen = chosen.astype(np.float32)
  if isinstance(chosen, np.ndarray):
    return times(values, chosen[0])
  return times(values[:, None], chosen)[:, 0]


def count(
  state: DecodeState,
  now: Round,
  node_probs: Array,
  distance: Array,
  emission: Emission,
) -> Counters:
  """The counters after a round; `distance` is its total variation."""
  tree, topology, old = now.draft.tree, now.topology, state.counters
  nodes, depths = tree.num_nodes, np.arange(tree.max_depth + 1)
  is_node = topology.present[:, :nodes] & (np.arange(nodes) > 0)
  num_drafted = is_node.sum(axis=1, dtype=np.int32)
  kept = jnp.minimum(emission.depth, emission.count)
  # Emitted token i followed node i of the path.
  distance = jnp.take_along_axis(distance, emission.path, axis=1)
  distance = jnp.where(depths < emission.count[:, None], distance, 0)
  # The walk reached a node if it ended there or below it.
  reach = _total(node_probs, topology.ancestors[:, :nodes, :nodes])
  ranks = np.arange(tree.max_children)
  is_rank = (topology.rank[..., None] == ranks) & is_node[..., None]
  new = {
    "num_target_calls": 1,
    "num_fed": now.num_fed,
    "num_drafts": num_drafted > 0,
    "num_drafted": num_drafted,
    "num_accepted": kept,
    "expected_accepted": (node_probs * kept_depth(state, now)).sum(axis=1),
    "accept_counts": kept[:, None] == depths,
    "total_variation": distance.sum(axis=1),
    "rank_offered": _total(reach, topology.num_children[..., None] > ranks),
    "rank_accepted": _total(reach, is_rank),
  }
  active = ~state.done & emission.healthy

  def add(total, more):
    if total.ndim == 2:  # the counters may be for deeper drafts than this one
      more = jnp.pad(more, ((0, 0), (0, total.shape[1] - more.shape[1])))
    some = active.reshape(-1, *[1] * (total.ndim - 1))
    return total + jnp.where(some, more, 0).astype(total.dtype)

  return Counters(**{k: add(getattr(old, k), x) for k, x in new.items()})


def write(state: DecodeState, logits: Array, emission: Emission) -> DecodeState:
  """The state with the emitted tokens and their log-probabilities."""
  length = state.length + emission.count
  stopped = jnp.where(
    length >= state.max_length, StopReason.LENGTH, StopReason.RUNNING
  )
  stopped = jnp.where(emission.hit_stop, StopReason.STOP_TOKEN, stopped)
  stopped = jnp.where(emission.healthy, stopped, StopReason.NAN_LOGITS)
  put = lambda buffer, new: jax.vmap(
    lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None)
  )(buffer, new.astype(buffer.dtype), state.length, 0)
  log_probs, likeliest = state.log_probs, state.likeliest
  if log_probs is not None:
    log_probs = put(log_probs, _log_probs(logits, emission))
  if likeliest is not None:
    tokens, values = _likeliest(logits, emission, likeliest)
    likeliest = dataclasses.replace(
      likeliest,
      tokens=put(likeliest.tokens, tokens),
      log_probs=put(likeliest.log_probs, values),
    )
  return dataclasses.replace(
    state,
    tokens=put(state.tokens, emission.tokens),
    origins=put(state.origins, emission.origins),
    log_probs=log_probs,
    likeliest=likeliest,
    length=length,
    stop_reason=jnp.where(state.done, state.stop_reason, stopped),
    num_steps=state.num_steps + 1,
  )


def _log_probs(logits: Array, emission: Emission) -> Array:
  """Unwarped log-probabilities of the emitted tokens, `f32[B, G + 1]`."""
  rows = jnp.arange(len(logits))[:, None]
  log_z = jax.nn.logsumexp(logits, axis=-1)  # [B, N + 1]
  picked = logits[rows, emission.path, emission.tokens]
  return picked - jnp.take_along_axis(log_z, emission.path, axis=1)


def _likeliest(
  logits: Array, emission: Emission, kept: Likeliest
) -> tuple[Array, Array]:
  """The K most likely tokens for each emitted one, `[B, G + 1, K]`."""
  rows = jnp.arange(len(logits))[:, None]
  shape = (*emission.path.shape, kept.tokens.shape[-1])

  def largest(logits):
    along = logits[rows, emission.path]  # [B, G + 1, V]
    values, tokens = lax.top_k(along, shape[-1])
    log_z = jax.nn.logsumexp(along, axis=-1, keepdims=True)
    return tokens, (values - log_z).astype(kept.log_probs.dtype)

  nothing = lambda _: (
    jnp.zeros(shape, jnp.int32), jnp.zeros(shape, kept.log_probs.dtype),
  )  # fmt: skip
  # Not `cond_in_place`: XLA would hoist the search out of its loop.
  wanted = kept.wanted & (emission.count > 0)
  return lax.cond(jnp.any(wanted), largest, nothing, logits)
