"""The warp: from logits to the distribution that tokens are drawn from.

Draft and target go through the same function, in float32, in the usual order:
temperature, top-k, top-p, min-p. A lossless rule reproduces the warped target's
distribution. Penalties come first (`specjax.penalties`), for the target alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax import calls, random
from specjax import penalties as penalties_lib
from specjax.types import Sampling


def make_sampling(
  batch: int,
  *,
  temperature=1.0,
  top_k=None,
  top_p=None,
  min_p=None,
  **penalties,
) -> Sampling:
  """Broadcasts scalars or per-row sequences to `[B]` arrays.

  Args:
    batch: B.
    temperature: at least 0; 0 is greedy.
    top_k: at least 0; 0 keeps all tokens. None does so statically: changing
      None to a number compiles another program, changing the number does not.
    top_p: in (0, 1], or None for 1.
    min_p: in [0, 1], or None for 0.
    **penalties: those of `specjax.penalties.make`: `presence_penalty`,
      `frequency_penalty`, `repetition_penalty` and `min_tokens`;
      `logit_bias`, biases by token, or a mapping for each row;
      `stop_token_ids`, or those of each row. Going from none of these to any
      compiles another program too.

  Raises:
    ValueError: for values out of range (checked when they are concrete).
    TypeError: for an unknown argument.
  """
  known = tuple(penalties_lib.make.__kwdefaults__ or ())
  for name in penalties.keys() - {*known}:
    near = calls.guess(name, ("temperature", "top_k", "top_p", "min_p", *known))
    raise TypeError(
      f"make_sampling has no argument {name!r}{near} (budgets, stop tokens and "
      "seeds are arguments of specjax.Engine or Decoder.init)"
    )

  finite = lambda x: (x >= 0) & (x < jnp.inf)
  each: dict[str, Any] = {
    name: x if x is None else penalties_lib.per_row(batch, name, x, *kind)
    for name, x, *kind in (
      ("temperature", temperature, jnp.float32, finite, "finite and >= 0"),
      ("top_k", top_k, jnp.int32, lambda x: x >= 0, ">= 0"),
      ("top_p", top_p, jnp.float32, lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
      ("min_p", min_p, jnp.float32, lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
    )
  }
  return Sampling(**each, penalties=penalties_lib.make(batch, **penalties))


def match_state(row: Sampling | None, state: Sampling) -> Sampling:
  """One row's sampling, with the same fields as a running state's.

  A `row` of None is temperature 1 without truncation.

  Raises:
    ValueError: for a truncation that the program lacks, or penalties without
      room for them.
  """
  row = row or make_sampling(1)
  neutral = make_sampling(1, top_k=0, top_p=1.0, min_p=0.0)
  padded = {}
  for name in ("top_k", "top_p", "min_p"):
    known, wanted = getattr(state, name), getattr(row, name)
    if known is None and wanted is not None:
      raise ValueError(
        f"this state's program has no {name}: begin it with a {name} that "
        "keeps all tokens"
      )
    if known is not None and wanted is None:
      padded[name] = getattr(neutral, name)
  penalties = penalties_lib.match_state(row.penalties, state.penalties)
  return dataclasses.replace(row, **padded, penalties=penalties)


# Lower temperatures above 0 would scale logits to infinity. At this one, as at
# 0, the distribution is a point mass unless logits differ by less than this.
_COLDEST = 1e-30


def of_running(sampling: Sampling, done: Array) -> Sampling:
  """The sampling without finished rows' truncations, which need a sort."""
  top_k, top_p = sampling.top_k, sampling.top_p
  return dataclasses.replace(
    sampling,
    top_k=None if top_k is None else jnp.where(done, 0, top_k),
    top_p=None if top_p is None else jnp.where(done, 1, top_p),
  )


def warp(logits: Array, sampling: Sampling) -> Array:
  """Turns logits into log-probabilities.

  - temperature t > 0 divides the logits; 0 gives a point mass on the largest
    logit, the first of equals.
  - top-k keeps the k largest logits, and ties with the k-th.
  - top-p keeps a token if the tokens strictly more probable than it have mass
    below p (under the distribution left by top-k); ties are kept or dropped
    together, so the map does not depend on the order of the vocabulary.
  - min-p keeps tokens of at least `min_p` times the largest probability.

  Args:
    logits: `f32[B, ..., V]` (lower precisions are cast first).
    sampling: `[B]` fields.

  Returns:
    `f32[B, ..., V]` log-probabilities, -inf where a token was dropped; all NaN
    where any logit is NaN, or none is above -inf.
  """
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  expand = (slice(None),) + (None,) * (logits.ndim - 1)
  per_row = lambda x: x[expand]
  temperature = per_row(sampling.temperature).astype(logits.dtype)
  greedy = temperature == 0
  # Differences from the largest logit are exact near it. Dividing first would
  # round each of two numbers near 1e4, and probabilities might not sum to one.
  scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
  scaled /= jnp.where(greedy, 1, jnp.maximum(temperature, _COLDEST))
  if sampling.top_k is not None or sampling.top_p is not None:
    rows = sampling.temperature.shape
    top_k, top_p = sampling.top_k, sampling.top_p
    top_k = jnp.zeros(rows, jnp.int32) if top_k is None else top_k
    top_p = jnp.ones(rows) if top_p is None else top_p
    scaled = lax.cond(
      jnp.any((top_k > 0) | (top_p < 1)),
      lambda x: _truncate(x, per_row(top_k), per_row(top_p).astype(x.dtype)),
      lambda x: x,
      scaled,
    )
  if sampling.min_p is not None:
    largest = jnp.max(scaled, axis=-1, keepdims=True)
    floor = jnp.log(per_row(sampling.min_p).astype(scaled.dtype)) + largest
    scaled = jnp.where(scaled < floor, -jnp.inf, scaled)
  best = random.argmax(logits)[..., None]
  point = jnp.arange(logits.shape[-1]) == best
  warped = jax.nn.log_softmax(scaled, axis=-1)
  point = jnp.where(point, 0, -jnp.inf).astype(warped.dtype)
  # Explicit, because XLA:CPU's max and min reductions ignore NaNs.
  broken = jnp.any(jnp.isnan(logits), axis=-1, keepdims=True)
  broken |= ~jnp.any(logits > -jnp.inf, axis=-1, keepdims=True)
  return jnp.where(broken, jnp.nan, jnp.where(greedy, point, warped))


def _truncate(scaled: Array, top_k: Array, top_p: Array) -> Array:
  """Applies top-k, then top-p, by thresholds read off one sort."""
  vocab = scaled.shape[-1]
  descending = -jnp.sort(-scaled, axis=-1)
  kth = jnp.take_along_axis(
    descending, jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1, -1
  )
  descending = jnp.where(descending < kth, -jnp.inf, descending)
  probs = jax.nn.softmax(descending, axis=-1)
  before = jnp.cumsum(probs, axis=-1) - probs  # mass of earlier tokens
  # Ties share the mass before the first of them: the smallest value whose
  # first occurrence is kept is the threshold.
  first = jnp.concatenate(
    [
      jnp.ones_like(descending[..., :1], bool),
      descending[..., 1:] < descending[..., :-1],
    ],
    axis=-1,
  )
  kept = (first & (before < top_p)) | (jnp.arange(vocab) == 0) | (top_p >= 1)
  threshold = jnp.min(jnp.where(kept, descending, jnp.inf), -1, keepdims=True)
  return jnp.where(scaled < jnp.maximum(threshold, kth), -jnp.inf, scaled)
