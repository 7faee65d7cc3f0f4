r"""Draws the figures about rules from committed measurements.

  python -m launch.studies.rules.plots costs \
    docs/measurements/rules/costs.json \
    docs/figures/rule-costs.svg

The same measurements give the same file, byte for byte.
"""

import json
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Callable

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from launch import figures, tables
from launch.studies.rules import page
from specjax import rules

_AXES = {
  "vocab_size": "vocabulary V",
  "num_drafts": "paths K",
  "num_speculative_tokens": "drafted tokens a path G",
  "batch_size": "rows B",
}
_CENTRE = (1 << 17, 4, 4, 1)
_MARKERS = "osD^v<>PX*"


def costs(result: dict) -> Figure:
  """Cost of every rule along V, K, G and B, in passes over its inputs.

  A row a rule, the cheapest first, and a column a value of an axis, each with
  its number. Of the lines along an axis a rule shows the one with the most
  points, and of equals the one closest to the centre.

  Args:
    result: of `launch.studies.rules.costs`.
  """
  series = {}
  for cell in result["cells"]:
    if cell["rule"].partition("(")[0] in rules.RULES:  # others are gone
      series.setdefault((cell["rule"], cell["siblings"]), []).append(cell)
  lines = {
    _label(name, cells): {axis: _line(cells, axis) for axis in _AXES}
    for name, cells in series.items()
  }
  ratios = lambda label: [c["ratio"] for x in lines[label].values() for c in x]
  labels = sorted(lines, key=lambda label: statistics.median(ratios(label)))
  ticks = {axis: sorted({c[axis] for c in result["cells"]}) for axis in _AXES}
  figure = Figure(figsize=(9.5, 7.2), layout="constrained")
  panels = figure.subplots(
    1, len(_AXES), sharey=True, width_ratios=[len(t) for t in ticks.values()]
  )
  colors = colormaps["RdBu_r"]
  norm = LogNorm(1 / 32, 32)
  for panel, (axis, title) in zip(panels, _AXES.items(), strict=True):
    table = np.full((len(labels), len(ticks[axis])), np.nan)
    for row, label in enumerate(labels):
      for cell in lines[label][axis]:
        column = ticks[axis].index(cell[axis])
        table[row, column] = cell["ratio"]
        panel.text(
          column, row, f"{cell['ratio']:.1f}", ha="center", va="center",
          color="white" if abs(math.log2(cell["ratio"])) > 3 else "black",
        )  # fmt: skip
    panel.imshow(table, cmap=colors, norm=norm, aspect="auto")
    panel.set_xticks(
      range(len(ticks[axis])), [f"{tick:,}" for tick in ticks[axis]]
    )
    panel.set_yticks(range(len(labels)), labels)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    panel.set_xlabel(title)
  figure.suptitle(
    "Cost of verification in passes over both laws: below 1 blue, above red. V "
    "= 131,072, K = 4, G = 4, B = 1\nunless the column or the rule's name says "
    "otherwise; empty where nothing was measured.",
    fontsize="medium",
  )
  return figure


def _label(name: tuple[str, str], cells: list[dict]) -> str:
  """A rule, how its drafts are drawn, and where its lines are if not centred.

  Args:
    name: rule and siblings.
    cells: all of the rule's.
  """
  rule, siblings = name
  notes = [] if siblings == "iid" else [siblings.replace("_", " ")]
  line = _line(cells, "vocab_size")  # along which K and G stand still
  for letter, axis, usual in (
    ("K", "num_drafts", _CENTRE[1]),
    ("G", "num_speculative_tokens", _CENTRE[2]),
  ):
    if line[0][axis] != usual:
      notes.append(f"{letter} = {line[0][axis]}")
  return ", ".join([rule, *notes])


