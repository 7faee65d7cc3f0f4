"""How deep a row drafts: rules that decide before each token is drawn.

A policy is asked after every drafted token whether the row goes on. It sees
what is known then: the tokens drafted so far, the laws they were drawn from,
and what finished rounds have taught. Not the next token, nor its law, for which
a pass of the draft would have to be paid. So the depth is decided before the
next token is drawn, no token that was drawn is taken back, and every lossless
rule stays lossless (docs/adaptive.md has the proof).

What a draft says of itself is not how often it is right: a law that is uniform
like the target's is always accepted. Acceptance is therefore estimated. The
largest probability of the draft's own law (at temperature 1) falls into one of
a few bins, and of each bin it is counted what share of `min(1, q / p)` its
tokens came to, and the token after them. Tokens behind one that was probably
rejected count for little: each is weighed by the acceptance of those before it.
All of it is a row's own, so that a row does not depend on its neighbours, and
old rounds are forgotten, so that a row that has given up tries again.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import laws, named, near
from specjax.structs import struct
from specjax.types import Commit

EDGES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.93, 0.98)
BINS = len(EDGES) + 1
ROOT = BINS  # the context before the first token
_MIDDLE = (*np.add((0, *EDGES), (*EDGES, 1)) / 2, 0.75)
_NEXT = 0.75  # acceptance of the next token, before anything is known
_WEIGHT = 4.0  # rounds that these suppositions count for
_KEEP = 0.98  # of what is remembered, from round to round


@struct
class Estimates:
  """What a row has learned, and what it waits to learn from its last draft.

  Attributes:
    accepted: `f32[B, 2, BINS + 1]`, the sum of `min(1, q / p)` by the bin of
      the token's own law, and by that of the token before it.
    seen: `f32[B, 2, BINS + 1]`, how many tokens that was of.
    tokens: `f32[B]`, expected tokens of its rounds.
    seconds: `f32[B]`, what they cost, a round without a draft being 1.
    top: `f32[B, G]`, the largest probability of each law of the last draft, at
      temperature 1.
    confidence: `f32[B, G]`, the probabilities of its tokens in those.
    log_p: `f32[B, G]`, of its tokens, in the laws that they were drawn from.
    drafted: `i32[B]`, how many of them were there.
    threshold: `f32[B]`, of a policy that moves it (`Policy.moves`).
    matched: `f32[B]`, running mean of the share of drafted tokens that stood.
    passes: `i32[]`, passes of the draft that have been made, for all rows.
  """

  accepted: Array
  seen: Array
  tokens: Array
  seconds: Array
  top: Array
  confidence: Array
  log_p: Array
  drafted: Array
  threshold: Array
  matched: Array
  passes: Array

  @classmethod
  def zeros(
    cls, rows: int, depth: int, *, threshold: float = 0.0
  ) -> "Estimates":
    """Before the first round."""
    table = (rows, 2, BINS + 1)
    return cls(
      accepted=jnp.zeros(table, jnp.float32),
      seen=jnp.zeros(table, jnp.float32),
      tokens=jnp.zeros(rows, jnp.float32),
      seconds=jnp.zeros(rows, jnp.float32),
      top=jnp.zeros((rows, depth), jnp.float32),
      confidence=jnp.zeros((rows, depth), jnp.float32),
      log_p=jnp.zeros((rows, depth), jnp.float32),
      drafted=jnp.zeros(rows, jnp.int32),
      threshold=jnp.full(rows, threshold, jnp.float32),
      matched=jnp.zeros(rows, jnp.float32),
      passes=jnp.zeros((), jnp.int32),
    )

  @classmethod
  def row_axes(cls) -> "Estimates":
    """Which axis of each array is rows."""
    axes = dict.fromkeys((field.name for field in dataclasses.fields(cls)), 0)
    return cls(**axes | {"passes": None})  # type: ignore[arg-type]

  def acceptance(self, bins: Array) -> Array:
    """Of a token drawn from a law in a bin, `i32[B] -> f32[B]`."""
    return self._mean(0, bins, jnp.asarray(_MIDDLE, jnp.float32)[bins])

  def of_next(self, bins: Array) -> Array:
    """Of the token after one drawn from a law in a bin, or after the root."""
    return self._mean(1, bins, _NEXT)

  def _mean(self, which: int, bins: Array, supposed: Array | float) -> Array:
    pick = lambda table: jnp.take_along_axis(
      table[:, which], bins[:, None], axis=1
    )[:, 0]
    return (pick(self.accepted) + _WEIGHT * supposed) / (
      pick(self.seen) + _WEIGHT
    )

  @property
  def rate(self) -> Array:
    """`f32[B]`, tokens a unit of time; 1, as plain decoding, at first."""
    return (self.tokens + _WEIGHT) / (self.seconds + _WEIGHT)


def bin_of(top: Array) -> Array:
  """The bin of a law's largest probability, `f32[...] -> i32[...]`."""
  return jnp.sum(top[..., None] >= np.array(EDGES), axis=-1, dtype=jnp.int32)


