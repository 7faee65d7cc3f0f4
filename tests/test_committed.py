"""Committed results: one name a quantity, possible numbers, whole figures."""

import functools
import json
import math
import pathlib
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

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
  if isinstance(ends, dict):
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

FIGURES = sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.svg"))
NAMESPACE = "{http://www.w3.org/2000/svg}"


def matrix(transform: str) -> np.ndarray:
  """The 3x3 matrix of an SVG's transform attribute."""
  actual = np.eye(3)
  for kind, text in re.findall(r"(\w+)\(([^)]*)\)", transform):
    x = [float(part) for part in re.split(r"[\s,]+", text.strip())]
    one = np.eye(3)
    if kind == "translate":
      one[:2, 2] = [*x, 0.0][:2]
    elif kind == "scale":
      one[0, 0], one[1, 1] = x[0], x[-1]
    elif kind == "rotate":
      c, s = math.cos(math.radians(x[0])), math.sin(math.radians(x[0]))
      one[:2, :2] = [[c, -s], [s, c]]
      if len(x) == 3:
        around = np.eye(3)
        around[:2, 2] = x[1:]
        one = around @ one @ np.linalg.inv(around)
    else:
      raise ValueError(f"no such transform here: {kind}")
    actual = actual @ one
  return actual


def style_of(element: ElementTree.Element) -> dict[str, str]:
  parts = (p.split(":", 1) for p in element.get("style", "").split(";"))
  return {p[0].strip(): p[1].strip() for p in parts if len(p) == 2}


def outside(svg: str, slack: float = 1.0) -> list[str]:
  """The texts of an SVG that leave it, measured as in the font it names.

  Raises:
    ValueError: if a text is drawn as outlines, which nobody can search or read.
  """
  root, actual = ElementTree.fromstring(svg), []
  _, _, wide, high = (float(x) for x in root.get("viewBox").split())

  def measure(element, to_page, text, style, x, y):
    size = float(style["font-size"].removesuffix("px"))
    width, height, below = text_to_path.get_text_width_height_descent(
      text, FontProperties(family="DejaVu Sans", size=size), ismath=False
    )
    left = {"middle": width / 2, "end": width}.get(style.get("text-anchor"), 0)
    corners = to_page @ [
      [x - left, x - left, x - left + width, x - left + width],
      [y + below, y + below - height] * 2,
      [1.0] * 4,
    ]
    low, top = corners[:2].min(axis=1)
    right, bottom = corners[:2].max(axis=1)
    if min(low, top) < -slack or right > wide + slack or bottom > high + slack:
      actual.append(text)

  def walk(element, to_page):
    to_page = to_page @ matrix(element.get("transform", ""))
    name = element.tag.removeprefix(NAMESPACE)
    if name == "text":
      parts = element.findall(f"{NAMESPACE}tspan") or [element]
      for part in parts:
        starts = part.get("x", "0").split()
        style, y = style_of(part), float(part.get("y", "0"))
        # A tspan has a place for each of its letters.
        pieces = part.text if len(starts) > 1 else [part.text]
        for piece, x in zip(pieces, starts, strict=False):
          measure(part, to_page, piece, style, float(x), y)
      return
    if name == "g" and element.get("id", "").startswith("text_"):
      if element.find(f".//{NAMESPACE}text") is None:
        raise ValueError(f"{element.get('id')} is drawn as outlines")
    for child in element:
      walk(child, to_page)

  walk(root, np.eye(3))
  return actual


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_of_a_committed_figure_is_cut_off(name):
  assert outside((DOCS / name).read_text("utf-8")) == []


def legend_of(length: int, count: int = 4) -> Figure:
  """A figure whose legend has names so long."""
  drawn = Figure(figsize=(6, 2), layout="constrained")
  panel = drawn.subplots()
  for number in range(count):
    panel.plot([0, 1], label=f"{number}" * length)
  panel.set_ylabel("tokens per second")
  report.legend_below(drawn, *panel.get_legend_handles_labels())
  return drawn


def height(svg: str) -> float:
  return float(ElementTree.fromstring(svg).get("viewBox").split()[3])


def test_a_legend_that_is_too_wide_gets_lines_and_the_figure_room(tmp_path):
  svgs = {}
  for length in (4, 24, 50):
    path = tmp_path / "new" / f"{length}.svg"
    report.save(lambda n=length: legend_of(n), path)
    svgs[length] = path.read_text("utf-8")
    assert outside(svgs[length]) == []
    for number in range(4):
      assert f">{number}{number}" in svgs[length]
  assert 144 == height(svgs[4]) < height(svgs[24]) < height(svgs[50])
  # The measure sees what is cut off, upright texts too.
  svg = svgs[4]
  assert outside(svg.replace(">0000<", f">{'0' * 200}<")) == ["0" * 200]
  long = "tokens per second" * 9
  assert outside(svg.replace(">tokens per second<", f">{long}<")) == [long]


def test_texts_stay_texts(tmp_path):
  path = tmp_path / "outlines.svg"
  legend_of(4).savefig(path)
  with pytest.raises(ValueError, match="is drawn as outlines"):
    outside(path.read_text("utf-8"))
