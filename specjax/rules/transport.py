"""The optimal transport rule for k i.i.d. drafts: the exact optimum.

docs/optimum.md derives it. In two steps:

1. Select one of the k candidates, by a rule that depends only on their ratios
   q / p; let a be the distribution of the selected token.
2. Verify it as a single draft with distribution a: accept with `min(1, q / a)`,
   residual `norm([q - a]_+)`. This is lossless whatever a is, and accepts with
   probability `sum min(a, q)` (Khisti et al., ICLR 2025).

A selection can have any distribution a with `a(S) >= p(S)^k` for all S. With
tokens in ascending order of q / p and c, Q the cumulative sums of p, q, the
best is `diff(A)`,

  A = Q + (the running maximum of d = c^k - Q, from both ends to its maximum),

which accepts with probability `1 - max d`, the optimum. It is realized by
random contiguous blocks. The boundary between two neighbors in the order has a
level t_i; for t uniform in [0, 1] the order is cut where `t_i <= t`, and one of
the candidates in the same block as the one of highest ratio is picked
uniformly. Given t the selected token's cumulative distribution is the chord of
c^k between the cuts; the levels are chosen such that these chords average to A.
The random t is integrated out in closed form: with T_j the smallest level
between candidate j and the first, sorted,

  P(select candidate i) = sum_{m >= i} (T_m - T_{m+1}) / m.

Tokens are grouped into classes (`ratio_classes`): single tokens in vocabularies
of up to 1,024, else 256 classes for two drafts and 512 for more. The tokens of
a class share a slope, and a is computed from the very blocks that are used. So
classes and the rounding of levels only affect how close to the optimum it is
(above 0.999 of it at V = 128,000), not losslessness, which holds up to the
rounding of sums.

Gradients treat levels and slopes as constants.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from specjax import distributions, random
from specjax.rules import recursive, requirements
from specjax.rules.nodewise import Decision, verify_nodes
from specjax.rules.ratio_classes import (
  RatioClasses,
  histogram,
  quantiles,
  single_tokens,
)
from specjax.types import Rule

# Larger vocabularies use classes, joined from finer ones.
_MOST_TOKENS = 1024
_NUM_FINE = 4096


def decide(target_log_probs, draft_log_probs, tokens, valid):
  """See `specjax.rules.nodewise.DecideFn`."""
  if len(tokens) == 1:  # nothing to select from
    return recursive.decide(target_log_probs, draft_log_probs, tokens, valid)
  draft_log_probs = draft_log_probs[0]
  constant = jax.lax.stop_gradient((target_log_probs, draft_log_probs))
  classes = classes_of(*constant, len(tokens))
  levels, slopes = selection(
    classes.draft, classes.target, jnp.sum(valid), most=len(tokens)
  )
  weights = jnp.exp(draft_log_probs) * slopes[classes.ids]  # a, [V]
  target = jnp.exp(target_log_probs)
  test = distributions.share(target[tokens], weights[tokens])
  return Decision(
    accept=pick_probs(levels, classes.ids[tokens], valid) * test,
    next_log_probs=distributions.normalize(
      jnp.maximum(target - weights, 0), target_log_probs
    ),
  )


def classes_of(target_log_probs, draft_log_probs, most: int) -> RatioClasses:
  """Single tokens, or enough classes for 0.999 of the optimum."""
  if len(target_log_probs) <= _MOST_TOKENS:
    return single_tokens(target_log_probs, draft_log_probs)
  # No token is selected more than k times as often as drafted, so ratios above
  # k are equivalent.
  fine = histogram(
    target_log_probs,
    draft_log_probs,
    num_classes=_NUM_FINE,
    high=max(math.log(most), 0.1),
  )
  return quantiles(fine, num_classes=256 if most <= 2 else 512)


def selection(
  draft: Array, target: Array, count: Array, *, most: int
) -> tuple[Array, Array]:
  """Levels of the boundaries, and the selected class's distribution.

  Boundary i is below class i; i = 0 and i = G are the ends. Time t runs from 0
  to 1. Every uncut boundary accumulates the height of its chord above c^k, and
  is cut once it has `A - c^k`: then, on average over t, the chords are A. Each
  cut lowers the chords of its block.

  Args:
    draft: `f32[G]`, the classes' masses under p, in ascending order of q / p.
    target: `f32[G]`, under q.
    count: `i32[]`, k.
    most: a static bound on k.

  Returns:
    `f32[G + 1]` levels in [0, 1], and `f32[G]` slopes: a token of class g is
    selected with probability `p(x) slopes[g]`. Slopes are integrated over time
    from the blocks, `(c_e^k - c_s^k) / (c_e - c_s)`; differences of the chords
    would cancel.
  """
  zero = jnp.zeros_like(draft[:1])
  cumulative = jnp.concatenate([zero, jnp.cumsum(draft)])  # c
  cumulative /= jnp.maximum(cumulative[-1], jnp.finfo(draft.dtype).tiny)
  given = jnp.concatenate([zero, jnp.cumsum(target)])  # Q
  base = cumulative ** jnp.maximum(count, 1)  # c^k
  index = jnp.arange(len(base), dtype=jnp.int32)
  last = len(base) - 1
  goal = _goal(base, given) - base  # A - c^k >= 0
  is_cut = (index == 0) | (index == last)
  is_cut |= goal <= 4 * jnp.finfo(base.dtype).eps

  def slope_of(start, end):  # sum_j c_e^j c_s^{k-1-j}
    total, power = jnp.zeros_like(start), jnp.ones_like(end)
    for j in range(most):
      total = jnp.where(j < count, total * start + power, total)
      power = power * end
    return total

  def unfinished(state):
    time, _, _, is_cut, *_ = state
    return (time < 1) & ~is_cut.all()

  def cut_next(state):
    time, gained, slopes, is_cut, levels, start, end = state
    # An uncut boundary is in the block of the class above it.
    rate = jnp.zeros_like(base)
    steep = slope_of(start, end)
    chord = start ** jnp.maximum(count, 1) + steep * (cumulative[:-1] - start)
    rate = rate.at[:-1].set(jnp.maximum(chord - base[:-1], 0))
    rate = jnp.where(is_cut, 0, rate)
    wait = jnp.maximum(goal - gained, 0) / jnp.where(rate > 0, rate, 1)
    due = jnp.where(rate > 0, time + wait, jnp.inf)
    # Cutting a boundary whose chord has no height makes no difference.
    now = jnp.minimum(jnp.min(due), 1)
    at = random.argmax(-due)
    gained = gained + rate * (now - time)
    slopes = slopes + steep * (now - time)
    here = (index == at) & (now < 1)
    levels = jnp.where(here, now, levels)
    # Blocks of the classes above now start here, those below end here.
    above = (index[:-1] >= at) & (now < 1)
    below = (index[:-1] < at) & (now < 1)
    start = jnp.where(above, jnp.maximum(start, cumulative[at]), start)
    end = jnp.where(below, jnp.minimum(end, cumulative[at]), end)
    return now, gained, slopes, is_cut | here, levels, start, end

  start = jax.lax.cummax(jnp.where(is_cut, cumulative, 0))[:-1]
  end = jax.lax.cummin(jnp.where(is_cut, cumulative, 1), reverse=True)[1:]
  state = (
    zero[0],
    jnp.zeros_like(base),
    jnp.zeros_like(draft),
    is_cut,
    jnp.where(is_cut, zero[0], 1),
    start,
    end,
  )
  state = jax.lax.while_loop(unfinished, cut_next, state)
  time, _, slopes, _, levels, start, end = state
  # Once all are cut, blocks stay as they are.
  return levels, slopes + slope_of(start, end) * (1 - time)


def _goal(base: Array, given: Array) -> Array:
  """A: the least admissible cumulative distribution, `f32[G + 1]`."""
  gap = base - given  # d
  peak = jnp.argmax(gap)
  index = jnp.arange(len(gap))
  rising = jax.lax.cummax(gap)
  falling = jax.lax.cummax(gap, reverse=True)
  return given + jnp.where(index <= peak, rising, falling)


def pick_probs(levels: Array, group: Array, valid: Array) -> Array:
  """The probability that each candidate is the selected one.

  Args:
    levels: `f32[G + 1]`, of the boundaries.
    group: `i32[C]`, the candidates' classes.
    valid: `bool[C]`.

  Returns:
    `f32[C]`; it sums to 1 if any candidate is valid.
  """
  highest = jnp.max(jnp.where(valid, group, -1))
  boundary = jnp.arange(len(levels))
  between = (boundary > group[:, None]) & (boundary <= highest)  # [C, G + 1]
  until = jnp.min(jnp.where(between, levels, 1), axis=1)  # T, time together
  until = jnp.where(valid, until, 0)
  # A candidate shares with all that stay at least as long:
  # sum_m (T_m - T_{m+1}) / m.
  ordered = -jnp.sort(-until)
  step = ordered - jnp.concatenate([ordered[1:], jnp.zeros_like(ordered[:1])])
  shares = step / jnp.arange(1, len(until) + 1)
  from_here = jnp.cumsum(shares[::-1])[::-1]
  rank = jnp.sum(ordered > until[:, None], axis=1)  # of its first equal
  return jnp.where(valid, from_here[jnp.minimum(rank, len(until) - 1)], 0)


def check(tree, siblings) -> None:
  """Raises ValueError unless siblings are independent."""
  requirements.independent("transport", tree, siblings)


RULE = Rule(
  name="transport", verify=verify_nodes(decide), lossless=True, check=check
)
