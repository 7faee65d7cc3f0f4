"""Draws the figures of `launch.studies.theory` from their numbers."""

from collections.abc import Callable, Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from launch import report
from launch.evaluation import intervals


def _figure(width=5.5, height=3.6, columns=1) -> tuple[Figure, list[Axes]]:
  figure, (panels,) = report.panels(width, height, columns=columns)
  return figure, list(panels)


def _curves(
  panel: Axes,
  x: list[int],
  lines: Iterable[tuple[str, list[float], int | None]],
  *,
  title: str,
  xlabel: str,
) -> None:
  """Lines over the same integers, each with at most one marked point."""
  for index, (label, y, mark) in enumerate(lines):
    marker = report.MARKERS[index] if mark is None else None
    panel.plot(x, y, color=f"C{index}", label=label, marker=marker)
    if mark is not None:
      panel.plot(x[mark], y[mark], "*", color=f"C{index}", markersize=9)
  panel.set_title(title)
  panel.set_xlabel(xlabel)
  panel.legend()


def _converging(panel: Axes, numbers: dict, theorem: str) -> None:
  """Running averages with 95% intervals, and the theory's lines."""
  first = 100  # runs; earlier intervals are too wide to plot
  for index, (count, line) in enumerate(numbers["drafts"].items()):
    color, simulated = f"C{index}", line["simulated"]
    runs, mean = np.array(line["runs"]), np.array(line["mean"])
    error = intervals.SIDE * np.array(line["standard_error"])
    name = "" if count == "1" else f"M = {count}, "
    said = report.plus_minus(simulated["mean"], simulated["standard_error"], 3)
    panel.plot(
      runs, mean, color=color, linewidth=1.2,
      label=f"{name}simulated (95%): {said}",
    )  # fmt: skip
    panel.fill_between(
      runs, mean - error, mean + error, color=color, alpha=0.2, linewidth=0
    )
    panel.axhline(
      line["theory"], color=color, linestyle="--",
      label=f"{name}{theorem}: {line['theory']:.3f}",
    )  # fmt: skip
  shown = [line["theory"] for line in numbers["drafts"].values()]
  spread = max(
    np.array(line["standard_error"])[np.array(line["runs"]) >= first].max()
    for line in numbers["drafts"].values()
  )
  panel.set_ylim(min(shown) - 3 * spread, max(shown) + 5 * spread)
  panel.set_xlim(left=first)
  panel.set_xscale("log")
  panel.set_xlabel("runs averaged")
  panel.set_title(
    f"T = {numbers['horizon']} tokens, V = {numbers['vocab_size']}"
  )
  panel.legend(loc="upper right")


def single(numbers: dict) -> Figure:
  """Figure 1."""
  horizons = numbers["horizons"].values()
  figure, panels = _figure(9, 3.4, len(horizons))
  for panel, one in zip(panels, horizons, strict=True):
    _converging(panel, one, "Theorem 1")
  panels[0].set_ylabel("rejections a run")
  return figure


def batch(numbers: dict) -> Figure:
  """Figure 2."""
  figure, (panel,) = _figure(6, 4)
  _converging(panel, numbers, "Theorem 3")
  panel.set_ylabel("rejections a run")
  return figure


def _octaves(panel) -> None:
  """Makes the x-axis logarithmic to base 2, with integer ticks."""
  panel.set_xscale("log", base=2)
  panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")


def drafts(numbers: dict) -> Figure:
  """Figure 3."""
  figure, (panel,) = _figure()
  panel.plot(
    numbers["num_drafts"], numbers["expected"], "-", marker="o",
    label="Theorem 3",
  )  # fmt: skip
  panel.axhline(
    numbers["limit"], color="black", linestyle="--",
    label=f"limit, {numbers['limit']:.3f}",
  )  # fmt: skip
  simulated = numbers["simulated"].values()
  panel.errorbar(
    [int(count) for count in numbers["simulated"]],
    [one["mean"] for one in simulated],
    yerr=[intervals.SIDE * one["standard_error"] for one in simulated],
    color="C1", marker="x", markersize=8, capsize=3, linestyle="",
    label=f"simulated, {next(iter(simulated))['runs']:,} runs (95%)",
  )  # fmt: skip
  _octaves(panel)
  panel.set_xlabel("drafts M")
  panel.set_ylabel(f"rejections in {numbers['horizon']} tokens")
  panel.legend()
  return figure


def improvement(numbers: dict) -> Figure:
  """Figure 4."""
  figure, panels = _figure(9, 3.4, 2)
  titles = {
    "bernoulli": "Ber(u) drafts for Ber(v)",
    "uniform": "Uniform on V drafts for V'",
  }
  for panel, (family, title) in zip(panels, titles.items(), strict=True):
    lines = [(name, values, None) for name, values in numbers[family].items()]
    _curves(panel, numbers["num_drafts"], lines, title=title, xlabel="drafts M")
  panels[0].set_ylabel("rejection probability saved")
  return figure


