"""What each way to choose a depth would have made of recorded rounds.

A policy is replayed by its own code (`specjax.drafters.depth`), row by row and
round by round, with the estimates that it would have learned. Rounds are taken
as they were recorded: another depth would have begun the next round elsewhere
in the text. Tokens are expected ones, `1 + S_1 + .. + S_T`, and times are
predicted from costs: nothing here is timed.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from launch.studies.depth.traces import Traces
from specjax.drafters import depth as depth_lib
from specjax.drafters.depth import BINS, ROOT, Estimates, Policy, Seen
from specjax.theory import stopping
from specjax.theory.stopping import Costs, Process

BATCHES = (1, 2, 4, 8, 16)
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """What parts of a round cost, linear in the rows of a batch.

  Attributes:
    level: seconds of a drafted level and of what goes with it, of no rows and
      of each.
    verify: of a target pass by the tokens of a row, the same two.
    rest: of all else in a round, the same two.
  """

  level: tuple[float, float]
  verify: dict[int, tuple[float, float]]
  rest: tuple[float, float]

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


def machine_of(results: Sequence[dict]) -> Machine:
  """The costs that one or two results of `launch.benchmark` tell.

  What a round takes beside its passes is taken to be a plain round's, and the
  rest in proportion to the drafted tokens.

  Args:
    results: of one pair and one machine at different batch sizes. One alone
      says nothing of other batches: all costs are then as at its own.

  Raises:
    ValueError: if there is none, or they are of one batch size.
  """
  found = {}
  for result in results:
    rows = result["config"]["batch_size"]
    n = result["config"]["num_speculative_tokens"]
    plain = result["autoregressive_step_seconds"]
    rest = plain - result["autoregressive_forward_seconds"]
    passes = result["draft_forwards_seconds"] + result["verify_seconds"]
    each = (result["step_seconds"] - passes - rest) / n
    found[rows] = {
      "level": result["draft_forwards_seconds"] / n + each,
      "rest": rest,
      **{int(w): s for w, s in result["target_pass_seconds"].items()},
    }
  if not found or len(found) != len(results):
    raise ValueError(
      "costs must be results of different batch sizes, got "
      f"{[r['config']['batch_size'] for r in results]}"
    )
  (one, low), *more = sorted(found.items())
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
    if isinstance(w, int) and all(w in part for part in found.values())
  ]
  return Machine(
    level=line("level"),
    rest=line("rest"),
    verify={w: line(w) for w in sorted(widths)},
  )


def machine_of_report(found: dict) -> Machine:
  """The costs in a report (`launch.studies.report`), at its batch size alone.

  Args:
    found: with `costs` and `num_speculative_tokens`.
  """
  costs, n = found["costs"], found["num_speculative_tokens"]
  rest = costs["plain_step_seconds"] - costs["plain_pass_seconds"]
  passes = costs["step_seconds"] / costs["loop_overhead"]
  each = (costs["step_seconds"] - passes - rest) / n
  return Machine(
    level=(costs["draft_step_seconds"] + each, 0.0),
    rest=(rest, 0.0),
    verify={int(w): (s, 0.0) for w, s in costs["verify_seconds"].items()},
  )


# ------------------------------------------------------------------- replaying


def depths(
  traces: Traces,
  policy: Policy,
  prices: np.ndarray | None = None,
  *,
  known: Process | None = None,
) -> np.ndarray:
  """How deep a policy would have drafted.

  Args:
    traces: the rounds.
    policy: when rows go on.
    prices: `f[n, G, BINS + 1]`, n tables of what its gain has to be above, by
      level and bin, in the place of its own price; or None.
    known: acceptances by bin that rows know from the first round on, for a
      bound: of the traces themselves. None: they learn them.

  Returns:
    `int[R, M]`, or `int[n, R, M]` for tables.
  """
  rows, _, most = traces.accept.shape
  order = lambda x: jnp.moveaxis(jnp.asarray(x), 1, 0)
  given = tuple(
    order(x)
    for x in (traces.accept, traces.top, traces.confidence, traces.there)
  )

  start = Estimates.zeros(rows, most)
  if known is not None:
    start = _knowing(start, known)

  def run(policy, rounds):
    def of_round(estimates: Estimates, seen):
      accept, top, confidence, going = seen
      goes, survival = going, jnp.ones(rows, jnp.float32)
      bins = jnp.full(rows, ROOT, jnp.int32)
      sure = jnp.full(rows, jnp.inf, jnp.float32)
      drafted = jnp.zeros(rows, jnp.int32)
      for level in range(most):
        known = Seen(
          level=level, bins=bins, confidence=sure, survival=survival,
          estimates=estimates,
        )  # fmt: skip
        goes = policy.goes_on(known, goes)
        drafted += goes
        bins, sure = depth_lib.bin_of(top[:, level]), confidence[:, level]
        survival *= estimates.acceptance(bins)
      estimates = dataclasses.replace(estimates, top=top, drafted=drafted)
      if policy.learns:
        estimates = depth_lib.update(estimates, accept, going, policy.cost)
      return estimates, drafted

    _, found = jax.lax.scan(of_round, start, rounds)
    return jnp.moveaxis(found, 0, 1)

  if prices is None:
    return np.asarray(jax.jit(lambda rounds: run(policy, rounds))(given))

  @jax.jit
  def each(tables, rounds):
    def of(table):
      judge = lambda seen: (policy.judge(seen)[0], table[seen.level][seen.bins])
      return run(dataclasses.replace(policy, judge=judge), rounds)

    return jax.lax.map(of, tables)

  return np.asarray(each(jnp.asarray(prices, jnp.float32), given))


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


def constant(traces: Traces, thresholds: Sequence[float]) -> np.ndarray:
  """Tables of one price each, `f[n, G, BINS + 1]`."""
  shape = (len(thresholds), traces.depth, BINS + 1)
  return np.broadcast_to(np.reshape(thresholds, (-1, 1, 1)), shape)


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
  seconds = costs.of_round(width) - (width - levels) * costs.draft
  return {
    "tokens_per_second": rows * tokens / seconds,
    "tokens": tokens,
    "drafted": float(drafted.mean()),
    "levels": levels,
    "width": width,
  }


def process_of(traces: Traces) -> Process:
  """The chain of bins that the traces are most like.

  Tokens count for their survival: those behind a rejection are of no text.
  """
  accept = traces.accept[traces.there].astype(np.float64)
  bins = np.sum(
    traces.top[traces.there][..., None] >= np.array(depth_lib.EDGES), axis=-1
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
    `f[width, BINS + 1]` limits of survival, see `depth.table`, and tokens per
    second of a row.
  """
  fixed = Costs(
    draft=costs.draft, verify=costs.of_round(width) - width * costs.draft
  )
  limits = np.zeros((width, BINS + 1))
  guess = _by_limits(process, fixed, limits)
  for _ in range(20):  # Dinkelbach, from the static depth
    better = stopping.thresholds(process, fixed, guess, width, points=_POINTS)
    found = _by_limits(process, fixed, better)
    if found <= guess * (1 + 1e-9):
      break
    guess, limits = found, better
  return limits, guess


