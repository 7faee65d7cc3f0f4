"""Tokens as mixtures of a few types of fixed q / p, for `block_transport`.

The best verification of i.i.d. drafts depends on a token only through its ratio
q / p. Between two knots z < z' of the ratio, a token of p and q is a mixture:
with probability

  u = (q - z p) / ((z' - z) p)

of type z', else of type z. The types have exactly these ratios, and together
the token's p and q. A decision by type is then linear in the ratio between
knots. If it is exact at the knots, its error is quadratic in their distance,
not linear as with classes of tokens. So a few knots suffice, without a sort or
scatter. Below the first knot and above the last, a token is of one type.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.structs import struct

# Vocabularies up to this size have a knot at every token's ratio.
_MOST_TOKENS = 32
# Knots for the default number of types; interpolated for others.
_KNOTS = (0, 0.4, 0.7, 1, 1.3, 1.7, 2.4, 3.5, 6, 16)
_PARTS = 32


@struct
class RatioTypes:
  """The types of a node's tokens, lowest ratio first.

  Attributes:
    knots: `f32[..., C]`, their q / p.
    masses: `f32[..., C]`, their probability under p.
    excess: `f32[...]`, the part of q that no type has: `sum [q - z p]_+` over
      tokens above the last knot z.
  """

  knots: Array
  masses: Array
  excess: Array


def types_of(
  target_log_probs: Array, draft_log_probs: Array, count: int = len(_KNOTS)
) -> RatioTypes:
  """The types of all tokens.

  Args:
    target_log_probs, draft_log_probs: `f32[..., V]`, log q and log p.
    count: C, the number of types, unless every token has its own.
  """
  if target_log_probs.shape[-1] > _MOST_TOKENS:
    place = np.linspace(0, len(_KNOTS) - 1, count)
    ratios = np.interp(place, np.arange(len(_KNOTS)), _KNOTS)
    knots = jnp.asarray(ratios, target_log_probs.dtype)
    beyond, total = _beyond(target_log_probs, draft_log_probs, knots)
    reached = (beyond[..., :-1] - beyond[..., 1:]) / jnp.diff(knots)
    reached = jnp.concatenate([total[..., None], reached], axis=-1)
    knots = jnp.broadcast_to(knots, beyond.shape)
    excess = beyond[..., -1]
  else:
    target, draft = jnp.exp(target_log_probs), jnp.exp(draft_log_probs)
    knots = jax.lax.stop_gradient(_knots_of_tokens(target, draft))
    each = [draft, *_reached(target, draft, knots)]
    reached = jnp.sum(jnp.stack(each, axis=-1), axis=-2)
    above = target - knots[..., -1:] * draft
    excess = jnp.sum(jnp.maximum(above, 0), axis=-1)
  beyond = jnp.concatenate(
    [reached[..., 1:], jnp.zeros_like(reached[..., :1])], axis=-1
  )
  return RatioTypes(
    knots=knots, masses=jnp.maximum(reached - beyond, 0), excess=excess
  )


def _knots_of_tokens(target: Array, draft: Array) -> Array:
  """Knots at all tokens' ratios, at least a thousandth apart: `f32[..., V]`."""
  ratio = target / jnp.where(draft > 0, draft, 1)
  ratio = jnp.minimum(ratio, 1e30)  # infinite for a denormal p
  place = jnp.sort(jnp.log1p(jnp.where(draft > 0, ratio, 0)), axis=-1)
  apart = 1e-3 * jnp.arange(place.shape[-1], dtype=place.dtype)
  return jnp.expm1(jax.lax.cummax(place - apart, axis=place.ndim - 1) + apart)


def _beyond(
  target_log_probs: Array, draft_log_probs: Array, knots: Array
) -> tuple[Array, Array]:
  """Sums over large V of `[q - z p]_+` at C knots, `f32[..., C]`, and of p.

  The mass of a type and all above it is their difference over that of knots.
  """
  pad = [(0, 0)] * (target_log_probs.ndim - 1)
  pad += [(0, -target_log_probs.shape[-1] % _PARTS)]
  # Compute exponentials once, not for every knot.
  target, draft = jax.lax.optimization_barrier(
    tuple(
      jnp.exp(jnp.pad(x, pad, constant_values=-jnp.inf))
      for x in (target_log_probs, draft_log_probs)
    )
  )
  # Add up parts, and reduce the rest by a product with ones: faster on a CPU.
  parts = [x.reshape(*x.shape[:-1], _PARTS, 1, -1) for x in (target, draft)]
  some = jnp.zeros((), target.dtype)
  for part in range(_PARTS):
    here = [x[..., part, :, :] for x in parts]
    over = here[0] - knots[:, None] * here[1]
    # `jnp.maximum` would take several instructions, to keep NaNs.
    some += jnp.where(over < 0, 0, over)
  total = lambda x: jnp.dot(
    x, jnp.ones_like(x, shape=x.shape[-1:]), precision=jax.lax.Precision.HIGHEST
  )
  return total(some), total(draft)


def _reached(target: Array, draft: Array, knots: Array) -> Iterator[Array]:
  """The part of each token's p in the m-th type or a higher one.

  Yields `f32[..., V]` for m = 1, .., C - 1, in [0, p] and decreasing in m.
  """
  for low in range(knots.shape[-1] - 1):
    below, above = knots[..., low, None], knots[..., low + 1, None]
    up = 1 / (above - below)
    yield jnp.clip(target * up - draft * (below * up), 0, draft)


def parts(target: Array, draft: Array, knots: Array) -> Array:
  """The mixture of types that each token is.

  Args:
    target, draft: `f32[..., D]`, q and p of D tokens of each node.
    knots: `f32[..., C]`.

  Returns:
    `f32[..., D, C]`; sums to 1, and is the first type where p = 0.
  """
  some = jnp.where(draft > 0, draft, 1)
  below, above = knots[..., None, :-1], knots[..., None, 1:]
  reached = (target / some)[..., None] - below
  reached = jnp.clip(reached / (above - below), 0, 1)
  reached = jnp.where(draft[..., None] > 0, reached, 0)
  one = jnp.ones_like(draft)[..., None]
  return jnp.concatenate([one, reached], axis=-1) - jnp.concatenate(
    [reached, jnp.zeros_like(one)], axis=-1
  )


def mixed(target: Array, draft: Array, knots: Array, values: Array) -> Array:
  """`p(x)` times the value of x, the mean value of its types.

  Args:
    target, draft: `f32[..., V]`.
    knots, values: `f32[..., C]`.

  Returns:
    `f32[..., V]`.
  """
  total = draft * values[..., :1]
  steps = jnp.diff(values, axis=-1)
  for index, part in enumerate(_reached(target, draft, knots)):
    total += part * steps[..., index, None]
  return total