def optimality(result: dict) -> Figure:
  """Share of the optimum against K, a panel for each V.

  Args:
    result: of `launch.studies.rules.optimality`.
  """
  sizes = sorted({row["vocab_size"] for row in result["rows"]})
  figure = Figure(figsize=(11, 3.2), layout="constrained")
  panels = figure.subplots(1, len(sizes), sharey=True)
  names = [n for n in result["rows"][0]["share_of_optimum"] if n != "match"]
  for panel, size in zip(panels.flat, sizes, strict=True):
    rows = [row for row in result["rows"] if row["vocab_size"] == size]
    counts = [row["num_drafts"] for row in rows]
    for marker, name in zip(_MARKERS, names, strict=False):
      shares = [row["share_of_optimum"][name] for row in rows]
      mean = [share["mean"] for share in shares]
      least = [share["minimum"] for share in shares]
      (line,) = panel.plot(
        counts, mean, marker=marker, markersize=4, linewidth=1, label=name
      )
      panel.fill_between(
        counts, least, mean, color=line.get_color(), alpha=0.15, linewidth=0
      )
    panel.set_title(f"V = {size:,}", fontsize="medium")
    panel.set_xticks(counts)
    panel.set_xlabel("drafts K")
    panel.grid(axis="y", linewidth=0.3)
  panels.flat[0].set_ylabel("share of the optimum\n(shaded: to the minimum)")
  panels.flat[-1].legend(fontsize="small", loc="lower right")
  return figure


def joint(result: dict) -> Figure:
  """Share of the joint optimum of i.i.d. paths, a row a rule.

  Args:
    result: of `launch.studies.rules.joint`.
  """
  rows = [row for row in result["rows"] if row["siblings"] == "iid"]
  names = page.by_share(rows)[::-1]
  figure = Figure(figsize=(7, 0.6 + 0.3 * len(names)), layout="constrained")
  panel = figure.subplots()
  for place, name in enumerate(names):
    shares = [row["share_of_optimum"][name] for row in rows]
    mean = statistics.fmean(share["mean"] for share in shares)
    least = min(share["minimum"] for share in shares)
    panel.plot([least, mean], [place] * 2, color="tab:blue", linewidth=1)
    panel.plot(least, place, "|", color="tab:blue", markersize=7)
    panel.plot(mean, place, "o", color="tab:blue", markersize=4)
  panel.set_yticks(range(len(names)), names)
  panel.set_xlim(right=1)
  panel.set_xlabel("share of the joint optimum: mean, and down to the least")
  panel.grid(axis="x", linewidth=0.3)
  return figure


def efficiency(result: dict) -> Figure:
  """Block efficiency of every rule with its 95% interval, a panel a cell.

  Args:
    result: of `launch.studies.rules.sweep`.
  """
  cells = result["cells"]
  names = list(dict.fromkeys(n for cell in cells for n in cell["rules"]))[::-1]
  rows = (len(cells) + 3) // 4
  figure = Figure(figsize=(12, 4.6 * rows), layout="constrained")
  panels = figure.subplots(rows, 4, sharex=True, sharey=True, squeeze=False)
  for panel, cell in zip(panels.flat, cells, strict=False):
    budget = cell["num_drafts"] * cell["num_speculative_tokens"]
    for place, name in enumerate(names):
      found = cell["rules"].get(name)
      if found is None or found["num_drafted"] < budget:
        continue
      color = "tab:blue" if found["lossless"] else "tab:red"
      if found["block_efficiency_ci"]:
        panel.plot(
          found["block_efficiency_ci"], [place] * 2, color=color, linewidth=1
        )
      panel.plot(
        found["block_efficiency"],
        place,
        "o",
        color=color,
        markersize=4,
        fillstyle="full" if found["num_drafted"] == budget else "none",
      )
    panel.set_title(
      f"{cell['num_drafts']} x {cell['num_speculative_tokens']}, "
      f"temperature {cell['temperature']}",
      fontsize="medium",
    )
    panel.set_yticks(range(len(names)), names)
    panel.grid(axis="x", linewidth=0.3)
  for panel in panels[-1]:
    panel.set_xlabel("tokens per target call (95%)")
  dot = lambda color, label, **more: Line2D(
    [], [], marker="o", markersize=4, linestyle="", color=color, label=label,
    **more,
  )  # fmt: skip
  figure.legend(
    handles=[
      dot("tab:blue", "lossless"),
      dot("tab:red", "lossy"),
      dot("tab:gray", "more tokens drafted than K x G", fillstyle="none"),
    ],
    loc="outside upper center",
    ncols=3,
    fontsize="small",
  )
  return figure


