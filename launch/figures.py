"""Figures as files: one style, with text kept as text and nothing cut off."""

import pathlib
from collections.abc import Callable, Sequence
from typing import IO

import matplotlib
from matplotlib.artist import Artist
from matplotlib.figure import Figure

_STYLE = {"svg.hashsalt": "specjax", "svg.fonttype": "none", "font.size": 9}


def save(
  make: Callable[[], Figure], *targets: str | pathlib.Path | IO[bytes]
) -> None:
  """Draws a figure and writes it, the same bytes for the same numbers.

  Args:
    make: makes the figure.
    targets: files, in the form that their names end in; folders that are not
      there are made. What is no name gets SVG.
  """
  with matplotlib.rc_context(_STYLE):
    figure = make()
    for target in targets:
      form = "svg"
      if isinstance(target, str | pathlib.Path):
        path = pathlib.Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        form = path.suffix[1:]
      figure.savefig(
        target,
        format=form,
        **({"metadata": {"Date": None}} if form == "svg" else {"dpi": 150}),
      )


def legend_below(
  figure: Figure, handles: Sequence[Artist], labels: Sequence[str]
) -> None:
  """A legend under the panels, of as many columns as fit, four at most.

  Args:
    figure: of a constrained layout, which becomes higher by the legend's lines
      but the first.
    handles, labels: of the entries.
  """
  before = 0.0
  for columns in range(min(4, len(labels)), 0, -1):
    legend = figure.legend(
      handles, labels, loc="outside lower center", ncols=columns
    )
    size = legend.get_window_extent().transformed(
      figure.dpi_scale_trans.inverted()
    )
    before = before or size.height
    if size.width <= figure.get_figwidth() or columns == 1:
      figure.set_figheight(figure.get_figheight() + size.height - before)
      return
    legend.remove()
