"""One node of `block_transport`: how tokens share the scores of their path.

A node's scores fall in N bins, lowest first. Each bin has the probability of a
child's score and a nondecreasing selection weight W. The node's tokens are of C
types (`ratio_types`), lowest q / p first. The node owes v of the target's mass,
and its children have `share = sum(scores W)` of the selection, at least v.

Let c and Q be the cumulative sums of the types' p and v q, and B(c) the
selection of the lowest c of the scores. The selected token can have any
distribution a whose cumulative A is nowhere below B. Let h be where `B - Q` is
largest. No distribution accepts more than one with A = B at h, `a >= v q` below
h and `a <= v q` above (docs/optimum.md, where B is c^k). `make_node` aims at
the one of these closest to p, which leaves most selection to the levels below.

`mixture` realizes it by the random contiguous blocks of docs/optimum.md: the
types in a block share its scores evenly. Blocks are independent, so each round
cuts every block that is due. Time is integrated out. A type's scores are summed
from the very blocks that are used, so any bins, types and cuts are lossless.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specjax.structs import struct


@struct
class Node:
  """The problem at each node; N bins, C types.

  Type j has its own place among the scores, between their quantiles c_j and
  c_{j + 1}.

  Attributes:
    within: `f32[..., C, N + 1]`, cumulative distribution of the scores in each
      place, 0 to 1.
    width: `f32[..., C]`, the types' p; sums to 1.
    mean: `f32[..., C]`, mean W in each place.
    base: `f32[..., C + 1]`, B at the bounds of types.
    goal: `f32[..., C + 1]`, A there; at least B.
  """

  within: Array
  width: Array
  mean: Array
  base: Array
  goal: Array


def make_node(
  edges: Array, weights: Array, masses: Array, wanted: Array
) -> Node:
  """Sets up a node's problem and the distribution to aim at.

  Args:
    edges: `f32[..., N + 1]`, cumulative probability of the bins, 0 to 1.
    weights: `f32[..., N]`, W.
    masses: `f32[..., C]`, the types' p.
    wanted: `f32[..., C]`, their `v q / p`, ascending.
  """
  bounds = _cumulated(masses)
  bounds /= jnp.where(bounds[..., -1:] > 0, bounds[..., -1:], 1)
  width = bounds[..., 1:] - bounds[..., :-1]
  start, end = bounds[..., :-1, None], bounds[..., 1:, None]
  edges, positive = edges[..., None, :], width[..., None] > 0
  within = (edges - start) / jnp.where(positive, width[..., None], 1)
  within = jnp.where(positive, jnp.clip(within, 0, 1), edges >= end)
  index = jnp.arange(edges.shape[-1])
  within = jnp.where(index == 0, 0, jnp.where(index == index[-1], 1, within))
  steps = within[..., 1:] - within[..., :-1]
  mean = jnp.sum(steps * weights[..., None, :], axis=-1)
  base = _cumulated(width * mean)
  given = _cumulated(width * wanted)
  return Node(
    within=within,
    width=width,
    mean=mean,
    base=base,
    goal=_goal(bounds, base, given, wanted),
  )


def _cumulated(mass: Array) -> Array:
  """Cumulative sums from 0, `f32[..., C] -> f32[..., C + 1]`."""
  count = mass.shape[-1]
  before = jnp.arange(count) < jnp.arange(count + 1)[:, None]
  return jnp.sum(jnp.where(before, mass[..., None, :], 0), axis=-1)


def _goal(bounds: Array, base: Array, given: Array, wanted: Array) -> Array:
  """A of the admissible distribution that accepts most and is closest to p.

  Below h it is the larger of two curves: the one of `a = max(v q, lam p)` and
  the least admissible one. Above h `a = min(v q, lam p)`. The water level lam
  is the minimum of `(B_h - Q_h + Q_k) / c_k` over the number k of flooded
  types, above h the maximum. A is at least B, and equal at both ends and at h.
  All are `f32[..., C + 1]`; `wanted` has C.
  """
  gap = base - given  # d
  index = jnp.arange(gap.shape[-1])
  top = jnp.argmax(gap, axis=-1, keepdims=True)
  low = index <= top
  outer = jnp.where(
    low[..., :, None], index <= index[:, None], index >= index[:, None]
  )
  least = given + jnp.max(
    jnp.where(outer, gap[..., None, :], -jnp.inf), axis=-1
  )
  peak = jnp.max(gap, axis=-1, keepdims=True)
  left, last = 1 - bounds, base[..., -1:]
  level = _ratio(peak + given, bounds)
  level = jnp.where(low & (bounds > 0), level, jnp.inf)
  level = jnp.min(level, axis=-1, keepdims=True)
  upper = _ratio(last - peak - given, left)
  upper = jnp.where((index >= top) & (left > 0), upper, -jnp.inf)
  upper = jnp.max(upper, axis=-1, keepdims=True)
  none = jnp.zeros_like(peak)
  flooded = low & (jnp.concatenate([none, wanted], axis=-1) < level)
  drained = ~low & (jnp.concatenate([wanted, none], axis=-1) > upper)
  flat = jnp.where(
    flooded, level * bounds,
    jnp.where(drained, last - upper * left, peak + given),
  )  # fmt: skip
  ends = (index == 0) | (index == top) | (index == index[-1])
  return jnp.where(ends, base, jnp.maximum(jnp.maximum(flat, least), base))


def _ratio(top: Array, bottom: Array) -> Array:
  return jnp.where(bottom > 0, top / jnp.where(bottom > 0, bottom, 1), 0)


def mixture(node: Node) -> Array:
  """The part of each type's scores from each place, `f32[..., C, C]`.

  Rows sum to 1; columns, weighted by `width`, to the `width` of the place.
  """
  width, base = node.width, node.base[..., :-1]
  count = width.shape[-1]
  index = jnp.arange(count, dtype=jnp.int32)
  bounds = _cumulated(width)
  start = bounds[..., :-1]
  need = node.goal[..., :-1] - base
  is_cut = need <= 4 * jnp.finfo(need.dtype).eps * node.base[..., -1:]
  is_cut |= index == 0
  # The last cut up to each type: place, c and B; the next one: -c and -B.
  place = jnp.broadcast_to(index.astype(width.dtype), start.shape)
  of_cut = jnp.stack([place, start, base, -start, -base], axis=-2)
  none = jnp.full_like(bounds[..., -1:], -1)
  ends = [-bounds[..., -1:], -node.base[..., -1:]]
  of_none = jnp.stack([none, none, none, *ends], axis=-2)[..., None]
  up_to = index <= index[:, None]
  seen = jnp.stack([up_to, up_to, up_to, ~up_to, ~up_to])

  def unfinished(state):
    return jnp.any(state[0][..., 1, :] < 1)

  def cut_next(state):
    of_types, mixed = state
    cut, since, left = jnp.moveaxis(of_types, -2, 0)
    here = (cut[..., None, None, :] > 0) & seen
    block = jnp.max(jnp.where(here, of_cut[..., None, :], of_none), axis=-1)
    first, low, low_base, high, high_base = jnp.moveaxis(block, -2, 0)
    span = -high - low
    chord = low_base - _ratio(high_base + low_base, span) * (start - low)
    rate = jnp.where(cut > 0, 0, jnp.maximum(chord - base, 0))
    wait = left / jnp.where(rate > 0, rate, 1)
    due = jnp.where(rate > 0, since + wait, jnp.inf)
    same = first[..., :, None] == first[..., None, :]  # in one block
    now = jnp.min(jnp.where(same, due[..., None, :], 1), axis=-1)
    time = now - since
    evenly = jnp.where(
      span[..., None] > 0,
      width[..., None, :] / jnp.where(span > 0, span, 1)[..., None],
      index == index[:, None],
    )
    mixed += jnp.where(same, evenly, 0) * time[..., None]
    cut = jnp.where((due <= now) & (now < 1), 1, cut)
    left = jnp.maximum(left - rate * time, 0)
    return jnp.stack([cut, now, left], axis=-2), mixed

  zeros = jnp.zeros_like(width)
  of_types = jnp.stack([is_cut.astype(need.dtype), zeros, need], axis=-2)
  mixed = jnp.zeros((*zeros.shape, count), zeros.dtype)
  return jax.lax.while_loop(unfinished, cut_next, (of_types, mixed))[-1]
