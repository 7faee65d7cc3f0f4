"""Draws the figures of `launch.theory` from their numbers."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_MARKERS = "os^v<>DPX*dph"


def _figure(width=5.5, height=3.6, columns=1) -> tuple[Figure, list[Axes]]:
  figure = Figure(figsize=(width, height), layout="constrained")
  panels = figure.subplots(1, columns, squeeze=False)[0]
  for panel in panels:
    panel.grid(linewidth=0.3)
    panel.spines[["top", "right"]].set_visible(False)
  return figure, list(panels)


def _converging(panel: Axes, numbers: dict) -> None:
  """Running averages with two standard errors, and the theory's lines."""
  for index, (count, line) in enumerate(numbers["drafts"].items()):
    color = f"C{index}"
    runs, mean = np.array(line["runs"]), np.array(line["mean"])
    error = 2 * np.array(line["standard_error"])
    label = "one draft" if count == "1" else f"M = {count}"
    panel.plot(runs, mean, color=color, linewidth=1.2, label=label)
    panel.fill_between(
      runs, mean - error, mean + error, color=color, alpha=0.2, linewidth=0
    )
    panel.axhline(
      line["theory"], color=color, linestyle="--", linewidth=1,
      label=f"theory, {line['theory']:.3f}",
    )  # fmt: skip
  panel.set_xscale("log")
  panel.set_xlabel("runs")
  panel.set_title(f"T = {numbers['horizon']}", fontsize="medium")
  panel.legend(fontsize="small")


def single(numbers: dict) -> Figure:
  """Figure 1."""
  horizons = numbers["horizons"].values()
  figure, panels = _figure(9, 3.4, len(horizons))
  for panel, one in zip(panels, horizons, strict=True):
    _converging(panel, one)
  panels[0].set_ylabel("rejections a run")
  return figure


def batch(numbers: dict) -> Figure:
  """Figure 2."""
  figure, (panel,) = _figure()
  _converging(panel, numbers)
  panel.set_ylabel("rejections a run")
  return figure


def drafts(numbers: dict) -> Figure:
  """Figure 3."""
  figure, (panel,) = _figure()
  panel.plot(
    numbers["num_drafts"], numbers["expected"], "-", marker="o",
    markersize=3, linewidth=1, label="Theorem 3",
  )  # fmt: skip
  panel.axhline(
    numbers["limit"], color="black", linestyle="--", linewidth=1,
    label=f"limit, {numbers['limit']:.3f}",
  )  # fmt: skip
  for index, (count, found) in enumerate(numbers["simulated"].items()):
    panel.errorbar(
      [int(count)], [found["mean"]], yerr=[2 * found["standard_error"]],
      color="C1", marker="x", capsize=3, linestyle="",
      label=None if index else "simulated",
    )  # fmt: skip
  panel.set_xscale("log", base=2)
  panel.set_xlabel("drafts M")
  panel.set_ylabel(f"rejections in {numbers['horizon']} tokens")
  panel.legend(fontsize="small")
  return figure


def improvement(numbers: dict) -> Figure:
  """Figure 4."""
  figure, panels = _figure(9, 3.4, 2)
  for panel, family in zip(panels, ("bernoulli", "uniform"), strict=True):
    for marker, (name, values) in zip(
      _MARKERS, numbers[family].items(), strict=False
    ):
      panel.plot(
        numbers["num_drafts"], values, marker=marker, markersize=3,
        linewidth=1, label=name,
      )  # fmt: skip
    panel.set_title(f"{family.capitalize()} laws", fontsize="medium")
    panel.set_xlabel("drafts M")
    panel.legend(fontsize="small")
  panels[0].set_ylabel("rejection probability saved")
  return figure


def tradeoff(numbers: dict) -> Figure:
  """Figure 5."""
  figure, (panel,) = _figure()
  (x0, y0), (x1, y1) = numbers["front"]
  panel.plot([x0, x1], [y0, y1], color="black", linewidth=1, label="front")
  panel.fill_between([x0, x1], [y0, y1], color="black", alpha=0.06, linewidth=0)
  for color, (name, line) in zip(
    ("C0", "C3"), numbers["lines"].items(), strict=True
  ):
    panel.plot(
      [point["rejection"] for point in line],
      [point["loss"] for point in line],
      color=color, linewidth=2, alpha=0.5, label=f"Decoding-{name.upper()}",
    )  # fmt: skip
    points = numbers["simulated"][name]
    panel.plot(
      [point["rejection"] for point in points],
      [point["loss"] for point in points],
      "x", color=color, label=f"simulated, {numbers['runs']:,} runs",
    )  # fmt: skip
  panel.set_xlabel("probability of a rejection")
  panel.set_ylabel("total variation from the target")
  panel.set_xlim(left=0)
  panel.set_ylim(bottom=0)
  panel.legend(fontsize="small")
  return figure


def throughput(numbers: dict) -> Figure:
  """Figure 6."""
  ratios = sorted({line["cost_ratio"] for line in numbers["lines"]})
  figure, panels = _figure(10, 3.4, len(ratios))
  for panel, ratio in zip(panels, ratios, strict=True):
    for index, line in enumerate(
      x for x in numbers["lines"] if x["cost_ratio"] == ratio
    ):
      rates, best = line["throughput"], line["best"]
      panel.plot(
        numbers["num_tokens"], rates, color=f"C{index}", linewidth=1,
        label=f"P = {line['acceptance']}",
      )  # fmt: skip
      panel.plot(best, rates[best], "o", color=f"C{index}", markersize=5)
    panel.axhline(1, color="black", linewidth=0.6)
    panel.set_title(f"draft step / target pass = {ratio}", fontsize="medium")
    panel.set_xlabel("drafted tokens N")
    panel.legend(fontsize="small")
  panels[0].set_ylabel("times plain decoding")
  return figure


def acceptance(numbers: dict) -> Figure:
  """Figure 7."""
  figure, (panel,) = _figure(7, 4.2)
  panel.plot(
    numbers["num_drafts"], numbers["optimum"], color="black", linewidth=2,
    label="optimum, i.i.d. drafts",
  )  # fmt: skip
  for index, (name, points) in enumerate(numbers["rules"].items()):
    panel.errorbar(
      [point["num_drafts"] for point in points],
      [point["acceptance"] for point in points],
      yerr=[2 * (point["standard_error"] or 0) for point in points],
      marker=_MARKERS[index % len(_MARKERS)], markersize=4, linewidth=0.8,
      color=f"C{index % 10}", linestyle="-" if index < 10 else "--",
      label=name.replace("_", " "),
    )  # fmt: skip
  panel.set_xticks(numbers["num_drafts"])
  panel.set_xlabel("drafts K")
  panel.set_ylabel("P(the drafted token is accepted)")
  figure.legend(loc="outside right center", fontsize="small")
  return figure


FIGURES: dict[str, Callable[[dict], Figure]] = {
  "single": single,
  "batch": batch,
  "drafts": drafts,
  "improvement": improvement,
  "tradeoff": tradeoff,
  "throughput": throughput,
  "acceptance": acceptance,
}
