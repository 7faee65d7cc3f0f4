"""The tables and the figure of a study of depths."""

import numpy as np
from matplotlib.figure import Figure

from launch import tables
from launch.studies.depth import compare

_RULES = {
  "best_static": "best static depth",
  "confidence": "confidence of the newest token",
  "survival": "survival",
  "predicted": "predicted by a head",
  "optimal": "optimal, at its own rate",
  "optimum": "optimum of the bins' process",
}


def rules_in(results: list[tuple[str, dict]]) -> dict[str, str]:
  """The rules that were compared, with what they are called."""
  batches = [one for _, found in results for one in found["batches"]]
  return {
    key: name
    for key, name in _RULES.items()
    if all(key in one for one in batches)
  }


def table(results: list[tuple[str, dict]]) -> str:
  """Predicted tokens per second by batch size, and over the best static."""
  lines, rules = [], rules_in(results)
  for _, found in results:
    for one in found["batches"]:
      static = one["best_static"]["tokens_per_second"]
      cell = lambda key, one=one, static=static: (
        f"{one[key]['tokens_per_second'] / static - 1:+.1%} "
        f"({one[key]['name'].replace('(', ' ').rstrip(')')}, "
        f"≤ {one[key]['width']})"
      )
      lines.append(
        [
          f"{found['config']['temperature']:g}",
          str(one["batch_size"]),
          f"{one['draft_cost']:.3f}",
          f"{one['plain']:.0f}",
          f"{static:.0f} ({one['best_static']['name']})",
          *(cell(key) for key in list(rules)[1:]),
        ]
      )
  return tables.table(
    ["temperature", "batch", "cost of a level", "plain", "best static (depth)",
     *list(rules.values())[1:]],
    lines,
  )  # fmt: skip


def static_table(results: list[tuple[str, dict]]) -> str:
  """Every static depth by batch size."""
  lines, most = [], 0
  for _, found in results:
    most = max(most, found["depth"])
    for one in found["batches"]:
      lines.append(
        [
          f"{found['config']['temperature']:g}",
          str(one["batch_size"]),
          *(f"{rate:.0f}" for rate in one["static"].values()),
        ]
      )
  return tables.table(
    ["temperature", "batch", *map(str, range(most + 1))], lines
  )


def page(found: dict) -> str:
  """The study as Markdown."""
  results = [("", found)]
  lines = [
    "# How deep to draft",
    "",
    compare.advice(found),
    "",
    "![Tokens per second against batch size](depth.svg)",
    "",
    "*Predicted tokens per second of every way to choose a depth, over plain "
    "decoding's, against the batch size.*",
    "",
    table(results),
    "",
    "Tokens per second are predicted: from acceptances of "
    f"{found['num_rounds']} rounds of {found['depth']} drafted tokens, and "
    "from the costs given. A level costs so much of a plain round; `optimal` "
    "is told what it costs of a round as wide as its own. Beside each rule "
    "stands its setting, and how many tokens it may draft at most. Every "
    "static depth:",
    "",
    static_table(results),
  ]
  return "\n".join(lines) + "\n"


def figure(found: dict) -> Figure:
  """Rates over plain decoding's, against the batch size."""
  drawn = Figure((6.0, 3.6), layout="constrained")
  panel = drawn.subplots()
  rows = [one["batch_size"] for one in found["batches"]]
  over = lambda values: (
    np.array(values) / [one["plain"] for one in found["batches"]]
  )
  depths = list(found["batches"][0]["static"])
  for depth in depths[1:]:
    panel.plot(
      rows,
      over([one["static"][depth] for one in found["batches"]]),
      color="0.8",
      linewidth=0.8,
      label="static depths" if depth == depths[1] else None,
    )
  for index, (key, name) in enumerate(rules_in([("", found)]).items()):
    panel.plot(
      rows,
      over([one[key]["tokens_per_second"] for one in found["batches"]]),
      color=f"C{index}",
      marker="o",
      markersize=3,
      linestyle="--" if key == "optimum" else "-",
      label=name,
    )
  panel.axhline(1, color="black", linewidth=0.8, label="plain decoding")
  panel.set_xscale("log", base=2)
  panel.set_xticks(rows, [str(r) for r in rows])
  panel.set_xlabel("rows of a batch")
  panel.set_ylabel("predicted tokens per second, over plain")
  panel.legend(fontsize=7)
  return drawn
