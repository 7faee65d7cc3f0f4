"""Emission of a round: cut at stop tokens and budgets, written and counted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.state import Counters, DecodeState, Origin, Round, StopReason
from specjax.tree import Topology, Tree, take_node
from specjax.types import Draft, Verification


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
  state: DecodeState,
  now: Round,
  node: Array,
  next_token: Array,
) -> Emission:
  """The accepted path and the token after it, cut.

  Args:
    state: before the round.
    now: the round, drafted and scored.
    node: `i32[B]`, the deepest accepted node.
    next_token: `i32[B]`, drawn after it.

  Returns:
    The `Emission`; a row that is done, or met a broken node, emits nothing.
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
  """`per_node[b, node[b]]`, where B may be 1 for what all rows share."""
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


def kept_depth(state: DecodeState, draft: Draft, topology: Topology) -> Array:
  """Drafted tokens emitted if node n is the deepest accepted: `i32[B, N + 1]`.

  A path is cut after its first stop token and at the row's budget.
  """
  tree, nodes = draft.tree, draft.tree.num_nodes
  xp = np if isinstance(topology.depth, np.ndarray) else jnp
  depth, above = (
    topology.depth[:, :nodes],
    topology.ancestors[:, :nodes, :nodes],
  )
  stop = _is_stop(state, draft.tokens[:, :nodes]) & (depth > 0)  # [B, N + 1]
  cut = xp.where(above, depth[:, None, :], tree.max_depth)  # [n, ancestor]
  kept = jnp.where(stop[:, None, :], cut, tree.max_depth).min(-1)
  kept = jnp.minimum(kept, depth)
  return jnp.minimum(kept, (state.max_length - state.length)[:, None])


def by_rank(
  tree: Tree, topology: Topology, node_probs: Array
) -> tuple[Array, Array]:
  """Expected number of children of each rank that were offered and accepted.

  Args:
    tree: of the draft.
    topology: of the draft.
    node_probs: `f32[B, N + 1]`.

  Returns:
    Two arrays `f32[B, C]` of probabilities summed over nodes.
  """
  nodes, ranks = tree.num_nodes, np.arange(tree.max_children)
  is_node = topology.present[:, :nodes] & (np.arange(nodes) > 0)
  is_rank = (topology.rank[..., None] == ranks) & is_node[..., None]
  has_rank = topology.num_children[..., None] > ranks
  reach = _total(node_probs, topology.ancestors[:, :nodes, :nodes])
  return _total(reach, has_rank), _total(reach, is_rank)


def _total(values: Array, chosen: np.ndarray | Array) -> Array:
  """Sums of `f32[B, n]` over what is chosen, `bool[B or 1, n, m]`."""
  times = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
  chosen = chosen.astype(np.float32)
  if isinstance(chosen, np.ndarray):
    return times(values, chosen[0])
  return times(values[:, None], chosen)[:, 0]


def log_probs(logits: Array, emission: Emission) -> Array:
  """Unwarped log-probabilities of `emission.tokens`, `f32[B, G + 1]`."""
  rows = jnp.arange(logits.shape[0])[:, None]
  log_z = jax.nn.logsumexp(logits, axis=-1)  # [B, N + 1]
  picked = logits[rows, emission.path, emission.tokens]
  return picked - jnp.take_along_axis(log_z, emission.path, axis=1)


def distances(verification: Verification, *, lossless: bool) -> Array:
  """`Verification.total_variation`: 0 for a lossless rule, else NaN if None."""
  if verification.total_variation is None:
    unknown = 0 if lossless else jnp.nan
    return jnp.full_like(verification.node_probs, unknown)
  return verification.total_variation


