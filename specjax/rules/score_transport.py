"""One node of `block_transport`: how a token shares in the scores of its path.

A node hands out scores. They come in N bins, the lowest first, each with the
probability `scores` of a child's score and the weight W that a score of the bin
has for selection; W increases. Its tokens come in C classes in ascending order
of q / p. The node has v of the target's mass to give (`owed`), and its children
have `share = sum(scores W)` of the selection; v <= share.

With c and Q cumulated from the classes' p and v q, and B(c) the selection that
the lowest c of the scores have, a law a of the selected token can be had iff
its cumulated A is at least B at every set. Let h be where `B - Q` is largest.
No law accepts more than one with A = B at h, `a >= v q` below h and `a <= v q`
above. `goal` is the one of these that is closest to p: that leaves most
selection for the levels below.

`hand_out` realises it by the random contiguous blocks of docs/transport.md:
while a token lies in a block, it gets that block's scores evenly. Time is
integrated out. What a class has got is summed from the blocks as they were
used, so that any bins, classes and cuts are lossless.

All functions are of one node, without a batch.
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
  """A node's problem; N bins, C classes.

  Attributes:
    edges: `f32[N + 1]`, cumulated probability of the bins, 0 to 1.
    weights: `f32[N]`, W of each bin.
    bounds: `f32[C + 1]`, cumulated p of the classes, 0 to 1.
    base: `f32[C + 1]`, B at the bounds.
    goal: `f32[C + 1]`, A at the bounds; at least B.
  """

  edges: Array
  weights: Array
  bounds: Array
  base: Array
  goal: Array


def make_node(
  scores: Array, weights: Array, draft: Array, target: Array, owed: Array
) -> Node:
  """The problem of a node, and the law that it aims at.

  Args:
    scores: `f32[N]`, the probability of each bin.
    weights: `f32[N]`.
    draft: `f32[C]`, the classes' masses under p, in ascending order of q / p.
    target: `f32[C]`, under q.
    owed: `f32[]`, v.
  """
  edges, bounds = _cumulated(scores), _cumulated(draft)
  edges /= jnp.where(edges[-1] > 0, edges[-1], 1)
  bounds /= jnp.where(bounds[-1] > 0, bounds[-1], 1)
  width = jnp.diff(edges)
  filled = jnp.clip(bounds[:, None] - edges[:-1], 0, width)  # [C + 1, N]
  base = jnp.sum(filled * weights, axis=-1)
  given = owed * _cumulated(target)
  goal = _goal(bounds, base, given)
  return Node(
    edges=edges, weights=weights, bounds=bounds, base=base, goal=goal
  )


def _cumulated(mass: Array) -> Array:
  return jnp.concatenate([jnp.zeros_like(mass[:1]), jnp.cumsum(mass)])


def _goal(bounds: Array, base: Array, given: Array) -> Array:
  """A of the admissible law that accepts most and is closest to p.

  Below h it is the larger of two curves: with `a = max(v q, lam p)`, and the
  least admissible one. Above h with `min(v q, lam p)`.

  Args:
    bounds, base, given: `f32[C + 1]`, c, B and Q.

  Returns:
    `f32[C + 1]`, at least B, and B at both ends and at h.
  """
  gap = base - given  # d
  top = jnp.argmax(gap)
  index = jnp.arange(len(gap))
  least = given + jnp.where(
    index <= top, jax.lax.cummax(gap), jax.lax.cummax(gap, reverse=True)
  )
  low, high = base[top], base[-1] - base[top]  # handed out below h, and above
  step, mass = jnp.diff(bounds), jnp.diff(given)
  steep = mass / jnp.where(step > 0, step, 1)  # v q / p
  from_left = given - given[top]
  last = lambda some: jnp.max(jnp.where(some & (step > 0), index[1:], 0))
  # Below h the classes up to `some` have slope lam, the others v q / p.
  flat_here = steep * bounds[:-1] - from_left[:-1] < low
  some = last(flat_here & (index[:-1] < top))
  slope = _ratio(low + from_left[some], bounds[some])
  flat = jnp.where(index <= some, slope * bounds, low + from_left)
  # Above h those from `rest` on have slope lam.
  left = bounds[-1] - bounds
  flat_here = steep * left[:-1] + from_left[:-1] < high
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


def hand_out(node: Node, groups: Array) -> tuple[Array, Array]:
  """Who gets which scores.

  Args:
    node: the problem.
    groups: `i32[D]`, the classes of D drafted tokens.

  Returns:
    `f32[C]`, slopes: a token x of class g is the selected one with probability
    `p(x) slopes[g]`, relative to that of the node; and `f32[D, N]`, the law of
    each drafted token's score.
  """
  index = jnp.arange(len(node.bounds), dtype=jnp.int32)
  need = node.goal - node.base
  cut = need <= 4 * jnp.finfo(need.dtype).eps * node.base[-1]
  cut |= (index == 0) | (index == len(index) - 1)

  def blocks_of(cut):
    """Start and end of the block of every class, `f32[C]`."""
    start = jax.lax.cummax(jnp.where(cut, node.bounds, 0))[:-1]
    end = jax.lax.cummin(jnp.where(cut, node.bounds, 1), reverse=True)[1:]
    return start, end

  def shares_of(start, end):
    """The laws of the scores that classes get now, `f32[C, N]`."""
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
    low = jnp.max(
      jnp.where(
        cut & (index <= index[:-1, None]), node.base, 0
      ), axis=1
    )  # fmt: skip
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
  return shares @ node.weights, shares[groups]
