"""Table of guidellm's measurements of servers under load, as Markdown.

Of files that `guidellm run --output kind=json` wrote (0.8.1).
"""

import pathlib
from typing import Any

from launch import report

_HEAD = [
  "run", "load", "finished", "requests/s", "of them as asked", "tokens/s",
  "TTFT ms, median / p95", "ITL ms, median / p95",
]  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
  """A row for each load of each file.

  A load is so many clients, each of which asks again as soon as it is answered,
  or so many requests a second, whoever waits. What was answered as asked met
  the objectives of the run (`slo.tpot_ms` and the like): goodput.

  Args:
    results: contents of files by their paths.
  """
  rows = [
    _row(pathlib.Path(path).stem, one)
    for path, content in results.items()
    for one in content["benchmarks"]
  ]
  return report.table(_HEAD, rows)


def _row(name: str, one: dict[str, Any]) -> list[str]:
  metrics, strategy = one["metrics"], one["config"]["strategy"]
  of = lambda metric: metrics[metric]["successful"]
  rate = lambda metric: f"{of(metric)['mean']:.2f}"
  times = lambda metric: (
    f"{of(metric)['median']:.0f} / {of(metric)['percentiles']['p95']:.0f}"
  )
  is_closed = strategy["type_"] == "concurrent"
  totals, goodput = metrics["request_totals"], metrics.get("request_goodput")
  return [
    name,
    f"{strategy['streams']} client{'s' * (strategy['streams'] > 1)}"
    if is_closed
    else f"{strategy['rate']:g} a second",
    f"{totals['successful']} of {totals['total']}",
    rate("requests_per_second"),
    "–" if goodput is None else rate("request_goodput"),
    rate("output_tokens_per_second"),
    times("time_to_first_token_ms"),
    times("inter_token_latency_ms"),
  ]