_POINTS = 257


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


# ------------------------------------------------------------------ all of them


def compare(
  traces: Traces, machine: Machine, *, batches: Sequence[int] = BATCHES
) -> dict:
  """Plain decoding, every static depth, each rule at its best, the optimum.

  A rule's threshold and width are the best for the batch, found on the traces
  themselves, as the best static depth is; `optimal` has only its width chosen.
  The optimum is of one row's rounds, and knows the acceptances of the traces
  from the first round on, which no rule in the loop does.
  """
  every = np.full(traces.there.shape, traces.depth)
  process = process_of(traces)
  prices = constant(traces, THRESHOLDS)
  by_rule = {
    name: dict(
      zip(
        (f"{name}(threshold={t:g})" for t in THRESHOLDS),
        depths(traces, make(), prices),
        strict=True,
      )
    )
    for name, make in (
      ("confidence", depth_lib.confidence), ("survival", depth_lib.survival),
    )
  }  # fmt: skip
  widths = range(1, traces.depth + 1)
  found = []
  for rows in batches:
    costs = machine.costs(rows)
    at = lambda drafted, width, rows=rows, costs=costs: rate(
      traces, drafted, costs, rows=rows, width=width
    )
    best = lambda named, at=at: _fastest(
      [
        {"name": name, **at(drafted, width)}
        for name, drafted in named.items()
        for width in widths
      ]
    )
    static = {k: at(every, k) for k in range(traces.depth + 1)}
    most = max(static, key=lambda k: static[k]["tokens_per_second"])
    cost = float(costs.draft / costs.of_round(0))
    own = depth_lib.optimal(cost=round(cost, 3))
    limits, predicted = zip(
      *(optimum(process, costs, width) for width in widths), strict=True
    )
    tables = np.full((len(widths), traces.depth, BINS + 1), 2.0)
    for width, limit in zip(widths, limits, strict=True):
      tables[width - 1, :width] = limit
    replayed = depths(traces, depth_lib.table(tables[0]), tables, known=process)
    found.append(
      {
        "batch_size": rows,
        "draft_cost": cost,
        "plain": static[0]["tokens_per_second"],
        "static": {k: v["tokens_per_second"] for k, v in static.items()},
        "best_static": {"name": str(most), **static[most]},
        **{name: best(named) for name, named in by_rule.items()},
        "optimal": best({own.name: depths(traces, own)}),
        "optimum": _fastest(
          [
            {
              "name": "table",
              **at(replayed[width - 1], width),
              "predicted_alone": predicted[width - 1],
              "limits": tables[width - 1, :width].tolist(),
            }
            for width in widths
          ]
        ),
      }
    )
  return {
    "num_rounds": traces.num_rounds,
    "depth": traces.depth,
    "process": {
      name: getattr(process, name).tolist()
      for name in ("first", "following", "acceptance")
    },
    "batches": found,
  }


def _fastest(options: list[dict]) -> dict:
  return max(options, key=lambda one: one["tokens_per_second"])


def advice(found: dict) -> str:
  """Which policy to use, and what it would gain, in a sentence."""
  one = found["batches"][0]
  static, plain = one["best_static"], one["plain"]
  options = [one[name] for name in ("confidence", "survival", "optimal")]
  best = max(options, key=lambda option: option["tokens_per_second"])
  gain = best["tokens_per_second"] / static["tokens_per_second"] - 1
  ceiling = (
    one["optimum"]["tokens_per_second"] / static["tokens_per_second"] - 1
  )
  rows = one["batch_size"]
  if max(static["tokens_per_second"], best["tokens_per_second"]) <= plain:
    return (
      f"At batch size {rows} no depth pays: plain decoding is predicted to be "
      "the fastest."
    )
  if gain < 0.02:
    return (
      f"At batch size {rows} draft a static {static['name']}: the best policy "
      f"({best['name']}) is predicted to change tokens per second by "
      f"{gain:+.1%}, and the optimum for this pair's confidences by "
      f"{ceiling:+.1%}."
    )
  return (
    f"At batch size {rows} use config.depth={best['name']} with "
    f"num_speculative_tokens={best['width']}: predicted {gain:+.1%} over the "
    f"best static depth, which is {static['name']} (the optimum for this "
    f"pair's confidences: {ceiling:+.1%})."
  )
