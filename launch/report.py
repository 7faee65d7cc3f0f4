"""Formats reports: numbers, Markdown tables, figures in one style."""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from launch import results
from launch.evaluation import intervals
from specjax import rules

if TYPE_CHECKING:  # loaded only to draw
  from matplotlib.figure import Figure

Row = TypeVar("Row")

MARKERS = "osD^v<>PX*dph"
_STYLE = {
  "svg.hashsalt": "specjax", "svg.fonttype": "none", "font.size": 9,
  "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.3,
  "axes.titlesize": "medium", "axes.spines.top": False,
  "axes.spines.right": False,
  "legend.fontsize": "small", "lines.linewidth": 1, "lines.markersize": 4,
}  # fmt: skip


def number(value: float | None, form: str = ".2f") -> str:
  """A number in one of Python's formats; a dash for None."""
  return "–" if value is None else format(value, form)


def estimate(row: Mapping[str, Any], name: str, form: str = ".2f") -> str:
  """A row's value with its interval, `NAME_ci`."""
  ends = row[f"{name}_ci"]
  interval = f" ({ends[0]:{form}}–{ends[1]:{form}})" if ends else ""
  return number(row[name], form) + interval


def plus_minus(value: float, standard_error: float, digits: int) -> str:
  """A mean with its 95% interval."""
  side = intervals.SIDE * standard_error
  return f"{value:.{digits}f} ± {side:.{digits}f}"


def loss_in_words(
  rule: str, lossless: bool, total_variation: float | None
) -> str:
  """Describes how far the emitted distribution is from the target's."""
  if lossless:
    is_ours = rule.partition("(")[0] in rules.RULES
    return "lossless" if is_ours else "lossless (declared)"
  if total_variation is None:
    return "lossy, distance not reported"
  return f"lossy, total variation {total_variation:.3f}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
  """A Markdown table."""
  head = [*head]
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def columns(
  rows: Iterable[Row], cells: Mapping[str, Callable[[Row], str]]
) -> str:
  """A Markdown table with a line per row; `cells` maps columns to functions."""
  return table(cells, ([cell(row) for cell in cells.values()] for row in rows))


def read(path: str | pathlib.Path) -> Any:
  """The contents of a JSON file, or the list of a JSONL file's lines."""
  if str(path).endswith(".jsonl"):
    return [record for _, record in results.read_jsonl(path)]
  return json.loads(pathlib.Path(path).read_text("utf-8"))


def panels(
  width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any
) -> tuple["Figure", np.ndarray]:
  """A figure of this size in inches, and its axes, `[rows, columns]`."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def save(
  make: Callable[[], "Figure"], *targets: str | pathlib.Path | IO[bytes]
) -> None:
  """Draws a figure and writes it reproducibly, byte for byte.

  Args:
    make: makes the figure.
    targets: file names, whose endings give the format (missing folders are
      created), or streams, which get SVG.
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


def sides(
  values: Sequence[float], ends: Sequence[Sequence[float] | None]
) -> np.ndarray:
  """Lengths of error bars, `f[2, n]`; 0 where there is no interval."""
  pairs = [ends_of or (v, v) for v, ends_of in zip(values, ends, strict=True)]
  return np.abs(np.reshape(pairs, (-1, 2)) - np.reshape(values, (-1, 1))).T
