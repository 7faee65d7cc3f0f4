"""Committed results: one name a quantity, possible numbers, whole figures."""

import functools
import json
import pathlib
import re

import shown
from matplotlib.figure import Figure

from launch import report

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
ROOT = DOCS.parent

# What a quantity is called (right) by nobody any more.
NAMES = {
  "block_efficiency": {
    "tokens_per_call", "tokens_per_target_call", "tokens_per_round",
    "emitted_per_call",
  },
  "num_tokens": {"emitted_tokens", "tokens_emitted", "num_emitted_tokens"},
  "num_target_calls": {"target_calls", "target_passes"},
}  # fmt: skip


@functools.cache
def results() -> dict[str, list]:
  """The JSON values of every committed result, by its path."""
  actual = {}
  for path in sorted([*DOCS.rglob("*.json"), *DOCS.rglob("*.jsonl")]):
    text = path.read_text("utf-8")
    parts = text.split("\n") if path.suffix == ".jsonl" else [text]
    name = str(path.relative_to(DOCS))
    actual[name] = [json.loads(part) for part in parts if part.strip()]
  return actual


def objects(value):
  """Every JSON object in a value."""
  if isinstance(value, dict):
    yield value
  inside = value.values() if isinstance(value, dict) else value
  for one in inside:
    if isinstance(one, dict | list):
      yield from objects(one)


def stem(key: str) -> str:
  """A key without what is said of the quantity (`_ci`, `_change`, ...)."""
  return re.sub(r"(_request_mean|_change|_ci)+$", "", key)


def test_one_quantity_has_one_name_in_all_results():
  others = set().union(*NAMES.values())
  wrong = {
    (name, key)
    for name, values in results().items()
    for one in objects(values)
    for key in one
    if stem(key) in others
  }
  assert not wrong
  assert any("block_efficiency" in x for x in objects(results().values()))


def test_one_quantity_has_one_name_in_all_that_writes_or_reads_it():
  others = set().union(*NAMES.values())
  quoted = re.compile(r"[\"'`]([a-z_]+)[\"'`]")
  wrong = {
    (str(path.relative_to(ROOT)), key)
    for folder in ("specjax", "launch", "models", "configs", "colab", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".ipynb", ".sh", ".html")
    for key in quoted.findall(path.read_text("utf-8"))
    if stem(key) in others
  }
  assert not wrong


def estimates(one: dict, key: str):
  """Estimates with their intervals: of one quantity, of a list or a dict."""
  value, ends = one.get(key.removesuffix("_ci")), one[key]
  if isinstance(ends, dict) and isinstance(value, dict):
    yield from ((value[name], ends[name]) for name in ends)
  elif isinstance(value, list):
    yield from zip(value, ends, strict=True)
  else:
    yield value, ends


def test_intervals_hold_their_estimates_and_are_of_five_groups():
  """`x` beside `x_ci`; where an object says how many groups, of five."""
  wrong = []
  for name, values in results().items():
    for one in objects(values):
      few = min(one.get(n, 5) for n in ("num_groups", "num_units")) < 5
      for key in one:
        if not key.endswith("_ci"):
          continue
        for value, ends in estimates(one, key):
          if ends and (
            few or (value is not None and not ends[0] <= value <= ends[1])
          ):
            wrong.append((name, key, value, ends))
  assert not wrong


def test_of_timings_that_disagree_nothing_is_predicted():
  for name, values in results().items():
    for result in values:
      if not isinstance(result, dict) or "costs" not in result:
        continue
      for cost in result["costs"] if isinstance(result["costs"], list) else ():
        parts = cost.get("round_seconds", {}).values()
        assert cost["doubts"] or min(x or 0 for x in parts) >= 0, name
        for row in (*result["runs"], *result.get("runs_by_task", ())):
          if (row["system"], row["batch_size"]) == (
            cost["system"], cost["batch_size"],
          ):  # fmt: skip
            assert not cost["doubts"] or row["predicted_speedup"] is None, name


# --------------------------------------------------------------------- figures


def test_texts_of_committed_figures_are_texts():
  """And no outlines, which nobody can search or read."""
  figures = {p: p.read_text("utf-8") for p in DOCS.rglob("*.svg")}
  assert len(figures) > 20
  outlined = {
    path
    for path, svg in figures.items()
    if "<text" not in svg or "#DejaVuSans-" in svg
  }
  assert not outlined


def drawn(folder, length: int, label="tokens per second"):
  """A figure whose legend has four names so long, and its SVG."""
  figures = []

  def make():
    figure = Figure(figsize=(6, 2), layout="constrained")
    panel = figure.subplots()
    for number in range(4):
      panel.plot([0, 1], label=f"{number}" * length)
    panel.set_ylabel(label)
    report.legend_below(figure, *panel.get_legend_handles_labels())
    figures.append(figure)
    return figure

  path = folder / "new" / "x.svg"
  report.save(make, path)
  return figures[0], path.read_text("utf-8")


def test_a_legend_that_is_too_wide_gets_lines_and_the_figure_room(tmp_path):
  heights = []
  for length in (4, 24, 50):
    figure, svg = drawn(tmp_path, length)
    assert shown.is_whole(figure)
    assert all(f">{number}{number}" in svg for number in range(4))
    heights.append(figure.get_figheight())
  assert 2 == heights[0] < heights[1] < heights[2]
  # The measure sees what is cut off, upright texts too.
  assert not shown.is_whole(drawn(tmp_path, 200)[0])
  assert not shown.is_whole(drawn(tmp_path, 4, "tokens per second" * 9)[0])
