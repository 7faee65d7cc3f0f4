"""Replay of depth policies on recorded rounds.

A policy is replayed by its own code (`specjax.adaptive.policies`), row by row
and round by round, with the estimates that it would have learned. Rounds are
taken as they were recorded: another depth would have begun the next round
elsewhere in the text. Tokens are expected ones, `1 + S_1 + .. + S_T`, and times
are predicted from costs: nothing here is timed. The best of all rules is that
of the process that the rounds are most like.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.evaluation import costs as timings
from launch.studies.depth.traces import Traces
from specjax.adaptive import estimates as estimates_lib
from specjax.adaptive import policies as depth_lib
from specjax.adaptive.estimates import BINS, ROOT, Estimates, Finished
from specjax.adaptive.policies import Policy, Seen, Token
from specjax.theory import stopping
from specjax.theory.stopping import Costs, Process

_POINTS = 257

# ----------------------------------------------------------------------- costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """Costs of the parts of a round, linear in the rows of a batch.

  Attributes:
    level: seconds of a drafted level and of what goes with it, of no rows and
      of each.
    verify: of a target pass by the tokens of a row, the same two.
    rest: of all else in a round, the same two.
    batch_size: the only one that was timed; None if several were.
  """

  level: tuple[float, float]
  verify: dict[int, tuple[float, float]]
  rest: tuple[float, float]
  batch_size: int | None = None

  def costs(self, rows: int) -> Costs:
    """Of a batch of so many rows."""
    at = lambda line: max(line[0] + rows * line[1], 1e-9)
    widths = sorted(self.verify)
    seconds = [at(self.verify[w]) + at(self.rest) for w in widths]
    # Beyond the widest that was timed, as the last two rise.
    last = (seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2])

    def verify(fed: int) -> float:
      if fed > widths[-1]:
        return seconds[-1] + (fed - widths[-1]) * max(last, 0.0)
      return float(np.interp(fed, widths, seconds))

    return Costs(draft=at(self.level), verify=verify)


def machine_of(timed: Sequence[timings.Costs]) -> Machine:
  """The machine that costs at one or two batch sizes tell.

  Args:
    timed: of one pair and one machine at different batch sizes. One alone
      says nothing of other batches.

  Raises:
    ValueError: if there is none, or two are of the same batch size.
  """
  costs_of = {
    one.batch_size: {"level": one.level, "rest": one.rest, **one.target}
    for one in timed
  }
  if not costs_of or len(costs_of) != len(timed):
    raise ValueError(
      "costs must be of different batch sizes, got "
      f"{[one.batch_size for one in timed]}"
    )
  (one, low), *more = sorted(costs_of.items())
  if not more:
    line = lambda name: (low[name], 0.0)
  else:
    other, high = more[-1]

    def line(name):
      slope = (high[name] - low[name]) / (other - one)
      return low[name] - one * slope, slope

  widths = [
    w
    for w in low
    if isinstance(w, int) and all(w in part for part in costs_of.values())
  ]
  return Machine(
    level=line("level"),
    rest=line("rest"),
    verify={w: line(w) for w in sorted(widths)},
    batch_size=None if more else one,
  )


def without_levels(costs: Costs, width: int) -> float:
  """Seconds of a round that has room for so many tokens and drafts none."""
  return costs.of_round(width) - width * costs.draft


# -------------------------------------------------------------------- policies


def depths(
  traces: Traces,
  make: Callable[[Any], Policy],
  values: Any,
  *,
  params: Any = None,
  known: Process | None = None,
) -> np.ndarray:
  """Depths that policies of one kind would have drafted.

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
      traces.accept, traces.top, traces.confidence, traces.hidden,
      traces.present,
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
  """`policies.table` of limits that are traced, `f32[G, BINS + 1]`."""
  return dataclasses.replace(
    depth_lib.table(np.zeros((1, BINS + 1))),
    price=lambda seen: limits[seen.level][seen.bins],
  )


def _knowing(estimates: Estimates, process: Process) -> Estimates:
  """Estimates that a process's acceptances outweigh all rounds in."""
  bins = np.arange(BINS)
  chance = np.append(process.acceptance, 0)
  after = process.ahead(np.append(bins, stopping.ROOT)) @ process.acceptance
  table = np.stack([chance, after])  # [2, BINS + 1]
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
  drafted = np.minimum(drafted, width)[traces.present]
  survival = np.cumprod(traces.accept, axis=2)[traces.present]  # [rounds, G]
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


# ----------------------------------------------------------------- the process


def process_of(traces: Traces) -> Process:
  """The chain of bins that the traces are most like.

  Tokens count for their survival: those behind a rejection are of no text.
  """
  accept = traces.accept[traces.present].astype(np.float64)
  bins = np.sum(
    traces.top[traces.present][..., None] >= np.array(estimates_lib.EDGES),
    axis=-1,
  )
  before = np.cumprod(
    np.concatenate([np.ones_like(accept[:, :1]), accept[:, :-1]], axis=1), 1
  )
  seen, kept = np.zeros(BINS), np.zeros(BINS)
  np.add.at(seen, bins, before)
  np.add.at(kept, bins, before * accept)
  following = np.zeros((BINS, BINS))
  np.add.at(following, (bins[:, :-1], bins[:, 1:]), before[:, 1:])
  first = np.bincount(bins[:, 0], minlength=BINS).astype(float)
  unseen = following.sum(axis=1) == 0
  following[unseen] = first
  return Process(
    first=first / first.sum(),
    following=following / following.sum(axis=1, keepdims=True),
    acceptance=kept / np.where(seen > 0, seen, 1),
  )


def optimum(
  process: Process, costs: Costs, width: int
) -> tuple[np.ndarray, float]:
  """The best rule for a process at a width, and the rate it has there.

  Args:
    process: of the bins.
    costs: of a batch; the target's pass is as wide whatever is drafted.
    width: tokens at most.

  Returns:
    `f[width, BINS + 1]` limits of survival, see `policies.table`, and tokens
    per second of a row.
  """
  fixed = Costs(draft=costs.draft, verify=without_levels(costs, width))
  limits = np.zeros((width, BINS + 1))
  guess = _by_limits(process, fixed, limits)
  for _ in range(20):  # Dinkelbach, from the static depth
    better = stopping.thresholds(process, fixed, guess, width, points=_POINTS)
    optimal = _by_limits(process, fixed, better)
    if optimal <= guess * (1 + 1e-9):
      break
    guess, limits = optimal, better
  return limits, guess


def _by_limits(process: Process, costs: Costs, limits: np.ndarray) -> float:
  """The rate of a rule of limits, on a grid of survivals."""
  grid = np.linspace(0, 1, _POINTS)
  count = len(process.acceptance)
  chances = process.ahead(np.array([*range(count), stopping.ROOT]))
  kept = grid * process.acceptance[:, None]  # [X, points]
  tokens, levels = np.zeros((2, count + 1, _POINTS))

  def at(values):
    return np.stack([np.interp(kept[x], grid, values[x]) for x in range(count)])

  for limit in limits[::-1]:
    goes = grid > limit[:, None]  # [X + 1, points]
    tokens = np.where(goes, chances @ (kept + at(tokens)), 0)
    levels = np.where(goes, 1 + chances @ at(levels), 0)
  gained, drafted = tokens[count, -1], levels[count, -1]
  return float((1 + gained) / (costs.of_round(0) + drafted * costs.draft))