def record(
  state: DecodeState,
  now: Round,
  verification: Verification,
  emission: Emission,
  distance: Array,
) -> DecodeState:
  """The state with the emitted tokens written and everything counted.

  Args:
    state: before the round.
    now, verification, emission: of the round.
    distance: from `distances`.
  """
  draft, topology, num_experts = now.draft, now.topology, now.output.experts
  width = draft.tree.max_depth + 1
  length = state.length + emission.count
  active = ~state.done & emission.healthy
  stopped = jnp.where(
    emission.hit_stop,
    StopReason.STOP_TOKEN,
    jnp.where(
      length >= state.max_length, StopReason.LENGTH, StopReason.RUNNING
    ),
  )
  stopped = jnp.where(emission.healthy, stopped, StopReason.NAN_LOGITS)
  kept = jnp.minimum(emission.depth, emission.count)
  expected = jnp.sum(
    verification.node_probs * kept_depth(state, draft, topology), axis=1
  )
  old, one = state.counters, active.astype(jnp.int32)
  is_drafted = topology.present[:, 1 : draft.tree.num_nodes]
  drafted = is_drafted.sum(axis=1, dtype=np.int32)
  kept_one_hot = kept[:, None] == jnp.arange(width)
  # Emitted token i followed node i of the path.
  distance = jnp.take_along_axis(distance, emission.path, axis=1)
  distance = jnp.where(
    jnp.arange(width) < emission.count[:, None], distance, 0
  ).sum(1)
  offered, went_on = by_rank(draft.tree, topology, verification.node_probs)
  add = lambda total, new: (
    total
    + jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, 0).astype(
      total.dtype
    )
  )
  return dataclasses.replace(
    state,
    tokens=_write(state.tokens, emission.tokens, state.length),
    origins=_write(state.origins, emission.origins, state.length),
    length=length,
    stop_reason=jnp.where(state.done, state.stop_reason, stopped),
    counters=Counters(
      num_target_calls=old.num_target_calls + one,
      num_fed=old.num_fed + one * now.num_fed,
      num_drafts=old.num_drafts + one * (drafted > 0),
      num_drafted=old.num_drafted + one * drafted,
      num_accepted=old.num_accepted + one * kept,
      expected_accepted=add(old.expected_accepted, expected),
      accept_counts=old.accept_counts + one[:, None] * kept_one_hot,
      total_variation=add(old.total_variation, distance),
      rank_offered=add(old.rank_offered, offered),
      rank_accepted=add(old.rank_accepted, went_on),
      num_experts=None
      if old.num_experts is None or num_experts is None
      else old.num_experts + one[:, None] * num_experts,
    ),
    num_steps=state.num_steps + 1,
  )


def record_log_probs(
  state: DecodeState, logits: Array, emission: Emission, start: Array
) -> DecodeState:
  """The state with the emitted tokens' own log-probabilities from `start`."""
  assert state.log_probs is not None  # the decoder records them
  written = _write(state.log_probs, log_probs(logits, emission), start)
  return dataclasses.replace(state, log_probs=written)


def record_likeliest(
  state: DecodeState, logits: Array, emission: Emission, start: Array
) -> DecodeState:
  """The state with the likeliest tokens in each emitted one's place.

  Args:
    state: after the round was recorded.
    logits: `f32[B, N + 1, V]`, the target's own.
    emission: of the round.
    start: `i32[B]`, the place of its first token.
  """
  kept = state.likeliest
  assert kept is not None  # the decoder records them
  rows = jnp.arange(logits.shape[0])[:, None]

  def largest(logits):
    along = logits[rows, emission.path]  # [B, G + 1, V]
    values, tokens = lax.top_k(along, kept.tokens.shape[-1])
    log_z = jax.nn.logsumexp(along, axis=-1, keepdims=True)
    return tokens, (values - log_z).astype(kept.log_probs.dtype)

  shape = (*emission.path.shape, kept.tokens.shape[-1])
  wanted = kept.wanted & (emission.count > 0)
  # No loop of one turn or none: XLA would look for them before it.
  tokens, log_probs = lax.cond(
    jnp.any(wanted),
    largest,
    lambda _: (
      jnp.zeros(shape, jnp.int32),
      jnp.zeros(shape, kept.log_probs.dtype),
    ),
    logits,
  )
  written = dataclasses.replace(
    kept,
    tokens=_write(kept.tokens, tokens, start),
    log_probs=_write(kept.log_probs, log_probs, start),
  )
  return dataclasses.replace(state, likeliest=written)


def _write(buffer: Array, tokens: Array, start: Array) -> Array:
  """Writes `[B, T, ...]` into `[B, L, ...]` at each row's start."""
  return jax.vmap(lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))(
    buffer, tokens.astype(buffer.dtype), start, 0
  )