def learn(now: Estimates, commit: Commit, cost: float) -> Estimates:
  """The estimates after a round of the loop.

  Rows that emitted nothing, since they are done or their laws were NaN, learn
  nothing.

  Args:
    now: with what the last draft was made of.
    commit: the round.
    cost: of a draft pass, a round without one being 1.
  """
  assert commit.target_log_probs is not None  # of a round
  depth = now.top.shape[1]
  log_q = laws.token_log_prob(
    commit.target_log_probs[:, :depth], commit.tokens[:, 1 : depth + 1]
  )
  accept = laws.acceptance(log_q.astype(jnp.float32), now.log_p)
  return update(now, accept, commit.count > 0, cost)


def update(
  now: Estimates, accept: Array, active: Array, cost: float
) -> Estimates:
  """The estimates after a round in which tokens were accepted like that.

  Args:
    now: with what the last draft was made of.
    accept: `f32[B, G]`, `min(1, q / p)` of each drafted token.
    active: `bool[B]`, which rows learn.
    cost: see `learn`.
  """
  bins, depth = bin_of(now.top), accept.shape[1]
  there = (np.arange(depth) < now.drafted[:, None]) & active[:, None]
  one = jnp.ones_like(accept[:, :1])
  reached = jnp.cumprod(jnp.concatenate([one, accept[:, :-1]], axis=1), axis=1)
  weight = jnp.where(there, reached, 0)
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
    seconds=add(now.seconds, 1 + cost * now.drafted),
  )


def move(
  policy: "Policy", now: Estimates, commit: Commit, depth: int
) -> Estimates:
  """The threshold after a round of the loop; see `Policy.moves`.

  Args:
    policy: one that moves.
    now: with how much was drafted.
    commit: the round.
    depth: G, of a chain that is drafted whole.
  """
  assert policy.moves is not None
  share = (commit.count - 1) / jnp.maximum(now.drafted, 1)
  threshold, matched = policy.moves(
    now.threshold, now.matched, share, now.drafted == depth
  )
  counts = (commit.count > 0) & (now.drafted > 0)
  return dataclasses.replace(
    now,
    threshold=jnp.where(counts, threshold, now.threshold),
    matched=jnp.where(counts, matched, now.matched),
  )


# ----------------------------------------------------------------- the policies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
  """What a policy may look at after `level` drafted tokens.

  Attributes:
    level: how many there are; static.
    bins: `i32[B]`, of the law that the newest was drawn from; ROOT at first.
    confidence: `f32[B]`, the newest one's own probability in the draft's law at
      temperature 1; infinite at the root.
    survival: `f32[B]`, the product of the estimated acceptances so far.
    estimates: of finished rounds.
  """

  level: int
  bins: Array
  confidence: Array
  survival: Array
  estimates: Estimates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """When a row goes on drafting: while its gain is above its price.

  Attributes:
    name: as in `get`, with its parameters.
    judge: `Seen -> (gain, price)`, both `f32[B]`.
    learns: whether it looks at the estimates.
    cost: of a draft pass, where a round without one costs 1: for the rate that
      is measured.
    shared: whether all rows go on as long as the mean gain is above the mean
      price, of the rows that are allowed so deep (on a mesh, of a device's).
    threshold: that of `Estimates` before the first round.
    moves: `(threshold, matched, share of the drafted tokens that stood, whether
      the chain was drafted whole) -> (threshold, matched)` after a round that
      drafted, all `[B]`; None: both stay.
  """

  name: str
  judge: Callable[[Seen], tuple[Array, Array]]
  learns: bool = False
  cost: float = 0.0
  shared: bool = False
  threshold: float = 0.0
  moves: Callable[..., tuple[Array, Array]] | None = None

  def goes_on(self, seen: Seen, allowed: Array) -> Array:
    """Which of the rows that may draft the next token do, `bool[B]`."""
    gain, price = self.judge(seen)
    if self.shared:
      mean = lambda x: jnp.sum(jnp.where(allowed, jnp.minimum(x, _MOST), 0))
      gain, price = mean(gain), mean(price)
    return allowed & (gain > price)


_MOST = 1e6  # where an infinite gain would outweigh all rows


def fixed(*, depth: int = 6) -> Policy:
  """Always so many tokens, or as many as the tree has."""
  if depth < 0:
    raise ValueError(f"depth must be >= 0, got {depth}")

  def judge(seen):
    go = jnp.full_like(seen.survival, float(seen.level < depth))
    return go, jnp.zeros_like(go)

  return Policy(name=str(depth), judge=judge)


def confidence(*, threshold: float = 0.4) -> Policy:
  """Until a token whose own probability is not above the threshold.

  Such a token is kept. So do Hugging Face's `assistant_confidence_threshold`,
  whose default this is, and Kangaroo, which stops below the law's largest
  probability.
  """
  _check_share("threshold", threshold)
  return Policy(
    name=f"confidence(threshold={threshold:g})",
    judge=lambda seen: (
      seen.confidence, jnp.full_like(seen.confidence, threshold)
    ),
  )  # fmt: skip


