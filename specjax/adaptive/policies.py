"""Depth policies decide, after every drafted token, whether to draft another.

A policy sees the tokens drafted so far, the distributions they were drawn from,
and statistics of finished rounds, but neither the next token nor its
distribution, which would cost a draft pass. So the depth is decided before the
next token is drawn, no drawn token is dropped, and every lossless rule stays
lossless (proof: docs/drafting.md).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax import distributions
from specjax.adaptive import estimates
from specjax.adaptive.estimates import Estimates, FinishedRound
from specjax.calls import Grammar
from specjax.structs import struct


@struct
class Token:
  """The newest drawn token, as a policy sees it.

  Attributes:
    top: `f32[B]`, the largest probability of its distribution at temperature 1.
    confidence: `f32[B]`, its own probability in that distribution.
  """

  top: Array
  confidence: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyContext:
  """What a policy may use after `level` drafted tokens.

  Attributes:
    level: number of drafted tokens; static.
    bins: `i32[B]`, bin of the newest token's distribution (`estimates.bin_of`);
      ROOT at first.
    confidence: `f32[B]`, the newest token's own probability in the draft's
      distribution at temperature 1; infinite at the root.
    survival: `f32[B]`, the product of `Policy.accepts` so far.
    memory: the policy's statistics of finished rounds.
  """

  level: int
  bins: Array
  confidence: Array
  survival: Array
  memory: Any


def _certain(memory: Any, token: Token) -> Array:
  del memory
  return jnp.ones_like(token.top)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """Decides whether a row drafts another token: if its gain exceeds its price.

  Attributes:
    name: as in `get`, with its parameters.
    gain: `PolicyContext -> f32[B]`.
    price: `PolicyContext -> f32[B]`.
    accepts: `(memory, Token) -> f32[B]`, the probability that a token is
      accepted if those before it are.
    begin: `(rows, G) -> memory`, a pytree whose arrays have rows first.
    learn: `(memory, FinishedRound) -> memory`, after a round; None for policies
      that learn and record nothing.
    max_tokens: the most drafted tokens of a row; None for the tree's depth.
  """

  name: str
  gain: Callable[[PolicyContext], Array]
  price: Callable[[PolicyContext], Array]
  accepts: Callable[[Any, Token], Array] = _certain
  begin: Callable[[int, int], Any] = lambda rows, depth: ()
  learn: Callable[[Any, FinishedRound], Any] | None = None
  max_tokens: int | None = None

  def continues(self, context: PolicyContext, allowed: Array) -> Array:
    """`bool[B]`, which allowed rows draft another token."""
    if self.max_tokens is not None and context.level >= self.max_tokens:
      return jnp.zeros_like(allowed)
    return allowed & (self.gain(context) > self.price(context))


def fixed(depth: int = 6) -> Policy:
  """Always `depth` tokens, or as many as the tree has."""
  if depth < 0:
    raise ValueError(f"depth must be >= 0, got {depth}")
  return Policy(
    name=str(depth), gain=_constant(1.0), price=_constant(0.0), max_tokens=depth
  )


def confidence(*, threshold: float = 0.4) -> Policy:
  """Stops after a token whose probability is at most the threshold.

  That token is kept. Like Hugging Face's `assistant_confidence_threshold`, with
  its default.
  """
  _check_share("threshold", threshold)
  return Policy(
    name=f"confidence(threshold={threshold:g})",
    gain=lambda context: context.confidence,
    price=_constant(threshold),
  )


@struct
class Exit:
  """Memory of `exits`.

  Attributes:
    threshold: `f32[B]`.
    matched: `f32[B]`, running mean of the share of accepted drafted tokens.
  """

  threshold: Array
  matched: Array


def exits(
  *,
  acceptance: float = 0.9,
  threshold: float = 0.6,
  step: float = 0.01,
  keep_matched: float = 0.5,
  keep_threshold: float = 0.9,
) -> Policy:
  """`confidence` with a threshold that adapts to acceptance.

  Draft and Verify (Zhang et al., ACL 2024, section 4.1). With m the running
  mean share of drafted tokens that were accepted and h the threshold, after
  every round of a row

    m <- keep_matched m + (1 - keep_matched) share
    h <- keep_threshold h + (1 - keep_threshold) t,

  where t is h + step if m < acceptance, else h if the whole chain was drafted,
  else h - step; h stays in [0, 1]. The paper has one threshold for all prompts;
  here each prompt starts with a new one.

  Args:
    acceptance: the desired share of accepted tokens; the paper's alpha.
    threshold: the initial threshold, on probabilities at temperature 1.
    step: the paper's epsilon.
    keep_matched, keep_threshold: the paper's beta_1 and beta_2.
  """
  shares = {
    "acceptance": acceptance, "threshold": threshold, "step": step,
    "keep_matched": keep_matched, "keep_threshold": keep_threshold,
  }  # fmt: skip
  for name, value in shares.items():
    _check_share(name, value)

  def learn(now: Exit, round_: FinishedRound) -> Exit:
    h, drafted = now.threshold, round_.drafted
    share = round_.kept / jnp.maximum(drafted, 1)
    m = keep_matched * now.matched + (1 - keep_matched) * share
    down = jnp.where(drafted == round_.accept.shape[1], h, h - step)
    target = jnp.where(m < acceptance, h + step, down)
    moved = keep_threshold * h + (1 - keep_threshold) * target
    counts = round_.active & (drafted > 0)
    return Exit(
      threshold=jnp.where(counts, jnp.clip(moved, 0, 1), h),
      matched=jnp.where(counts, m, now.matched),
    )

  def begin(rows, depth):
    del depth
    full = lambda value: jnp.full(rows, value, jnp.float32)
    return Exit(threshold=full(threshold), matched=full(0.0))

  return Policy(
    name=f"exits(acceptance={acceptance:g},threshold={threshold:g})",
    gain=lambda context: context.confidence,
    price=lambda context: context.memory.threshold,
    begin=begin,
    learn=learn,
  )


def survival(*, threshold: float = 0.25) -> Policy:
  """Keeps drafting while the next token's survival is above the threshold."""
  _check_share("threshold", threshold)
  return _estimating(
    f"survival(threshold={threshold:g})", _next_survival, _constant(threshold)
  )


