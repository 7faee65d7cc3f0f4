"""All ways to choose a depth beside each other, on the same rounds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.studies.depth import replay
from launch.studies.depth.machine import Machine, without_levels
from launch.studies.depth.process import optimum, process_of
from launch.studies.depth.traces import Traces
from specjax.adaptive import policies as depth_lib
from specjax.adaptive.estimates import BINS
from specjax.adaptive.policies import Policy

BATCHES = (1, 2, 4, 8, 16)
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Of the chance that something is rejected; SpecDec++'s weight makes it large.
REJECTED = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
POLICIES = ("confidence", "survival", "predicted", "optimal")


def compare(
  traces: Traces,
  machine: Machine,
  *,
  batches: Sequence[int] = BATCHES,
  predictor: tuple[Policy, Any] | None = None,
) -> dict:
  """Plain decoding, every static depth, each rule at its best, the optimum.

  A rule's threshold and width are the best for the batch, found on the traces
  themselves, as the best static depth is; `optimal` is told what a level costs
  and how many rows pay for it, and only its width is chosen. The optimum is of
  one row's rounds, and knows the acceptances of the traces from the first round
  on, which no rule in the loop does.

  Args:
    traces: the rounds.
    machine: what they cost.
    batches: rows of a batch.
    predictor: a trained policy and its parameters, whose own cost is not
      counted.
  """
  every = np.full(traces.there.shape, traces.depth)
  process = process_of(traces)
  named = lambda text, values: [f"{text}threshold={t:g})" for t in values]

  def tried(names, policy, prices, params=None):
    found = replay.depths(
      traces, replay.priced(policy), np.array(prices), params=params
    )
    return dict(zip(names, found, strict=True))

  by_rule = {
    name: tried(named(f"{name}(", THRESHOLDS), make(), THRESHOLDS)
    for name, make in (
      ("confidence", depth_lib.confidence), ("survival", depth_lib.survival),
    )
  }  # fmt: skip
  if predictor is not None:
    policy, params = predictor
    by_rule["predicted"] = tried(
      named("predicted(head=HEAD,", REJECTED),
      policy,
      [1 - t for t in REJECTED],
      params,
    )
  widths = range(1, traces.depth + 1)
  found = []
  for rows in batches:
    costs = machine.costs(rows)
    at = lambda drafted, width, rows=rows, costs=costs: replay.rate(
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
    told = [round(costs.draft / without_levels(costs, w), 3) for w in widths]
    limits, predicted = zip(
      *(optimum(process, costs, width) for width in widths), strict=True
    )
    tables = np.full((len(widths), traces.depth, BINS + 1), 2.0)
    for width, limit in zip(widths, limits, strict=True):
      tables[width - 1, :width] = limit
    known = replay.depths(traces, replay.limited, tables, known=process)
    by_rate = replay.depths(
      traces,
      lambda value, rows=rows: replay.capped(
        depth_lib.by_rate(value[0], rows), value[1]
      ),
      (np.array(told), np.array(widths)),
    )
    found.append(
      {
        "batch_size": rows,
        "draft_cost": float(costs.draft / costs.of_round(0)),
        "plain": static[0]["tokens_per_second"],
        "static": {k: v["tokens_per_second"] for k, v in static.items()},
        "best_static": {"name": str(most), **static[most]},
        **{name: best(named) for name, named in by_rule.items()},
        "optimal": _fastest(
          [
            {
              "name": depth_lib.optimal(cost=cost, rows=rows).name,
              **at(by_rate[width - 1], width),
            }
            for width, cost in zip(widths, told, strict=True)
          ]
        ),
        "optimum": _fastest(
          [
            {
              "name": "table",
              **at(known[width - 1], width),
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
  options = [one[name] for name in POLICIES if name in one]
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
    f"At batch size {rows} use policy={best['name']} with "
    f"tokens={best['width']}: predicted {gain:+.1%} over the "
    f"best static depth, which is {static['name']} (the optimum for this "
    f"pair's confidences: {ceiling:+.1%})."
  )
