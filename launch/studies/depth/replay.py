"""What each way to choose a depth would have made of recorded rounds.

A policy is replayed by its own code (`specjax.adaptive.policies`), row by row
and round by round, with the estimates that it would have learned. Rounds are
taken as they were recorded: another depth would have begun the next round
elsewhere in the text. Tokens are expected ones, `1 + S_1 + .. + S_T`, and times
are predicted from costs: nothing here is timed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.studies.depth.machine import without_levels
from launch.studies.depth.traces import Traces
from specjax.adaptive import estimates as estimates_lib
from specjax.adaptive import policies as depth_lib
from specjax.adaptive.estimates import BINS, ROOT, Estimates, Finished
from specjax.adaptive.policies import Policy, Seen, Token
from specjax.theory import stopping
from specjax.theory.stopping import Costs, Process


def depths(
  traces: Traces,
  make: Callable[[Any], Policy],
  values: Any,
  *,
  params: Any = None,
  known: Process | None = None,
) -> np.ndarray:
  """How deep policies of one kind would have drafted.

  Args:
    traces: the rounds.
    make: the policy of a value, which is traced.
    values: n of them, a pytree of arrays `[n, ...]`.
    params: the policies' own parameters.
    known: acceptances by bin that rows know from the first round on, for a
      bound: of the traces themselves. None: they learn them.

  Returns:
    `int[n, R, M]`.
  """
  rows, _, most = traces.accept.shape
  given = tuple(
    jnp.moveaxis(jnp.asarray(x), 1, 0)
    for x in (
      traces.accept, traces.top, traces.confidence, traces.hidden, traces.there
    )
  )  # fmt: skip
  temperature = jnp.full(rows, traces.temperature, jnp.float32)

  def of_round(policy: Policy, memory, seen):
    accept, top, confidence, hidden, going = seen
    goes, survival = going, jnp.ones(rows, jnp.float32)
    bins = jnp.full(rows, ROOT, jnp.int32)
    sure = jnp.full(rows, jnp.inf, jnp.float32)
    drafted = jnp.zeros(rows, jnp.int32)
    for level in range(most):
      now = Seen(
        level=level, bins=bins, confidence=sure, survival=survival,
        memory=memory,
      )  # fmt: skip
      goes = policy.goes_on(now, goes)
      drafted += goes
      token = Token(
        top=top[:, level],
        confidence=confidence[:, level],
        hidden=hidden[:, level],
        temperature=temperature,
      )
      bins, sure = estimates_lib.bin_of(token.top), token.confidence
      survival *= policy.accepts(params, memory, token)
    if policy.learn is not None:
      round_ = Finished(
        top=top, confidence=confidence, hidden=hidden, accept=accept,
        drafted=drafted, kept=jnp.zeros_like(drafted), active=going,
      )  # fmt: skip
      memory = policy.learn(memory, round_)
    return memory, drafted

  @jax.jit
  def each(values, given):
    def of(value):
      policy = make(value)
      memory = policy.begin(rows, most)
      if known is not None:
        memory = _knowing(memory, known)
      run = lambda memory, seen: of_round(policy, memory, seen)
      return jnp.moveaxis(jax.lax.scan(run, memory, given)[1], 0, 1)

    return jax.lax.map(of, values)

  values = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), values)
  return np.asarray(each(values, given))


def priced(policy: Policy) -> Callable[[Any], Policy]:
  """The policy of a price, in the place of its own."""
  return lambda price: dataclasses.replace(
    policy, price=lambda seen: jnp.full_like(seen.survival, price)
  )


def capped(policy: Policy, width: Any) -> Policy:
  """The policy in a tree of so many levels, which may be traced."""
  return dataclasses.replace(
    policy,
    gain=lambda seen: jnp.where(seen.level < width, policy.gain(seen), -1.0),
  )


def limited(limits: Any) -> Policy:
  """`depth.table` of limits that are traced, `f32[G, BINS + 1]`."""
  return dataclasses.replace(
    depth_lib.table(np.zeros((1, BINS + 1))),
    price=lambda seen: limits[seen.level][seen.bins],
  )


def _knowing(estimates: Estimates, process: Process) -> Estimates:
  """Estimates that a process's acceptances outweigh all rounds in."""
  bins = np.arange(BINS)
  own = np.append(process.acceptance, 0)
  after = process.ahead(np.append(bins, stopping.ROOT)) @ process.acceptance
  table = np.stack([own, after])  # [2, BINS + 1]
  seen = np.full((len(estimates.tokens), *table.shape), 1e7, np.float32)
  return dataclasses.replace(
    estimates,
    accepted=jnp.asarray(seen * table, jnp.float32),
    seen=jnp.asarray(seen),
  )


def rate(
  traces: Traces, drafted: np.ndarray, costs: Costs, *, rows: int, width: int
) -> dict:
  """Tokens per second of a batch whose rows draft so deep.

  Levels are drafted as long as any of the batch's rows goes on, rows of a batch
  being rounds that have nothing to do with each other.

  Args:
    traces: the rounds.
    drafted: `int[R, M]`.
    costs: of a batch of so many rows.
    rows: of the batch.
    width: tokens at most, which the target's pass has room for.
  """
  drafted = np.minimum(drafted, width)[traces.there]
  survival = np.cumprod(traces.accept, axis=2)[traces.there]  # [rounds, G]
  counted = np.arange(traces.depth) < drafted[:, None]
  tokens = 1 + float((survival * counted).sum(axis=1).mean())
  below = [(drafted < k).mean() for k in range(1, width + 1)]
  levels = float(sum(1 - share**rows for share in below))
  seconds = without_levels(costs, width) + levels * costs.draft
  return {
    "tokens_per_second": rows * tokens / seconds,
    "tokens": tokens,
    "drafted": float(drafted.mean()),
    "levels": levels,
    "width": width,
  }
