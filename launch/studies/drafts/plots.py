r"""Draws acceptance by position of the drafts of a study.

  python -m launch.studies.drafts.plots docs/measurements/drafts/heads.jsonl \
    docs/figures/acceptance-by-position.svg

The same measurements give the same file, byte for byte.
"""

import os
import sys

import numpy as np
from matplotlib.figure import Figure

from launch import figures, tables

_MARKERS = "osD^v<>P"


def by_position(rows: list[dict]) -> Figure:
  """What is accepted at each position given all before it, with intervals.

  A panel a temperature and a line a draft.

  Args:
    rows: of `launch.studies.drafts`, with `config.rounds=0`.
  """
  temperatures = list(rows[0]["decoding"])
  figure = Figure(figsize=(7.2, 3.4), layout="constrained")
  panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
  for panel, temperature in zip(panels, temperatures, strict=True):
    for number, row in enumerate(rows):
      found = row["decoding"][temperature]
      value = np.array(found["accepted"])
      ends = np.array(
        [
          interval or (v, v)
          for v, interval in zip(value, found["accepted_ci"], strict=True)
        ]
      )
      # Beside each other, so that intervals can be told apart.
      places = np.arange(1, len(value) + 1) + 0.06 * (
        number - (len(rows) - 1) / 2
      )
      panel.errorbar(
        places, value, yerr=np.abs(ends - value[:, None]).T, capsize=2,
        marker=_MARKERS[number % len(_MARKERS)], markersize=4, linewidth=1,
        label=row["name"], color=f"C{number}",
      )  # fmt: skip
    panel.set_title(f"temperature {temperature}")
    panel.set_xlabel("drafted token")
    panel.set_xticks(range(1, len(value) + 1))
    panel.set_ylim(0, 1)
    panel.grid(axis="y", linewidth=0.3)
    panel.spines[["top", "right"]].set_visible(False)
  panels[0].set_ylabel("accepted, given those before")
  panels[-1].legend(fontsize="small")
  return figure


def main(argv: list[str]) -> int:
  """`plots STUDY.jsonl FIGURE.svg`; returns the exit code."""
  if len(argv) != 3 or not os.path.isfile(argv[1]):
    print(
      "usage: python -m launch.studies.drafts.plots STUDY.jsonl FIGURE.svg",
      file=sys.stderr,
    )
    return 2
  _, source, target = argv
  figures.save(lambda: by_position(tables.read(source)), target)
  return 0


if __name__ == "__main__":
  tables.run(main)
