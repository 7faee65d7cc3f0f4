"""The figure of an evaluation: speed-up and tokens per call, by category."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from launch import figures
from launch.evaluation import page
from launch.evaluation.systems import PLAIN

_PANELS = (
  ("speedup", "speed-up over plain decoding"),
  ("block_efficiency", "emitted tokens per target call"),
)


def figure(result: Mapping) -> Figure:
  """A row of two panels for each temperature and batch size."""
  settings, names = page.settings_of(result), page.categories_of(result)
  systems = [name for name in result["systems"] if name != PLAIN]
  drawn = Figure(
    figsize=(11, 0.6 + len(settings) * (1.1 + 0.28 * len(names))),
    layout="constrained",
  )
  axes = drawn.subplots(len(settings), 2, sharey="row", squeeze=False)
  for (temperature, batch_size), row in zip(settings, axes, strict=True):
    for ax, (quantity, label) in zip(row, _PANELS, strict=True):
      points = {
        (r["system"], r["category"]): r
        for r in result["runs"]
        if (r["temperature"], r["batch_size"]) == (temperature, batch_size)
        and r["level"] != "task"
      }
      _panel(ax, points, systems, names, quantity)
      ax.set_xlabel(label)
      ax.set_title(f"temperature {temperature:g}, batch size {batch_size}")
  handles, labels = axes[0][0].get_legend_handles_labels()
  figures.legend_below(drawn, handles, labels)
  return drawn


def _panel(
  ax: Axes, points: Mapping, systems: list[str], names: list[str], quantity: str
) -> None:
  """Points with intervals: a line for each category, a colour a system."""
  places = np.arange(len(names))
  offsets = np.linspace(-0.3, 0.3, len(systems)) if len(systems) > 1 else [0.0]
  offsets = offsets[: len(systems)]  # plain decoding alone draws nothing
  for number, (system, offset) in enumerate(zip(systems, offsets, strict=True)):
    values = np.full(len(names), np.nan)
    sides = np.full((2, len(names)), np.nan)
    for place, name in enumerate(names):
      row = points.get((system, name))
      if row is None or row[quantity] is None:
        continue
      values[place] = row[quantity]
      low, high = row[f"{quantity}_ci"] or (row[quantity], row[quantity])
      sides[:, place] = (
        max(row[quantity] - low, 0),
        max(high - row[quantity], 0),
      )
    ax.errorbar(
      values, places + offset, xerr=sides, fmt="o", markersize=3,
      linewidth=1, color=f"C{number % 10}", label=system,
    )  # fmt: skip
  ax.axvline(1, color="0.6", linewidth=0.8)
  # A dollar would begin a formula.
  ax.set_yticks(places, [name.replace("$", r"\$") for name in names])
  ax.set_ylim(len(names) - 0.5, -0.5)
  # An interval of a few groups may be as wide as it likes: points decide.
  shown = [
    row[quantity]
    for (system, _), row in points.items()
    if system in systems and row[quantity] is not None
  ]
  ax.set_xlim(0, 1.4 * max([1.0, *shown]))
  ax.grid(axis="x", color="0.9")
  ax.set_axisbelow(True)
