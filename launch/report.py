"""Parts of reports: numbers, Markdown tables, figures of one style.

A command writes JSON with its provenance (`launch.provenance`). What a page
shows of it is made anew from that, the same bytes for the same numbers.
"""

import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
import rich.box
import rich.console
import rich.table

from launch import results
from specjax import intervals, rules

if TYPE_CHECKING:  # what only talks need not load it
  from matplotlib.artist import Artist
  from matplotlib.figure import Figure

Row = TypeVar("Row")

# What `plus_minus` means, for captions.
PLUS_MINUS = f"± is a 95% interval, {intervals.SIDE:g} standard errors."

# --------------------------------------------------------------------- numbers


def number(value: float | None, form: str = ".2f") -> str:
  """A number in one of Python's formats; a dash for None."""
  return "–" if value is None else format(value, form)


def interval(ends: Sequence[float] | None, form: str = ".2f") -> str:
  """The ends of an interval, to stand behind an estimate; "" for None."""
  return f" ({ends[0]:{form}}–{ends[1]:{form}})" if ends else ""


def estimate(row: Mapping[str, Any], name: str, form: str = ".2f") -> str:
  """A row's number with its interval, `NAME_ci`."""
  return number(row[name], form) + interval(row[f"{name}_ci"], form)


def plus_minus(value: float, standard_error: float, digits: int) -> str:
  """A mean over many with its 95% interval: what ± is, wherever it stands."""
  side = intervals.SIDE * standard_error
  return f"{value:.{digits}f} ± {side:.{digits}f}"


def loss_in_words(
  rule: str, lossless: bool, total_variation: float | None
) -> str:
  """Distance of the tokens' law from the target's: beside every speed-up.

  Args:
    rule: its name; of one that is not the library's the claim is its own.
    lossless: whether it says that it is.
    total_variation: the mean over tokens, or None if the rule does not say.
  """
  if lossless:
    is_ours = rule.partition("(")[0] in rules.RULES
    return "lossless" if is_ours else "lossless (declared)"
  if total_variation is None:
    return "lossy, distance not reported"
  return f"lossy, total variation {total_variation:.3f}"


# ---------------------------------------------------------------------- tables


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
  """A Markdown table."""
  head = [*head]
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def columns(
  rows: Iterable[Row], cells: Mapping[str, Callable[[Row], str]]
) -> str:
  """A Markdown table of a row each: by column, what is said of a row."""
  return table(cells, ([cell(row) for cell in cells.values()] for row in rows))


def show(
  console: rich.console.Console,
  head: Iterable[str],
  rows: Iterable[Iterable[str]],
  *,
  title: str | None = None,
  caption: str | None = None,
) -> None:
  """Prints a table for a terminal."""
  shown = rich.table.Table(
    title=title, caption=caption, box=rich.box.SIMPLE, caption_justify="left"
  )
  for name in head:
    shown.add_column(name, overflow="fold")
  for row in rows:
    shown.add_row(*row)
  console.print(shown)


def read(path: str) -> Any:
  """The contents of a JSON file, or the list of a JSONL file's lines."""
  if path.endswith(".jsonl"):
    return [line for _, line in results.read_jsonl(path)]
  return json.loads(pathlib.Path(path).read_text("utf-8"))


# --------------------------------------------------------------------- figures

MARKERS = "osD^v<>PX*dph"
_STYLE = {
  "svg.hashsalt": "specjax", "svg.fonttype": "none", "font.size": 9,
  "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.3,
  "axes.titlesize": "medium", "axes.spines.top": False,
  "axes.spines.right": False,
  "legend.fontsize": "small", "lines.linewidth": 1, "lines.markersize": 4,
}  # fmt: skip


def panels(
  width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any
) -> tuple["Figure", np.ndarray]:
  """A figure of so many inches, and its axes, `[rows, columns]`.

  Args:
    width, height: in inches.
    rows, columns: of axes.
    shared: arguments of `subplots`, as `sharey`.
  """
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def save(
  make: Callable[[], "Figure"], *targets: str | pathlib.Path | IO[bytes]
) -> None:
  """Draws a figure and writes it, the same bytes for the same numbers.

  Args:
    make: makes the figure.
    targets: files, in the form that their names end in; folders that are not
      there are made. What is no name gets SVG.
  """
  import matplotlib

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
  figure: "Figure", handles: Sequence["Artist"], labels: Sequence[str]
) -> None:
  """A legend under the panels, of as many columns as fit, four at most.

  Args:
    figure: of a constrained layout, which becomes higher by the legend's lines
      but the first.
    handles, labels: of the entries.
  """
  before = 0.0
  for count in range(min(4, len(labels)), 0, -1):
    legend = figure.legend(
      handles, labels, loc="outside lower center", ncols=count,
      fontsize="medium",
    )  # fmt: skip
    size = legend.get_window_extent().transformed(
      figure.dpi_scale_trans.inverted()
    )
    before = before or size.height
    if size.width <= figure.get_figwidth() or count == 1:
      figure.set_figheight(figure.get_figheight() + size.height - before)
      return
    legend.remove()


def sides(
  values: Sequence[float], ends: Sequence[Sequence[float] | None]
) -> np.ndarray:
  """Lengths of error bars, `f[2, n]`: to the ends of each interval, or none."""
  pairs = [ends_of or (v, v) for v, ends_of in zip(values, ends, strict=True)]
  return np.abs(np.reshape(pairs, (-1, 2)) - np.reshape(values, (-1, 1))).T


def octaves(panel: Any) -> None:
  """An x-axis of powers of two, whose ticks are whole numbers."""
  panel.set_xscale("log", base=2)
  panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")


# ------------------------------------- programs that show what is committed


def draw(
  program: str,
  figures: Mapping[str, Callable[..., "Figure"]],
  argv: Sequence[str],
) -> int:
  """Draws a figure of results: `PROGRAM [FIGURE] RESULT.. FIGURE.svg`.

  Args:
    program: its name, for the usage.
    figures: by name, what draws the contents of a result, or of several; of a
      single one no name is given.
    argv: the arguments.

  Returns:
    The exit code.
  """
  names = [*figures]
  given = [*names[: len(names) == 1], *argv]
  name, *sources = given[:-1] or [""]
  readable = bool(sources) and all(map(os.path.isfile, sources))
  if name not in figures or not readable:
    which = f"{{{','.join(names)}}} " * (len(names) > 1)
    print(
      f"usage: python -m {program} {which}RESULT.. FIGURE.svg", file=sys.stderr
    )
    return 2
  results = [*map(read, sources)]
  save(lambda: figures[name](*results), given[-1])
  return 0


def run(main: Callable[[list[str]], int]) -> None:
  """Runs what shows committed results as the program; exits with its code.

  Files are what may be wrong: one that holds something else is one line.
  """
  try:
    code = main(sys.argv)
    sys.stdout.flush()
  except (LookupError, TypeError, ValueError, RecursionError) as error:
    files, kind = " ".join(sys.argv[1:]), type(error).__name__
    print(f"error: no results in {files} ({kind}: {error})", file=sys.stderr)
    code = 2
  sys.exit(code)
