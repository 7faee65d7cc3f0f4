r"""The tables and the figures about rules, of committed measurements.

  python -m launch.studies.rules.plots costs \
    docs/measurements/rules/costs.json \
    docs/figures/rule-costs.svg

The same measurements give the same file, byte for byte.
"""

import pathlib
import statistics
from collections.abc import Callable, Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from launch import report
from launch.studies.rules.cost_plots import costs

# ----------------------------------------------------- along a pair's contexts


def _excess(numbers: dict | None, cell: dict) -> int:
  """Tokens that a rule drafted beyond its cell's K x G; -1 where it has none.

  Rules of one path draft fewer where there are several, and are not shown; hub
  pairs at every node are more.
  """
  budget = cell["num_drafts"] * cell["num_speculative_tokens"]
  return -1 if numbers is None else max(numbers["num_drafted"] - budget, -1)


def efficiency_table(results: dict[str, dict]) -> str:
  """Block efficiency of every rule, of `launch.studies.rules.sweep`.

  Rules of one path are measured in the cells with one path only. A number with
  a star drafted more tokens than its column says (hub pairs at every node).
  """
  (result,) = results.values()

  def text(numbers: dict | None, cell: dict) -> str:
    if numbers is None or _excess(numbers, cell) < 0:
      return "–"
    said = f"{numbers['block_efficiency']:.2f}" + "*" * (
      _excess(numbers, cell) > 0
    )
    said += report.interval(numbers["block_efficiency_ci"])
    if not numbers["lossless"]:
      said += f", TV {numbers['total_variation']:.2f}"
    return said

  cells = result["cells"]
  names = dict.fromkeys(name for cell in cells for name in cell["rules"])
  shape = "{num_drafts}x{num_speculative_tokens}, T={temperature}"
  return report.table(
    ["rule", *(shape.format(**cell) for cell in cells)],
    [
      [f"`{name}`", *(text(cell["rules"].get(name), cell) for cell in cells)]
      for name in names
    ],
  )


def efficiency(result: dict) -> Figure:
  """Block efficiency of every rule with its 95% interval, a panel a cell.

  Args:
    result: of `launch.studies.rules.sweep`.
  """
  cells = result["cells"]
  names = list(dict.fromkeys(n for cell in cells for n in cell["rules"]))[::-1]
  rows = (len(cells) + 3) // 4
  figure, panels = report.panels(
    12, 4.6 * rows, rows, 4, sharex=True, sharey=True
  )
  for panel, cell in zip(panels.flat, cells, strict=False):
    for place, name in enumerate(names):
      numbers = cell["rules"].get(name)
      if numbers is None or _excess(numbers, cell) < 0:
        continue
      color = "tab:blue" if numbers["lossless"] else "tab:red"
      if ends := numbers["block_efficiency_ci"]:
        panel.plot(ends, [place] * 2, color=color)
      panel.plot(
        numbers["block_efficiency"], place, "o", color=color,
        fillstyle="none" if _excess(numbers, cell) else "full",
      )  # fmt: skip
    panel.set_title(
      f"{cell['num_drafts']} x {cell['num_speculative_tokens']}, "
      f"temperature {cell['temperature']}"
    )
    panel.set_yticks(range(len(names)), names)
  for panel in panels[-1]:
    panel.set_xlabel("tokens per target call (95%)")
  dot = lambda color, label, **more: Line2D(
    [], [], marker="o", linestyle="", color=color, label=label, **more
  )
  figure.legend(
    handles=[
      dot("tab:blue", "lossless"),
      dot("tab:red", "lossy"),
      dot("tab:gray", "more tokens drafted than K x G", fillstyle="none"),
    ],
    loc="outside upper center",
    ncols=3,
  )
  return figure


def front_table(results: dict[str, dict]) -> str:
  """Rules on the front and their costs, of `launch.studies.rules.front`."""
  (result,) = results.values()
  plain = lambda key, form: (
    lambda point: f"{point[key]:{form}}".replace("-0.000", "0.000")
  )
  with_ends = lambda key, form: (
    lambda point: (
      f"{point[key]:{form}}" + report.interval(point.get(f"{key}_ci"), form)
    )
  )
  return report.columns(
    [point for points in result["families"].values() for point in points],
    {
      "rule": lambda point: f"`{point['rule']}`",
      "accepted": plain("acceptance", ".3f"),
      "TV": plain("total_variation", ".3f"),
      "above the front": plain("above_front", ".3f"),
      "tokens a call (95%)": with_ends("block_efficiency", ".2f"),
      "cross-entropy, nats": plain("cross_entropy", ".2f"),
      "over lossless (95%)": with_ends("cross_entropy_ratio", ".3f"),
    },
  )