def tradeoff(numbers: dict) -> Figure:
  """Figure 5."""
  figure, (panel,) = _figure()
  (x0, y0), (x1, y1) = numbers["front"]
  panel.plot([x0, x1], [y0, y1], color="black", label="front (Theorem 5)")
  panel.fill_between([x0, x1], [y0, y1], color="black", alpha=0.06, linewidth=0)
  panel.text(x1 / 4, y0 / 4, "unattainable", color="0.4", fontsize="small")
  for color, (name, line) in zip(
    ("C0", "C3"), numbers["lines"].items(), strict=True
  ):
    panel.plot(
      [point["rejection"] for point in line],
      [point["loss"] for point in line],
      color=color, linewidth=3, alpha=0.4, label=f"Decoding-{name.upper()}",
    )  # fmt: skip
    points = numbers["simulated"][name]
    column = lambda key, points=points: [point[key] for point in points]
    panel.errorbar(
      column("rejection"), column("loss"),
      xerr=intervals.SIDE * np.array(column("rejection_standard_error")),
      yerr=intervals.SIDE * np.array(column("loss_standard_error")),
      fmt="x", color=color,
      label=f"simulated, {numbers['runs']:,} runs (95%)",
    )  # fmt: skip
    for point in points if name == "uno" else ():
      panel.annotate(
        f"ε = {point['epsilon']:g}", (point["rejection"], point["loss"]),
        xytext=(3, 5), textcoords="offset points", fontsize="small",
      )  # fmt: skip
  panel.set_xlabel("probability of a rejection")
  panel.set_ylabel("total variation from the target")
  panel.set_xlim(0, 1.15 * x1)
  panel.set_ylim(0, 1.25 * y0)
  panel.legend(loc="upper right")
  return figure


def throughput(numbers: dict) -> Figure:
  """Figure 6."""
  ratios = sorted({line["cost_ratio"] for line in numbers["lines"]})
  figure, panels = _figure(10, 3.4, len(ratios))
  for panel, ratio in zip(panels, ratios, strict=True):
    lines = [
      (
        f"P = {line['acceptance']}, best N = {line['best']}",
        line["throughput"],
        line["best"],
      )
      for line in numbers["lines"]
      if line["cost_ratio"] == ratio
    ]
    _curves(
      panel, numbers["num_tokens"], lines, title=f"$T_s / T_v$ = {ratio}",
      xlabel="drafted tokens N",
    )  # fmt: skip
    panel.axhline(1, color="black", linewidth=0.6)
    panel.set_ylim(0, 1.35 * panel.get_ylim()[1])  # the legend is above
    panel.legend(loc="upper right")
  panels[0].set_ylabel("tokens a second / plain decoding's")
  return figure


def acceptance(numbers: dict) -> Figure:
  """Figure 7; rules with equal points share a line.

  Dashed lines are drafts that are not i.i.d.; the optimum does not cover them.
  """
  figure, (panel,) = _figure(7.5, 4.4)
  panel.plot(
    numbers["num_drafts"], numbers["optimum"], color="black", linewidth=4,
    alpha=0.3, label="optimum of i.i.d. drafts",
  )  # fmt: skip
  names: dict[tuple, list[str]] = {}
  for name, points in numbers["rules"].items():
    same = tuple((x["num_drafts"], round(x["acceptance"], 9)) for x in points)
    names.setdefault(same, []).append(name)
  for index, (curve, alike) in enumerate(names.items()):
    points = numbers["rules"][alike[0]]
    panel.errorbar(
      *zip(*curve, strict=True),
      yerr=[intervals.SIDE * (x["standard_error"] or 0) for x in points],
      marker=report.MARKERS[index % len(report.MARKERS)], capsize=2,
      color=f"C{index % 10}",
      linestyle="-" if points[0]["siblings"] == "iid" else "--",
      label=",\n".join(name.replace("_", " ") for name in alike),
    )  # fmt: skip
  panel.set_xticks(numbers["num_drafts"])
  panel.set_xlabel("drafts K of one token")
  panel.set_ylabel("P(a drafted token is accepted)")
  figure.legend(loc="outside right center")
  return figure


def mixture(numbers: dict) -> Figure:
  """Figure 8."""
  figure, (left, right) = _figure(9, 3.4, 2)
  some = [rows for rows in numbers["read"] if rows in ("1", "4", "16", "64")]
  _curves(
    left,
    numbers["fed"],
    [(f"{rows} rows", numbers["read"][rows], None) for rows in some],
    title="a pass over several tokens a row",
    xlabel="tokens fed a row",
  )
  left.set_ylabel("bytes / bytes for one token a row")
  chances = sorted({x["acceptance"] for x in numbers["lines"]})
  for marker, p in zip(report.MARKERS, chances, strict=False):
    points = [x for x in numbers["lines"] if x["acceptance"] == p]
    right.plot(
      [x["rows"] for x in points], [x["throughput"] for x in points],
      marker=marker, label=f"P = {p}",
    )  # fmt: skip
  right.axhline(1, color="black", linewidth=0.6)
  _octaves(right)
  right.set_title("the best N")
  right.set_xlabel("rows B")
  right.set_ylabel("tokens a second / plain decoding's")
  right.legend()
  return figure


FIGURES: dict[str, Callable[[dict], Figure]] = {
  draw.__name__: draw
  for draw in (
    single, batch, drafts, improvement, tradeoff, throughput, acceptance,
    mixture,
  )
}  # fmt: skip
