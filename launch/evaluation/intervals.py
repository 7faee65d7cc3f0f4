"""Metrics of a run, and their confidence intervals.

Counts are summed over rows before division (a ratio of totals, not a mean of
ratios). Intervals are over units that were decoded together, with baseline and
speculative times paired within a unit. Units that share a prompt are merged
(`merged`). Fewer than `LEAST` units give no interval.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from specjax.runtime.completions import Completion

_CONFIDENCE = 0.95  # nominal coverage
# Standard errors on each side of a 95% interval of a mean over many.
SIDE = 1.96
LEAST = 5  # units that an interval needs
# Margin at the ends, so that rounding never puts an estimate outside.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
  """Sums over one prompt, or over a batch decoded and timed together.

  Attributes:
    num_tokens: emitted tokens.
    num_target_calls, num_drafted, num_accepted, expected_accepted,
      total_variation: sums over the unit's rows of `specjax.state.Counters`.
    seconds: wall-clock time, with prefill, without compilation.
    baseline_num_tokens, baseline_num_target_calls, baseline_seconds: the same
      for plain autoregressive decoding of the same prompts, or None.
  """

  num_tokens: int
  num_target_calls: int
  num_drafted: int
  num_accepted: int
  expected_accepted: float
  total_variation: float | None
  seconds: float
  baseline_num_tokens: int | None = None
  baseline_num_target_calls: int | None = None
  baseline_seconds: float | None = None


def unit_of(
  completions: Sequence[Completion],
  seconds: float,
  baseline: tuple[Sequence[Completion], float] | None,
) -> Unit:
  """The unit of a batch, with its baseline's completions and seconds if any."""
  total = lambda name: sum_known(getattr(c, name) for c in completions)
  plain: dict[str, Any] = {}
  if baseline:
    done, plain["baseline_seconds"] = baseline
    plain |= {
      "baseline_num_tokens": sum(len(c.token_ids) for c in done),
      "baseline_num_target_calls": sum(c.num_target_calls for c in done),
    }
  return Unit(
    num_tokens=sum(len(c.token_ids) for c in completions),
    num_target_calls=total("num_target_calls"),
    num_drafted=total("num_drafted"),
    num_accepted=total("num_accepted"),
    expected_accepted=total("expected_accepted"),
    total_variation=total("total_variation"),
    seconds=seconds,
    **plain,
  )


def sum_known(values: Iterable[Any]) -> Any:
  """The sum of the values; None if any of them is None."""
  every = list(values)
  return None if None in every else sum(every)


def groups_of(members: Sequence[Iterable[Hashable]]) -> list[int]:
  """Groups units that share prompts; returns each unit's group from 0.

  Args:
    members: the prompts of each unit. Sharing is transitive.
  """
  parents = list(range(len(members)))

  def root(unit: int) -> int:
    while parents[unit] != unit:
      unit = parents[unit]
    return unit

  first: dict[Hashable, int] = {}
  for unit, shared in enumerate(members):
    for member in shared:
      parents[root(unit)] = root(first.setdefault(member, unit))
  roots = [root(unit) for unit in range(len(members))]
  numbers = {one: number for number, one in enumerate(dict.fromkeys(roots))}
  return [numbers[one] for one in roots]


def merged(units: Sequence[Unit], groups: Sequence[int]) -> list[Unit]:
  """Sums the units of each group; see `groups_of`."""
  parts: dict[int, list[dict]] = {}
  for unit, group in zip(units, groups, strict=True):
    parts.setdefault(group, []).append(vars(unit))
  return [
    Unit(**{name: sum_known(one[name] for one in some) for name in some[0]})
    for some in parts.values()
  ]


