"""Tokens as mixtures of few types of fixed q / p.

The best verification of i.i.d. drafts depends on a token through its ratio
q / p alone. Between two knots z < z' of the ratio a token of p and q is a
mixture of two: with

  u = (q - z p) / ((z' - z) p)

of type z' and else of type z, which have these very ratios, and together the
token's p and q. Whatever is decided by type is then linear in the ratio between
knots. A decision that is exact at the knots is off by the square of their
distance, and not by the distance as with tokens joined into classes, so that
few knots will do, and need no sort and no scatter. Below the first knot and
above the last a token is of the one type.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# Vocabularies of up to so many tokens have a knot at every token's ratio.
_MOST_TOKENS = 32
_KNOTS = np.array(
  [0, 0.2, 0.4, 0.6, 0.75, 0.9, 1, 1.15, 1.35, 1.6, 2, 2.6, 3.5, 5, 8, 16]
)
_GROUPS = 16


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["knots", "masses", "excess"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RatioTypes:
  """The types of a node's tokens, lowest ratio first.

  Attributes:
    knots: `f32[..., C]`, their q / p.
    masses: `f32[..., C]`, their probability under p.
    excess: `f32[...]`, the part of q that is in no type: of tokens above the
      last knot what exceeds it, `sum [q - z p]_+`.
  """

  knots: Array
  masses: Array
  excess: Array


def types_of(target: Array, draft: Array) -> RatioTypes:
  """The types of all tokens.

  Args:
    target, draft: `f32[..., V]`, probabilities q and p.
  """
  knots = jax.lax.stop_gradient(knots_of(target, draft))
  reached = [_sum(part) for part in _reached(target, draft, knots)]
  total = jnp.stack([_sum(draft), *reached], axis=-1)
  after = jnp.concatenate(
    [total[..., 1:], jnp.zeros_like(total[..., :1])], axis=-1
  )
  return RatioTypes(
    knots=knots,
    masses=jnp.maximum(total - after, 0),
    excess=_sum(jnp.maximum(target - knots[..., -1:] * draft, 0)),
  )


def knots_of(target: Array, draft: Array) -> Array:
  """Where the knots are, `f32[..., V]` twice to `f32[..., C]`.

  In small vocabularies at the tokens' ratios, but a thousandth apart: there are
  types of tokens that are not, and tokens are of one type to rounding.
  """
  if target.shape[-1] > _MOST_TOKENS:
    knots = jnp.asarray(_KNOTS, target.dtype)
    return jnp.broadcast_to(knots, (*target.shape[:-1], len(knots)))
  ratio = target / jnp.where(draft > 0, draft, 1)
  place = jnp.sort(jnp.log1p(jnp.where(draft > 0, ratio, 0)), axis=-1)
  apart = 1e-3 * jnp.arange(place.shape[-1], dtype=place.dtype)
  return jnp.expm1(jax.lax.cummax(place - apart, axis=place.ndim - 1) + apart)


def _reached(target: Array, draft: Array, knots: Array) -> Iterator[Array]:
  """The part of each token's p that is of the m-th type or a higher one.

  Args:
    target, draft: `f32[..., V]`.
    knots: `f32[..., C]`.

  Yields:
    `f32[..., V]` for m = 1, .., C - 1, in [0, p] and falling with m.
  """
  for low in range(knots.shape[-1] - 1):
    below, above = knots[..., low, None], knots[..., low + 1, None]
    up = 1 / (above - below)
    yield jnp.clip(target * up - draft * (below * up), 0, draft)


def parts(target: Array, draft: Array, knots: Array) -> Array:
  """Of which types tokens are.

  Args:
    target, draft: `f32[..., D]`, q and p of D tokens of each node.
    knots: `f32[..., C]`.

  Returns:
    `f32[..., D, C]`; sums to 1, and is the first type where p = 0.
  """
  some = jnp.where(draft > 0, draft, 1)
  reached = [part / some for part in _reached(target, draft, knots)]
  ones = jnp.ones_like(draft)
  reached = jnp.stack([ones, *reached, jnp.zeros_like(draft)], axis=-1)
  return reached[..., :-1] - reached[..., 1:]


def mixed(target: Array, draft: Array, knots: Array, values: Array) -> Array:
  """`p(x)` times the value of x, where types have values.

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


def _sum(mass: Array) -> Array:
  """Sums over the vocabulary, `f32[..., V] -> f32[...]`."""
  return jnp.sum(mass, axis=-1)
