"""Tables and a figure about what rules cost, of committed measurements."""

import math
import statistics

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from launch import report
from specjax import rules

_AXES = {
  "vocab_size": "vocabulary V",
  "num_drafts": "paths K",
  "num_speculative_tokens": "drafted tokens a path G",
  "batch_size": "rows B",
}
_CENTRE = dict(
  vocab_size=1 << 17, num_drafts=4, num_speculative_tokens=4, batch_size=1
)


def _by_rule(cells: list[dict]) -> dict[tuple[str, str], list[dict]]:
  """Cells by rule and siblings, without rules that are gone."""
  groups: dict[tuple[str, str], list[dict]] = {}
  for cell in cells:
    if cell["rule"].partition("(")[0] in rules.RULES:
      groups.setdefault((cell["rule"], cell["siblings"]), []).append(cell)
  return groups


def _quoted(rule: str, siblings: str) -> str:
  return f"`{rule}`" + ("" if siblings == "iid" else f", {siblings}")


def costs_table(results: dict[str, dict]) -> str:
  """Milliseconds (passes over the inputs), of `launch.studies.rules.costs`.

  One row a rule, one column a shape, at the vocabulary closest to 131,072 and
  the smallest batch that were measured.
  """
  (result,) = results.values()
  sizes = {cell["vocab_size"] for cell in result["cells"]}
  near = min(sizes, key=lambda v: abs(math.log(v / 131_072)))
  batch = min(cell["batch_size"] for cell in result["cells"])
  cells = [
    cell
    for cell in result["cells"]
    if (cell["vocab_size"], cell["batch_size"]) == (near, batch)
  ]
  shape_of = lambda c: (c["num_drafts"], c["num_speculative_tokens"])
  shapes = sorted({shape_of(cell) for cell in cells})
  lines = []
  for name, own in _by_rule(cells).items():
    said = {
      shape_of(c): f"{c['milliseconds']:.1f} ({c['ratio']:.1f}x)" for c in own
    }
    lines.append([_quoted(*name), *(said.get(shape, "–") for shape in shapes)])
  head = [f"V = {near:,}, B = {batch}", *(f"K={k}, G={g}" for k, g in shapes)]
  return report.table(head, lines)


def cost_limits(results: dict[str, dict], limit: float = 3.0) -> str:
  """In how many of the cells measured a rule costs at most `limit` passes."""
  (result,) = results.values()
  ratios = lambda item: [cell["ratio"] for cell in item[1]]
  place = "V = {vocab_size:,}, K = {num_drafts}, G = {num_speculative_tokens}"
  return report.columns(
    _by_rule(result["cells"]).items(),
    {
      "rule": lambda item: _quoted(*item[0]),
      "cells": lambda item: str(len(item[1])),
      f"within {limit:g} passes": lambda item: str(
        sum(ratio <= limit for ratio in ratios(item))
      ),
      "median": lambda item: f"{statistics.median(ratios(item)):.1f}",
      "most": lambda item: (
        "{ratio:.1f} (" + place + ", B = {batch_size})"
      ).format(**max(item[1], key=lambda cell: cell["ratio"])),
    },
  )


def costs(result: dict) -> Figure:
  """Cost of every rule along V, K, G and B, in passes over its inputs.

  A row a rule, the cheapest first, and a column a value of an axis, each with
  its number. Of the lines along an axis a rule shows the one with the most
  points, and of equals the one closest to the centre.

  Args:
    result: of `launch.studies.rules.costs`.
  """
  lines = {
    _label(name, cells): {axis: _line(cells, axis) for axis in _AXES}
    for name, cells in _by_rule(result["cells"]).items()
  }
  ratios = lambda label: [c["ratio"] for x in lines[label].values() for c in x]
  labels = sorted(lines, key=lambda label: statistics.median(ratios(label)))
  ticks = {axis: sorted({c[axis] for c in result["cells"]}) for axis in _AXES}
  figure, (panels,) = report.panels(
    9.5, 7.2, columns=len(_AXES), sharey=True,
    width_ratios=[len(t) for t in ticks.values()],
  )  # fmt: skip
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
    panel.imshow(
      table, cmap=colormaps["RdBu_r"], norm=LogNorm(1 / 32, 32), aspect="auto"
    )
    panel.set_xticks(
      range(len(ticks[axis])), [f"{tick:,}" for tick in ticks[axis]]
    )
    panel.set_yticks(range(len(labels)), labels)
    panel.tick_params(length=0)
    panel.grid(False)
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
  for letter, axis in (("K", "num_drafts"), ("G", "num_speculative_tokens")):
    if line[0][axis] != _CENTRE[axis]:
      notes.append(f"{letter} = {line[0][axis]}")
  return ", ".join([rule, *notes])


def _line(cells: list[dict], axis: str) -> list[dict]:
  """The cells along one axis."""
  names = [name for name in _AXES if name != axis]
  groups = {}
  for cell in cells:
    groups.setdefault(tuple(cell[n] for n in names), []).append(cell)

  def order(place):
    pairs = zip(place, (_CENTRE[name] for name in names), strict=True)
    return -len(groups[place]), sum(abs(math.log2(a / b)) for a, b in pairs)

  place = min(groups, key=order)
  return sorted(groups[place], key=lambda cell: cell[axis])


def settings_table(results: dict[str, dict]) -> str:
  """Tokens of a rule's settings beside their cost: a row each.

  Tokens per target call of the first, and of the others their share of it, are
  of `launch.studies.rules.sweep` at temperature 1, milliseconds of
  `launch.studies.rules.costs` for 4 paths of 4 tokens.

  Args:
    results: a sweep and costs, in this order.
  """
  sweep, timing = results.values()
  cells = [cell for cell in sweep["cells"] if cell["temperature"] == 1]
  shape = "{num_drafts}x{num_speculative_tokens}, T={temperature}"
  timed: dict[str, dict[int, float]] = {}
  for cell in timing["cells"]:
    place = {name: cell[name] for name in _CENTRE if name != "vocab_size"}
    if place.items() <= _CENTRE.items() and cell["siblings"] == "iid":
      times = timed.setdefault(cell["rule"], {})
      times[cell["vocab_size"]] = cell["milliseconds"]
  sizes = sorted({size for times in timed.values() for size in times})
  first, *_ = rows = list(cells[0]["rules"])
  tokens = lambda cell, rule: (
    report.estimate(cell["rules"][rule], "block_efficiency")
    if rule == first
    else report.estimate(cell["rules"][rule], "block_efficiency_ratio", ".3f")
  )
  return report.table(
    [
      "rule",
      *(shape.format(**cell) for cell in cells),
      *(f"V = {size:,}, ms" for size in sizes),
    ],
    [
      [
        f"`{rule}`",
        *(tokens(cell, rule) for cell in cells),
        *(report.number(timed.get(rule, {}).get(s), ".2f") for s in sizes),
      ]
      for rule in rows
    ],
  )