def log_interval(
  numerators: Sequence[ArrayLike], denominators: Sequence[ArrayLike]
) -> tuple[np.ndarray, np.ndarray]:
  """Interval of a ratio of products of sums over units.

  Student's t on the log scale with the jackknife's standard error; for six
  units a percentile bootstrap's "95%" interval covers only 84%. On the log
  scale a ratio and its inverse have the same interval. Units are weighted
  as in the ratio of sums, and columns stay paired. The degrees of freedom are
  Kish's effective number of units, `1 / sum(share^2)` (n for equal units),
  minus one.

  Args:
    numerators: arrays `f[..., n]`, one entry per unit; their sums are
      multiplied.
    denominators: likewise.

  Returns:
    Low and high ends, `f64[...]`; NaN where all but one unit sum to zero.
  """
  top, bottom = (
    np.stack([np.asarray(x, float) for x in columns])
    for columns in (numerators, denominators)
  )  # [columns, ..., n]
  count = top.shape[-1]

  def log_ratio(sums):
    with np.errstate(divide="ignore", invalid="ignore"):
      above, below = (np.log(sums(x)).sum(0) for x in (top, bottom))
      return above - below

  total = lambda x: x.sum(-1, keepdims=True)
  without = log_ratio(lambda x: total(x) - x)  # [..., n]
  with np.errstate(invalid="ignore"):
    error = np.sqrt((count - 1) * without.var(-1))
    shares = np.concatenate([x / total(x) for x in (top, bottom)]).mean(0)
  freedom = np.maximum(1 / (shares**2).sum(-1) - 1, 1)
  side = error * special.stdtrit(freedom, (1 + _CONFIDENCE) / 2)
  middle = log_ratio(total)[..., 0]
  return np.exp(middle - side), np.exp(middle + side)


def ratio(
  name: str,
  numerators: Sequence[ArrayLike],
  denominators: Sequence[ArrayLike],
  *,
  limits: tuple[float, float] = (0.0, math.inf),
) -> dict[str, Any]:
  """A ratio of products of sums, and its interval: NAME and NAME_ci.

  Args:
    name: the ratio's name.
    numerators, denominators: as for `log_interval`, `[n]` each, equally many.
    limits: the ratio's range, to which the interval is clipped (this does not
      change its coverage).

  Returns:
    Both by name. The ratio is None if a denominator is 0; the interval is None
    if a column has fewer than `LEAST` nonzero units.
  """
  pairs = zip(numerators, denominators, strict=True)
  sums = [(np.sum(above), np.sum(below)) for above, below in pairs]
  known, ends = all(below for _, below in sums), None
  columns = (*numerators, *denominators)
  if all(np.count_nonzero(x) >= LEAST for x in columns):
    low, high = log_interval(numerators, denominators)
    within = lambda end: min(max(float(end), limits[0]), limits[1])
    ends = within(low * (1 - _ROUNDING)), within(high * (1 + _ROUNDING))
  return {
    name: float(math.prod(a / b for a, b in sums)) if known else None,
    f"{name}_ci": ends,
  }


def summarize(units: Sequence[Unit], *, max_depth: float = math.inf) -> dict:
  """The metrics of a run.

  Args:
    units: at least one; all or none have baseline fields.
    max_depth: G, the most drafted tokens that a target call can emit.

  Returns:
    A JSON-able dictionary. `block_efficiency` is emitted tokens per target
    call, `acceptance_rate` accepted over drafted tokens,
    `expected_acceptance_rate` its Rao-Blackwellized estimate, `total_variation`
    the mean over emitted tokens of the exact distance between a token's
    distribution and the target's (0 for a lossless rule), rates are tokens per
    second, `speedup` is the ratio of the two rates; `_ci` are 95% intervals.
    Entries that cannot be computed, or a distance that the rule does not
    report, are None.
  """
  (whole,) = merged(units, [0] * len(units))
  totals = vars(whole)
  paired = totals["baseline_seconds"] is not None
  column = lambda name: [getattr(u, name) for u in units]

  def share(top: str, bottom: str) -> float | None:
    some, every = totals[top], totals[bottom]
    return None if some is None or not every else float(some / every)

  def of(name: str, top: str, bottom: str, *limits: float) -> dict:
    return ratio(name, [column(top)], [column(bottom)], limits=limits)

  return {
    **totals,
    **of(
      "block_efficiency", "num_tokens", "num_target_calls", 1, max_depth + 1
    ),
    **of("acceptance_rate", "num_accepted", "num_drafted", 0, 1),
    "expected_acceptance_rate": share("expected_accepted", "num_drafted"),
    "total_variation": share("total_variation", "num_tokens"),
    "tokens_per_second": share("num_tokens", "seconds"),
    "baseline_tokens_per_second": share(
      "baseline_num_tokens", "baseline_seconds"
    ),
    **(
      ratio(
        "speedup",
        [column("num_tokens"), column("baseline_seconds")],
        [column("seconds"), column("baseline_num_tokens")],
      )
      if paired
      else {"speedup": None, "speedup_ci": None}
    ),
  }
