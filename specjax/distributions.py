"""Arithmetic on next-token distributions: acceptance, residuals, normalization.

A distribution is a row of log-probabilities with -inf for zero mass. No epsilon
is added, and nothing is divided by zero.
"""

import math

import jax.numpy as jnp
from jax import Array, lax


def replace_nans(log_probs: Array) -> Array:
  """Replaces NaN distributions, `f32[..., V]`, with the uniform one.

  Drafters do this before they draw, so that every rule stays lossless.
  """
  broken = jnp.isnan(log_probs).any(axis=-1, keepdims=True)
  return jnp.where(broken, -math.log(log_probs.shape[-1]), log_probs)


def token_log_prob(log_probs: Array, tokens: Array) -> Array:
  """Log-probabilities `f32[...]` of tokens `i32[...]` in `f32[..., V]`."""
  return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


def acceptance(target_log_prob: Array, draft_log_prob: Array) -> Array:
  """`min(1, q / p)` for tokens of draft probability p and target probability q.

  Takes log q and log p; returns `f32[...]` in [0, 1]. If p = 0, it is 1 where
  q > 0, else 0.
  """
  ratio = target_log_prob - draft_log_prob
  less = ratio < 0
  accept = jnp.where(less, jnp.exp(jnp.where(less, ratio, 0)), 1)
  return jnp.where(target_log_prob == -jnp.inf, 0, accept)


def share(wanted: Array, offered: Array) -> Array:
  """`min(1, wanted / offered)` of masses, without dividing by zero.

  `f32[...]` in [0, 1]. Negative `wanted` counts as zero; where nothing is
  offered, the share is 1 if anything is wanted, else 0.
  """
  less = (wanted > 0) & (wanted < offered)
  ratio = jnp.where(less, wanted, 0) / jnp.where(less, offered, 1)
  return jnp.where(less, ratio, jnp.where(wanted > 0, 1, 0)).astype(
    jnp.result_type(wanted, offered)
  )


def normalize(mass: Array, fallback: Array) -> Array:
  """`log(mass / sum(mass))`, or `fallback` where there is no mass.

  All are `f32[..., V]`, the mass non-negative, the fallback log-probabilities.
  """
  # Sum the very logarithms that are returned. A compiler may compute the mass
  # twice with different rounding, and a difference of equals is all rounding.
  # It does not recompute logarithms, which are too expensive.
  log_mass = jnp.log(jnp.where(mass > 0, mass, 0))
  most = lax.stop_gradient(jnp.max(log_mass, axis=-1, keepdims=True))
  some = most > -jnp.inf
  log_mass = log_mass - jnp.where(some, most, 0)
  total = jnp.sum(jnp.exp(log_mass), axis=-1, keepdims=True)
  return jnp.where(
    some, log_mass - jnp.log(jnp.where(some, total, 1)), fallback
  )


def rejection(target: Array, draft: Array, scale: Array) -> Array:
  """`R(scale) = sum([q - scale p]_+)`, the rejection function.

  R(0) = 1, R(1) = TV(p, q); R is convex and nonincreasing. Recursive rejection
  of m i.i.d. drafts rejects all of them with probability R(s_m), where s_0 = 0,
  s_{j+1} = s_j + R(s_j); its residual is `norm([q - s_m p]_+)`.

  Args:
    target: `f32[..., V]`, probabilities q.
    draft: `f32[..., V]`, probabilities p.
    scale: `f32[...]`, at least 0.

  Returns:
    `f32[...]`.
  """
  less = scale[..., None] * draft
  return jnp.sum(jnp.where(target > less, target - less, 0), axis=-1)


def residual(target_log_probs: Array, draft_log_probs: Array) -> Array:
  """The residual `norm([q - p]_+)` after a rejection; q itself where it is 0/0.

  A leaf's draft row is all -inf, so its residual is the target's distribution:
  the bonus token is no special case.

  Args:
    target_log_probs: `f32[..., V]`, log q.
    draft_log_probs: `f32[..., V]`, log p.

  Returns:
    `f32[..., V]` log-probabilities.
  """
  excess = jnp.maximum(jnp.exp(target_log_probs) - jnp.exp(draft_log_probs), 0)
  return normalize(excess, target_log_probs)
