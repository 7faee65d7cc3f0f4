"""Classes of tokens by q / p, for optimal transport over large vocabularies.

The best verification of i.i.d. drafts depends on a token only through q / p, so
tokens of nearly equal ratio can be treated as one. A node's problem shrinks
from V tokens to G classes, with two sums over the vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

# Ratios below exp(_LOW) are one class: q has little mass there.
_LOW = -3.0


def log_ratio(target_log_probs: Array, draft_log_probs: Array) -> Array:
  """`log(q / p)`, +inf where p = 0 (whatever q is).

  Args:
    target_log_probs, draft_log_probs: `f32[..., V]`.

  Returns:
    `f32[..., V]`, never NaN.
  """
  undrafted = draft_log_probs == -jnp.inf
  ratio = target_log_probs - jnp.where(undrafted, 0, draft_log_probs)
  return jnp.where(undrafted, jnp.inf, ratio)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatioClasses:
  """G classes of tokens, lowest q / p first.

  Attributes:
    ids: `i32[V]`, each token's class.
    draft: `f32[G]`, the classes' masses under p.
    target: `f32[G]`, under q.
  """

  ids: Array
  draft: Array
  target: Array


def single_tokens(
  target_log_probs: Array, draft_log_probs: Array
) -> RatioClasses:
  """One class per token, by one sort; both arguments are `f32[V]`."""
  order = jnp.argsort(log_ratio(target_log_probs, draft_log_probs))
  index = jnp.arange(len(order), dtype=jnp.int32)
  return RatioClasses(
    ids=jnp.zeros_like(index).at[order].set(index),
    draft=jnp.exp(draft_log_probs[order]),
    target=jnp.exp(target_log_probs[order]),
  )


def histogram(
  target_log_probs: Array,
  draft_log_probs: Array,
  *,
  num_classes: int,
  high: float,
) -> RatioClasses:
  """Classes of equal width in `log(q / p)`, without a sort.

  Class 0 has all ratios below exp(-3), class G - 2 those of exp(high) or more,
  class G - 1 the tokens that are never drafted (p = 0).

  Args:
    target_log_probs, draft_log_probs: `f32[V]`.
    num_classes: G, at least 4.
    high: the upper end of the equally wide classes, in nats.
  """
  ratio = log_ratio(target_log_probs, draft_log_probs)
  inner = num_classes - 3
  width = (high - _LOW) / inner
  place = jnp.floor((ratio - _LOW) / width) + 1
  ids = jnp.clip(place, 0, num_classes - 2).astype(jnp.int32)
  ids = jnp.where(draft_log_probs == -jnp.inf, num_classes - 1, ids)
  masses = jnp.exp(jnp.stack([draft_log_probs, target_log_probs], axis=-1))
  sums = _sum_by(ids, masses, num_classes)
  return RatioClasses(ids=ids, draft=sums[:, 0], target=sums[:, 1])


def _sum_by(ids: Array, masses: Array, num_classes: int) -> Array:
  """Sums of masses by class, `i32[V], f32[V, n] -> f32[G, n]`.

  Large vocabularies are summed in up to 32 interleaved parts: a sequential
  float32 sum of a hundred thousand equal terms is off by about 1e-4.
  """
  parts = min(max(len(ids) // 2048, 1), 32)
  pad = -len(ids) % parts
  ids = jnp.pad(ids, (0, pad)).reshape(-1, parts)
  masses = jnp.pad(masses, ((0, pad), (0, 0))).reshape(-1, parts, 2)
  total = jax.vmap(
    lambda x, i: jax.ops.segment_sum(x, i, num_classes), in_axes=1
  )
  return total(masses, ids).sum(0)


def quantiles(fine: RatioClasses, *, num_classes: int) -> RatioClasses:
  """Joins the classes of a histogram into classes of about equal weight.

  A class's weight is four parts its mass, half under p and half under q, and
  one part its width.

  Args:
    fine: from `histogram`, with F classes.
    num_classes: G; the last holds the tokens that are never drafted.
  """
  num_fine = len(fine.draft)
  weight = 0.4 * (fine.draft + fine.target) + 0.2 / num_fine
  middle = jnp.cumsum(weight) - weight / 2
  place = jnp.floor(middle / jnp.sum(weight) * (num_classes - 1))
  groups = jnp.clip(place, 0, num_classes - 2).astype(jnp.int32)
  groups = groups.at[-1].set(num_classes - 1)
  masses = jnp.stack([fine.draft, fine.target], axis=-1)
  sums = jax.ops.segment_sum(masses, groups, num_classes)
  return RatioClasses(ids=groups[fine.ids], draft=sums[:, 0], target=sums[:, 1])