def front(*results: dict) -> Figure:
  """Distance against rejections, and cross-entropy against tokens per call.

  Args:
    results: of `launch.studies.rules.front`, a row each.
  """
  figure, panels = report.panels(10, 4.2 * len(results), len(results), 2)
  for (one, other), result in zip(panels, results, strict=True):
    _draw_front(result, one, other)
    if len(results) > 1:
      name = pathlib.PurePath(result["config"]["target"]).stem
      name = "embedded pair" if name == "target" else name.partition(".")[0]
      one.set_title(name)
  report.legend_below(figure, *panels[0, 0].get_legend_handles_labels())
  return figure


def _draw_front(result: dict, one: Axes, other: Axes) -> None:
  """The two panels of a pair."""
  families = dict(result["families"])
  (lossless,) = families.pop("token")
  span = 1 - lossless["acceptance"]
  one.plot([0, span], [span, 0], color="black", label="front")
  one.fill_between([0, span], [span, 0], color="black", alpha=0.06, linewidth=0)
  for number, (name, points) in enumerate(families.items()):
    column = lambda key, points=points: [point[key] for point in points]
    style = {
      "marker": report.MARKERS[number % 10], "color": f"C{number % 10}",
      "linestyle": "-" if number < 10 else "--",
      "fillstyle": "full" if number < 10 else "none",
    }  # fmt: skip
    one.plot(
      [1 - a for a in column("acceptance")], column("total_variation"),
      label=name.replace("_", " "), **style,
    )  # fmt: skip
    other.plot(column("block_efficiency"), column("cross_entropy"), **style)
  place = lossless["block_efficiency"], lossless["cross_entropy"]
  other.plot(*place, "*", color="black", markersize=9)
  other.annotate(
    "lossless", place, xytext=(5, -11), textcoords="offset points",
    fontsize="small",
  )  # fmt: skip
  one.set_xlabel("probability of a rejection")
  one.set_ylabel("total variation from the target")
  other.set_xlabel(
    f"tokens per target call, {result['num_speculative_tokens']} drafted"
  )
  other.set_ylabel("cross-entropy under the target, nats a token")
  one.set_xlim(left=0)
  one.set_ylim(bottom=0)


# ------------------------------------------------------------ shares of optima


def _mean_and_least(shares: Iterable[dict], digits: int) -> str:
  """Mean (least) over shares, which are of equally many models."""
  mean, least = _over(shares)
  return f"{mean:.{digits}f} ({least:.{digits}f})"


def _over(shares: Iterable[dict]) -> tuple[float, float]:
  shares = [*shares]
  mean = statistics.fmean(share["mean"] for share in shares)
  return mean, min(share["minimum"] for share in shares)


def _shares_of(rows: list[dict], rule: str, **wanted) -> list[dict]:
  """A rule's shares, of rows of some kind whose drafts it takes."""
  return [
    row["share_of_optimum"][rule]
    for row in rows
    if rule in row["share_of_optimum"]
    and all(row[name] == value for name, value in wanted.items())
  ]


def _by_share(rows: list[dict]) -> list[str]:
  """The rules of some rows of `rules.joint`, the best on average first."""
  names = dict.fromkeys(n for row in rows for n in row["share_of_optimum"])
  return sorted(names, key=lambda name: -_over(_shares_of(rows, name))[0])


def optimality_table(results: dict[str, dict]) -> str:
  """Share of the optimum, mean (minimum), of `rules.optimality`."""
  (result,) = results.values()
  share = lambda name: (
    lambda row: _mean_and_least(_shares_of([row], name), digits=4)
  )
  return report.columns(
    result["rows"],
    {
      "V": lambda row: f"{row['vocab_size']:,}",
      "K": lambda row: str(row["num_drafts"]),
      **{f"`{n}`": share(n) for n in result["rows"][0]["share_of_optimum"]},
    },
  )


