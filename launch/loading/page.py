"""A load test as a table and a figure."""

import pathlib
from typing import Any

from matplotlib.figure import Figure

from launch import tables

_HEAD = [
  "test", "load", "finished", "requests/s", "tokens/s", "TTFT ms, p50 / p99",
  "TPOT ms, p50 / p99", "ITL ms, p50 / p99", "objectives met", "goodput, 1/s",
  "accepted", "tokens a call",
]  # fmt: skip


def table(results: dict[str, dict]) -> str:
  """One row a load, of every result by its file."""
  rows = [
    _row(pathlib.Path(path).stem, run)
    for path, result in results.items()
    for run in result["runs"]
  ]
  return tables.table(_HEAD, rows)


def label(run: dict[str, Any]) -> str:
  """What a load was."""
  if run["rate"] is None:
    return f"{run['clients']} clients"
  return f"{run['rate']:g} a second"


def _row(name: str, run: dict[str, Any]) -> list[str]:
  pair = lambda found: (
    "" if found is None else f"{found['p50']:.0f} / {found['p99']:.0f}"
  )
  drafted = run["acceptance"]
  return [
    name,
    label(run),
    f"{run['num_finished']} of {run['num_requests']}",
    f"{run['requests_per_second']:.2f}",
    f"{run['tokens_per_second']:.1f}",
    pair(run["ttft_ms"]),
    pair(run["tpot_ms"]),
    pair(run["itl_ms"]),
    f"{run['attainment']:.0%}",
    f"{run['goodput']:.2f}",
    f"{drafted['acceptance']:.2f}" if drafted else "",
    f"{drafted['block_efficiency']:.2f}" if drafted else "",
  ]


def text(result: dict[str, Any], name: str, figure: str) -> str:
  """The page of one result."""
  settings = result["settings"]
  said = ", ".join(
    f"{what} {1000 * settings[key]:g} ms"
    for what, key in (("first token", "ttft"), ("each token", "tpot"))
    if settings[key] is not None
  )
  return (
    f"# Load test: {name}\n\n"
    f"    {result['provenance']['command']}\n\n"
    f"Objectives: {said or 'none'}. Loads in requests a second are Poisson "
    "arrivals, whatever becomes of them; a client asks again as soon as it is "
    "answered. ITL is the time between chunks of several tokens.\n\n"
    f"{table({name: result})}\n\n![Load]({figure})\n"
  )


def figure(result: dict[str, Any]) -> Figure:
  """Time per token and objectives met, against load."""
  runs = result["runs"]
  places = range(len(runs))
  found = Figure(figsize=(7, 3), layout="constrained")
  times, met = found.subplots(1, 2)
  for percentile, style in (("p50", "o-"), ("p90", "s--"), ("p99", "^:")):
    times.plot(
      places,
      [
        run["tpot_ms"][percentile] if run["tpot_ms"] else float("nan")
        for run in runs
      ],
      style,
      color="#26547c",
      label=percentile,
    )
  if result["settings"]["tpot"] is not None:
    times.axhline(1000 * result["settings"]["tpot"], color="#b33", lw=1)
  times.set_ylabel("ms a token")
  times.set_ylim(bottom=0)
  times.legend(frameon=False)
  met.plot(places, [run["attainment"] for run in runs], "o-", color="#26547c")
  met.set_ylim(0, 1.05)
  met.set_ylabel("share of requests that met objectives")
  for axes in (times, met):
    axes.set_xticks(list(places), [label(run) for run in runs], rotation=30)
  return found
