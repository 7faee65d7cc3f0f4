"""One node of `block_transport`: how a token shares in the scores of its path.

A node hands out scores. They come in N bins, the lowest first, each with the
probability of a child's score to be there and the weight W that a score has for
selection, which does not fall. Its tokens are of C types (`ratio_types`), the
lowest q / p first. The node owes v of the target's mass, and its children have
`share = sum(scores W)` of the selection, at least v.

With c and Q cumulated from the types' p and v q, and B(c) the selection that
the lowest c of the scores have, a law a of the selected token can be had if its
cumulated A is nowhere below B. Let h be where `B - Q` is largest. No law
accepts more than one with A = B at h, `a >= v q` below h and `a <= v q` above
(docs/transport.md, where B is c^k). `make_node` aims at the one of these that
is closest to p: it leaves most selection for the levels below.

`hand_out` realises it by the random contiguous blocks of docs/transport.md:
while a type lies in a block, it gets the block's scores evenly. Time is
integrated out. What a type gets is summed from the blocks as they were used,
so that any bins, types and cuts are lossless.

Functions are of one node, without a batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["edges", "weights", "bounds", "base", "goal"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
  """A node's problem; N bins, C types.

  Attributes:
    edges: `f32[N + 1]`, cumulated probability of the bins, 0 to 1.
    weights: `f32[N]`, W of each bin.
    bounds: `f32[C + 1]`, cumulated p of the types, 0 to 1.
    base: `f32[C + 1]`, B at the bounds.
    goal: `f32[C + 1]`, A at the bounds; at least B.
  """

  edges: Array
  weights: Array
  bounds: Array
  base: Array
  goal: Array


def make_node(
  scores: Array, weights: Array, masses: Array, wanted: Array
) -> Node:
  """The problem of a node, and the law that it aims at.

  Args:
    scores: `f32[N]`, the probability of each bin.
    weights: `f32[N]`.
    masses: `f32[C]`, the types' p.
    wanted: `f32[C]`, their `v q / p`, ascending.
  """
  edges, bounds = _cumulated(scores), _cumulated(masses)
  edges /= jnp.where(edges[-1] > 0, edges[-1], 1)
  bounds /= jnp.where(bounds[-1] > 0, bounds[-1], 1)
  filled = jnp.clip(bounds[:, None] - edges[:-1], 0, jnp.diff(edges))
  base = jnp.sum(filled * weights, axis=-1)
  given = _cumulated(wanted * jnp.diff(bounds))
  return Node(
    edges=edges,
    weights=weights,
    bounds=bounds,
    base=base,
    goal=_goal(bounds, base, given, wanted),
  )


def _cumulated(mass: Array) -> Array:
  return jnp.concatenate([jnp.zeros_like(mass[:1]), jnp.cumsum(mass)])


def _goal(bounds: Array, base: Array, given: Array, wanted: Array) -> Array:
  """A of the admissible law that accepts most and is closest to p.

  Below h it is the larger of two curves: with `a = max(v q, lam p)`, and the
  least admissible one. Above h with `min(v q, lam p)`.

  Args:
    bounds, base, given: `f32[C + 1]`, c, B and Q.
    wanted: `f32[C]`.

  Returns:
    `f32[C + 1]`, at least B, and B at both ends and at h.
  """
  gap = base - given  # d
  top = jnp.argmax(gap)
  index = jnp.arange(len(gap))
  outer = jnp.where(
    (index <= top)[:, None], index <= index[:, None], index >= index[:, None]
  )
  least = given + jnp.max(jnp.where(outer, gap, -jnp.inf), axis=1)
  low, high = base[top], base[-1] - base[top]  # handed out below h, and above
  step = jnp.diff(bounds)
  from_left = given - given[top]
  last = lambda some: jnp.max(jnp.where(some & (step > 0), index[1:], 0))
  # Below h the types up to `some` have slope lam, the others v q / p.
  flat_here = wanted * bounds[:-1] - from_left[:-1] < low
  some = last(flat_here & (index[:-1] < top))
  slope = _ratio(low + from_left[some], bounds[some])
  flat = jnp.where(index <= some, slope * bounds, low + from_left)
  # Above h those from `rest` on have slope lam.
  left = bounds[-1] - bounds
  flat_here = wanted * left[:-1] + from_left[:-1] < high
  rest = jnp.maximum(last(flat_here & (index[:-1] >= top)), top)
  slope = _ratio(high - from_left[rest], left[rest])
  above = jnp.where(
    (index > rest) & (left[rest] > 0),
    base[-1] - slope * left,
    low + from_left,
  )
  flat = jnp.where(index <= top, flat, above)
  ends = (index == 0) | (index == top) | (index == len(gap) - 1)
  return jnp.where(ends, base, jnp.maximum(jnp.maximum(flat, least), base))


def _ratio(top: Array, bottom: Array) -> Array:
  return jnp.where(bottom > 0, top / jnp.where(bottom > 0, bottom, 1), 0)


def hand_out(node: Node) -> Array:
  """The law of the score that a token of each type has, `f32[C, N]`."""
  index = jnp.arange(len(node.bounds), dtype=jnp.int32)
  need = node.goal - node.base
  cut = need <= 4 * jnp.finfo(need.dtype).eps * node.base[-1]
  cut |= (index == 0) | (index == len(index) - 1)

  below = index <= index[:-1, None]  # [C, C + 1], bounds below a type

  def blocks_of(cut):
    """Start and end of the block of every type, `f32[C]`."""
    start = jnp.max(jnp.where(cut & below, node.bounds, 0), axis=1)
    end = jnp.min(jnp.where(cut & ~below, node.bounds, 1), axis=1)
    return start, end

  def shares_of(start, end):
    """The laws of the scores that types get now, `f32[C, N]`."""
    width = (end - start)[:, None]
    place = (node.edges - start[:, None]) / jnp.where(width > 0, width, 1)
    step = node.edges >= end[:, None]
    place = jnp.where(width > 0, jnp.clip(place, 0, 1), step)
    return jnp.diff(place.at[:, 0].set(0).at[:, -1].set(1), axis=1)

  def unfinished(state):
    time, cut, *_ = state
    return (time < 1) & ~cut.all()

  def cut_next(state):
    time, cut, got, shares = state
    start, end = blocks_of(cut)
    now = shares_of(start, end)
    slope = now @ node.weights
    low = jnp.max(jnp.where(cut & below, node.base, 0), axis=1)
    chord = low + slope * (node.bounds[:-1] - start)
    rate = jnp.maximum(chord - node.base[:-1], 0)
    rate = jnp.where(cut, 0, jnp.append(rate, 0))
    wait = jnp.maximum(need - got, 0) / jnp.where(rate > 0, rate, 1)
    wait = jnp.where(rate > 0, wait, jnp.inf)
    first = jnp.min(wait)
    step = jnp.minimum(first, 1 - time)
    due = (wait <= first) & (first < 1 - time)
    return time + step, cut | due, got + rate * step, shares + now * step

  zeros = jnp.zeros((len(index) - 1, len(node.weights)), need.dtype)
  state = (jnp.zeros_like(need[0]), cut, jnp.zeros_like(need), zeros)
  time, cut, _, shares = jax.lax.while_loop(unfinished, cut_next, state)
  # Once all are cut, blocks stay as they are.
  shares += shares_of(*blocks_of(cut)) * (1 - time)
  return shares