def optimality(result: dict) -> Figure:
  """Share of the optimum against K, a panel for each V.

  Args:
    result: of `launch.studies.rules.optimality`.
  """
  sizes = sorted({row["vocab_size"] for row in result["rows"]})
  figure, panels = report.panels(11, 3.2, columns=len(sizes), sharey=True)
  names = [n for n in result["rows"][0]["share_of_optimum"] if n != "match"]
  for panel, size in zip(panels.flat, sizes, strict=True):
    rows = [row for row in result["rows"] if row["vocab_size"] == size]
    counts = [row["num_drafts"] for row in rows]
    for number, name in enumerate(names):
      mean, least = zip(
        *(_over(_shares_of([row], name)) for row in rows), strict=True
      )
      color = f"C{number}"
      panel.plot(
        counts, mean, marker=report.MARKERS[number], color=color, label=name
      )
      panel.fill_between(
        counts, least, mean, color=color, alpha=0.15, linewidth=0
      )
    panel.set_title(f"V = {size:,}")
    panel.set_xticks(counts)
    panel.set_xlabel("drafts K")
  panels[0, 0].set_ylabel("share of the optimum\n(shaded: to the minimum)")
  panels[0, -1].legend(loc="lower right")
  return figure


def joint_table(results: dict[str, dict]) -> str:
  """Share of the joint optimum, mean (least), of `rules.joint`: i.i.d. paths.

  A row a rule, the best first, a column each G and K.
  """
  (result,) = results.values()
  rows = [row for row in result["rows"] if row["siblings"] == "iid"]
  names = "num_speculative_tokens", "num_drafts"
  shapes = sorted({tuple(row[name] for name in names) for row in rows})
  kinds = [dict(zip(names, shape, strict=True)) for shape in shapes]
  return report.table(
    ["rule", *(f"G={g}, K={k}" for g, k in shapes), "all"],
    [
      [f"`{name}`", *_over_kinds(rows, name, kinds)] for name in _by_share(rows)
    ],
  )


def joint_others(results: dict[str, dict]) -> str:
  """The same for other siblings: a row each and rule, a column a kind of laws.

  Of each kind it is the optimum of drafts that are drawn so.
  """
  (result,) = results.values()
  names = dict.fromkeys(row["laws"] for row in result["rows"])
  kinds = [{"laws": name} for name in names]
  siblings = dict.fromkeys(row["siblings"] for row in result["rows"])
  lines = []
  for drawn in [name for name in siblings if name != "iid"]:
    rows = [row for row in result["rows"] if row["siblings"] == drawn]
    lines += [
      [drawn.replace("_", " "), f"`{rule}`", *_over_kinds(rows, rule, kinds)]
      for rule in _by_share(rows)
    ]
  head = ["siblings", "rule", *(name.replace("_", " ") for name in names)]
  return report.table([*head, "all"], lines)


def _over_kinds(rows: list[dict], rule: str, kinds: list[dict]) -> list[str]:
  """A rule's share over rows of each kind, and over all."""
  return [
    _mean_and_least(_shares_of(rows, rule, **kind), 3) for kind in (*kinds, {})
  ]


def joint(result: dict) -> Figure:
  """Share of the joint optimum of i.i.d. paths, a row a rule.

  Args:
    result: of `launch.studies.rules.joint`.
  """
  rows = [row for row in result["rows"] if row["siblings"] == "iid"]
  names = _by_share(rows)[::-1]
  figure, ((panel,),) = report.panels(7, 0.6 + 0.3 * len(names))
  for place, name in enumerate(names):
    mean, least = _over(_shares_of(rows, name))
    panel.plot([least, mean], [place] * 2, color="tab:blue")
    panel.plot(least, place, "|", color="tab:blue", markersize=7)
    panel.plot(mean, place, "o", color="tab:blue")
  panel.set_yticks(range(len(names)), names)
  panel.set_xlim(right=1)
  panel.set_xlabel("share of the joint optimum: mean, and down to the least")
  return figure


def off_draft(results: dict[str, dict]) -> str:
  """Worth of laws off the draft, of `rules.off_draft`: a row a size."""
  (result,) = results.values()
  names = "vocab_size", "num_speculative_tokens", "num_drafts", "pairs"
  groups: dict[tuple, list[dict]] = {}
  for row in result["rows"]:
    size = tuple(str(row[name]) for name in names)
    groups.setdefault(size, []).append(row["share_of_optimum"])
  lines = [[*size, _mean_and_least(some, 4)] for size, some in groups.items()]
  return report.table(["V", "G", "K", "m", "share, mean (least)"], lines)


# Each takes the parsed JSON of a measurement, `front` of several.
FIGURES: dict[str, Callable[..., Figure]] = {
  draw.__name__: draw for draw in (costs, optimality, efficiency, joint, front)
}


def main(argv: list[str]) -> int:
  """`plots FIGURE MEASUREMENT.json.. FIGURE.svg`; returns the exit code."""
  return report.draw("launch.studies.rules.plots", FIGURES, argv[1:])


if __name__ == "__main__":
  report.run(main)