def front(result: dict) -> Figure:
  """Distance against rejections, and cross-entropy against tokens per call.

  Args:
    result: of `launch.studies.rules.front`.
  """
  families = dict(result["families"])
  (lossless,) = families.pop("token")
  figure = Figure(figsize=(10, 4.2), layout="constrained")
  one, other = figure.subplots(1, 2)
  span = 1 - lossless["acceptance"]
  one.plot([0, span], [span, 0], color="black", linewidth=1, label="front")
  one.fill_between([0, span], [span, 0], color="black", alpha=0.06, linewidth=0)
  for number, (name, points) in enumerate(families.items()):
    column = lambda key, points=points: [point[key] for point in points]
    style = {
      "marker": _MARKERS[number % len(_MARKERS)],
      "color": f"C{number % 10}",
      "markersize": 4,
      "linewidth": 0.8,
      "linestyle": "-" if number < 10 else "--",
      "fillstyle": "full" if number < 10 else "none",
    }
    one.plot(
      [1 - a for a in column("acceptance")], column("total_variation"),
      label=name.replace("_", " "), **style,
    )  # fmt: skip
    other.plot(column("block_efficiency"), column("cross_entropy"), **style)
  other.plot(
    lossless["block_efficiency"], lossless["cross_entropy"], "*",
    color="black", markersize=9,
  )  # fmt: skip
  other.annotate(
    "lossless", (lossless["block_efficiency"], lossless["cross_entropy"]),
    xytext=(5, -11), textcoords="offset points", fontsize="small",
  )  # fmt: skip
  one.set_xlabel("probability of a rejection")
  one.set_ylabel("total variation from the target")
  other.set_xlabel(
    f"tokens per target call, {result['num_speculative_tokens']} drafted"
  )
  other.set_ylabel("cross-entropy under the target, nats a token")
  for panel in (one, other):
    panel.grid(linewidth=0.3)
    panel.spines[["top", "right"]].set_visible(False)
  one.set_xlim(left=0)
  one.set_ylim(bottom=0)
  figures.legend_below(figure, *one.get_legend_handles_labels())
  return figure


def _line(cells: list[dict], axis: str) -> list[dict]:
  """The cells along one axis."""
  names = [name for name in _AXES if name != axis]
  centre = [c for name, c in zip(_AXES, _CENTRE, strict=True) if name != axis]
  groups = {}
  for cell in cells:
    groups.setdefault(tuple(cell[n] for n in names), []).append(cell)

  def order(place):
    away = sum(
      abs(math.log2(a / b)) for a, b in zip(place, centre, strict=True)
    )
    return -len(groups[place]), away

  place = min(groups, key=order)
  return sorted(groups[place], key=lambda cell: cell[axis])


# Each takes the parsed JSON of a measurement.
FIGURES: dict[str, Callable[[dict], Figure]] = {
  "costs": costs,
  "optimality": optimality,
  "efficiency": efficiency,
  "joint": joint,
  "front": front,
}


def main(argv: list[str]) -> int:
  """`rule_plots FIGURE MEASUREMENT.json FIGURE.svg`; returns the exit code."""
  if len(argv) != 4 or argv[1] not in FIGURES or not os.path.isfile(argv[2]):
    print(
      f"usage: python -m launch.studies.rules.plots {{{','.join(FIGURES)}}} "
      "MEASUREMENT.json FIGURE.svg",
      file=sys.stderr,
    )
    return 2
  _, name, source, target = argv
  result = json.loads(pathlib.Path(source).read_text("utf-8"))
  figures.save(lambda: FIGURES[name](result), target)
  return 0


if __name__ == "__main__":
  tables.run(main)