def exits(
  *,
  acceptance: float = 0.9,
  threshold: float = 0.6,
  step: float = 0.01,
  keep_matched: float = 0.5,
  keep_threshold: float = 0.9,
) -> Policy:
  """`confidence` with a threshold that follows what is accepted.

  Draft and Verify (Zhang et al., ACL 2024, section 4.1). With m the running
  mean of the share of drafted tokens that stood and h the threshold, after
  every round of a row

    m <- keep_matched m + (1 - keep_matched) share
    h <- keep_threshold h + (1 - keep_threshold) t,

  where t is h + step if m < acceptance, else h if the chain was drafted whole,
  else h - step; h stays in [0, 1]. The paper begins a run with m = 0 and one
  threshold for all its prompts; here each row has its own, and begins anew with
  its prompt. The released mode that drafts the likeliest token and claims the
  softmax is lossy, and not here.

  Args:
    acceptance: the share of drafted tokens that is aimed at; alpha there.
    threshold: the first one, of the draft's law at temperature 1.
    step: epsilon there.
    keep_matched, keep_threshold: beta_1 and beta_2 there.
  """
  shares = {
    "acceptance": acceptance, "threshold": threshold, "step": step,
    "keep_matched": keep_matched, "keep_threshold": keep_threshold,
  }  # fmt: skip
  for name, value in shares.items():
    _check_share(name, value)

  def moves(h, m, share, whole):
    m = keep_matched * m + (1 - keep_matched) * share
    down = jnp.where(whole, h, h - step)
    target = jnp.where(m < acceptance, h + step, down)
    h = keep_threshold * h + (1 - keep_threshold) * target
    return jnp.clip(h, 0, 1), m

  return Policy(
    name=f"exits(acceptance={acceptance:g},threshold={threshold:g})",
    judge=lambda seen: (seen.confidence, seen.estimates.threshold),
    threshold=threshold,
    moves=moves,
  )


def survival(*, threshold: float = 0.25) -> Policy:
  """While the next token is reached and accepted with more than that chance."""
  _check_share("threshold", threshold)
  return Policy(
    name=f"survival(threshold={threshold:g})",
    judge=lambda seen: (_worth(seen), jnp.full_like(seen.survival, threshold)),
    learns=True,
  )


def optimal(*, cost: float = 0.1) -> Policy:
  """While the next token gains more than its pass costs, at the row's own rate.

  `survival` with the threshold `rate * cost`: the optimal one in the monotone
  case (`specjax.theory.stopping.myopic`). The rate is the row's own, measured
  over its rounds, so that every round is a step of Dinkelbach's iteration.

  Args:
    cost: of a pass of the draft over one token, where a round that drafts
      nothing costs 1.
  """
  if not cost >= 0:
    raise ValueError(f"cost must be >= 0, got {cost}")
  return Policy(
    name=f"optimal(cost={cost:g})",
    judge=lambda seen: (_worth(seen), seen.estimates.rate * cost),
    learns=True,
    cost=cost,
  )


def table(limits: Sequence[Sequence[float]] | np.ndarray) -> Policy:
  """While survival is above a limit of its level and bin.

  Args:
    limits: `f[G, BINS + 1]`, as `specjax.theory.stopping.thresholds` says for
      the process of a pair: the optimum of that process.
  """
  limits = np.asarray(limits, np.float32)
  if limits.ndim != 2 or limits.shape[1] != BINS + 1:
    raise ValueError(
      f"limits must be [levels, {BINS + 1}], got shape {limits.shape}"
    )

  def judge(seen):
    if seen.level >= len(limits):
      return jnp.zeros_like(seen.survival), jnp.ones_like(seen.survival)
    return seen.survival, jnp.asarray(limits[seen.level])[seen.bins]

  return Policy(name="table", judge=judge, learns=True)


def together(policy: Policy) -> Policy:
  """One depth for all rows, by their mean gain and price.

  A row's law stays what it was, and the rows stay independent; but which tokens
  a seed gives then depends on the rows beside it.
  """
  return dataclasses.replace(
    policy, name=f"together({policy.name})", shared=True
  )


def _worth(seen: Seen) -> Array:
  return seen.survival * seen.estimates.of_next(seen.bins)


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


def get(text: str) -> Policy:
  """The policy that is written so.

  Args:
    text: a number of tokens, or a name of `FACTORIES`, with parameters or
      without: `"6"`, `"survival"`, `"confidence(threshold=0.4)"`.

  Raises:
    ValueError: if there is none, or its parameters are out of range.
  """
  if text.isascii() and text.isdigit():
    return fixed(depth=int(text))
  bare, bracket, _ = text.partition("(")
  if bare not in FACTORIES:
    raise ValueError(
      f"unknown depth {text!r:.80}{near.guess(bare, FACTORIES)}, expected a "
      f"number or one of {list(FACTORIES)}"
    )
  return named.make("depth", text if bracket else f"{text}()", FACTORIES)


def plain_law(logits: Array) -> Array:
  """The draft's own law at temperature 1; uniform where it is NaN."""
  return laws.heal(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1))