def optimal(*, cost: float = 0.1, rows: int = 1) -> Policy:
  """Keeps drafting while the next token gains more than its pass costs.

  `survival` with the threshold `rate * cost`, optimal in the monotone case
  (`specjax.theory.stopping.myopic`). The rate is the row's own, measured over
  its rounds, so every round is a step of Dinkelbach's iteration.

  A batch runs a level if any of its rows wants it, which pays if the rows' mean
  gain is above their mean price. To stay independent a row assumes that the
  others are like itself in a typical round (`Estimates.typical`): its gain is
  the mean of its own and of `rows - 1` typical ones.

  Args:
    cost: of a draft pass over one token, for all rows, relative to a round
      without drafting but with verification of the same width.
    rows: how many rows share a pass.
  """
  if not cost >= 0:
    raise ValueError(f"cost must be >= 0, got {cost}")
  if rows < 1:
    raise ValueError(f"rows must be >= 1, got {rows}")
  more = f",rows={rows}" if rows > 1 else ""
  return by_rate(cost, rows, name=f"optimal(cost={cost:g}{more})")


def by_rate(
  cost: Array | float, rows: Array | int, *, name: str = "optimal"
) -> Policy:
  """`optimal` with arguments that may be traced; unchecked."""

  def gain(context: PolicyContext) -> Array:
    others = context.memory.typical(context.level)
    return (_next_survival(context) + (rows - 1) * others) / rows

  price = lambda context: context.memory.rate * cost
  return _estimating(name, gain, price, cost)


def _estimating(
  name: str,
  gain: Callable[[PolicyContext], Array],
  price: Callable[[PolicyContext], Array],
  cost: Array | float = 0.0,
) -> Policy:
  """A policy by estimated survival."""
  return Policy(
    name=name,
    gain=gain,
    price=price,
    accepts=lambda memory, token: memory.acceptance(
      estimates.bin_of(token.top)
    ),
    begin=lambda rows, depth: Estimates.zeros(rows),
    learn=lambda memory, round_: estimates.learn(memory, round_, cost),
  )


def _next_survival(context: PolicyContext) -> Array:
  return context.survival * context.memory.next_acceptance(context.bins)


def _constant(value: float) -> Callable[[PolicyContext], Array]:
  return lambda context: jnp.full_like(context.survival, value)


def _check_share(name: str, value: float) -> None:
  if not 0 <= value <= 1:
    raise ValueError(f"{name} must be in [0, 1], got {value}")


FACTORIES: dict[str, Callable[..., Policy]] = {
  "fixed": fixed,
  "confidence": confidence,
  "exits": exits,
  "survival": survival,
  "optimal": optimal,
}


GRAMMAR = Grammar(kind="policy", entries=FACTORIES, literal="fixed")


def get(text: str) -> Policy:
  """Parses a policy: `"6"`, `"survival"`, `"confidence(threshold=0.4)"`.

  Raises:
    ValueError: for an unknown policy or invalid parameters.
  """
  return GRAMMAR.make(text)


def plain_log_probs(logits: Array) -> Array:
  """The draft's own distribution at temperature 1; uniform where it is NaN."""
  return distributions.replace_nans(
    jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  )
