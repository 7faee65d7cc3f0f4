"""Estimates acceptance probabilities from a row's own finished rounds.

A draft's confidence is not its acceptance probability: a uniform distribution
is always accepted if the target's is uniform too. So the largest probability of
the draft's distribution (at temperature 1) is binned, and each bin keeps the
mean of `min(1, q / p)`, both of tokens drawn from such distributions and of the
tokens after them. A token's weight is the acceptance of those before it, so
tokens after a probable rejection count for little. Estimates belong to one row,
so rows stay independent; old rounds fade, so a row that has stopped drafting
tries again.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.structs import struct

EDGES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.93, 0.98)
BINS = len(EDGES) + 1
ROOT = BINS  # the context before the first token
_NEXT = 0.75  # acceptance of the next token, before anything is known
# Prior acceptance of a token by its bin: halfway between the draft's confidence
# and 1.
_PRIOR = (*(1 + np.add((0, *EDGES), (*EDGES, 1)) / 2) / 2, _NEXT)
_WEIGHT = 4.0  # rounds that the priors count for
_KEEP = 0.98  # factor on the sums after every round


@struct
class FinishedRound:
  """A finished round, for a policy to learn from.

  Attributes:
    top: `f32[B, G]`, the largest probability of each token's draft distribution
      at temperature 1.
    confidence: `f32[B, G]`, the token's own probability there.
    accept: `f32[B, G]`, `min(1, q / p)` of each token.
    drafted: `i32[B]`, number of drafted tokens.
    kept: `i32[B]`, how many of them were committed.
    active: `bool[B]`, rows that emitted something. The others are done, or had
      NaN distributions, and learn nothing.
  """

  top: Array
  confidence: Array
  accept: Array
  drafted: Array
  kept: Array
  active: Array

  @classmethod
  def zeros(cls, rows: int, depth: int) -> "FinishedRound":
    """An empty round."""
    each = jnp.zeros((rows, depth), jnp.float32)
    none = jnp.zeros(rows, jnp.int32)
    return cls(
      top=each, confidence=each, accept=each, drafted=none, kept=none,
      active=jnp.zeros(rows, bool),
    )  # fmt: skip


@struct
class Estimates:
  """Running sums of acceptance and cost, per row.

  Attributes:
    accepted: `f32[B, 2, BINS + 1]`, the sum of `min(1, q / p)` by the bin of
      the token's own distribution, and by that of the token before it.
    seen: `f32[B, 2, BINS + 1]`, the number of tokens in that sum.
    tokens: `f32[B]`, expected tokens of its rounds.
    seconds: `f32[B]`, their cost; a round without a draft costs 1.
  """

  accepted: Array
  seen: Array
  tokens: Array
  seconds: Array

  @classmethod
  def zeros(cls, rows: int) -> "Estimates":
    """Estimates before the first round."""
    table = jnp.zeros((rows, 2, BINS + 1), jnp.float32)
    return cls(
      accepted=table, seen=table, tokens=table[:, 0, 0], seconds=table[:, 0, 0]
    )

  def acceptance(self, bins: Array) -> Array:
    """Acceptance of a token in this bin, `i32[B] -> f32[B]`."""
    return self._mean(0, bins, jnp.asarray(_PRIOR, jnp.float32)[bins])

  def next_acceptance(self, bins: Array) -> Array:
    """Acceptance of the token after one in this bin, or after the root."""
    return self._mean(1, bins, _NEXT)

  def typical(self, level: int) -> Array:
    """`f32[B]`, survival of token `level + 1` in an average round."""
    root = self.next_acceptance(jnp.full(len(self.tokens), ROOT))
    total = lambda table: jnp.sum(table[:, 1, :ROOT], axis=1)
    mean = (total(self.accepted) + _WEIGHT * _NEXT) / (
      total(self.seen) + _WEIGHT
    )
    return root * mean**level

  def _mean(self, which: int, bins: Array, prior: Array | float) -> Array:
    pick = lambda table: jnp.take_along_axis(
      table[:, which], bins[:, None], axis=1
    )[:, 0]
    return (pick(self.accepted) + _WEIGHT * prior) / (pick(self.seen) + _WEIGHT)

  @property
  def rate(self) -> Array:
    """`f32[B]`, tokens per unit of time; initially 1, as for plain decoding."""
    return (self.tokens + _WEIGHT) / (self.seconds + _WEIGHT)


def bin_of(top: Array) -> Array:
  """The bin of a distribution's largest probability, `f32[...] -> i32[...]`."""
  return jnp.sum(top[..., None] >= np.array(EDGES), axis=-1, dtype=jnp.int32)


def learn(
  now: Estimates, round_: FinishedRound, cost: Array | float
) -> Estimates:
  """The estimates after a round.

  Args:
    now: the estimates before it.
    round_: the round.
    cost: of a draft pass, relative to a round without a draft.
  """
  accept, active = round_.accept, round_.active
  bins, depth = bin_of(round_.top), accept.shape[1]
  present = (np.arange(depth) < round_.drafted[:, None]) & active[:, None]
  one = jnp.ones_like(accept[:, :1])
  reached = jnp.cumprod(jnp.concatenate([one, accept[:, :-1]], axis=1), axis=1)
  weight = jnp.where(present, reached, 0)
  before = jnp.pad(bins[:, :-1], ((0, 0), (1, 0)), constant_values=ROOT)
  here = jnp.stack([bins, before], axis=1)  # [B, 2, G]
  one_hot = (here[..., None] == np.arange(BINS + 1)).astype(jnp.float32)
  total = lambda x: jnp.sum(x[:, None, :, None] * one_hot, axis=2)

  def add(old, new):
    row = active.reshape(-1, *[1] * (old.ndim - 1))
    return jnp.where(row, _KEEP * old + new, old).astype(jnp.float32)

  return dataclasses.replace(
    now,
    accepted=add(now.accepted, total(weight * accept)),
    seen=add(now.seen, total(weight)),
    tokens=add(now.tokens, 1 + jnp.sum(weight * accept, axis=1)),
    seconds=add(now.seconds, 1 + cost * round_.drafted),
  )
