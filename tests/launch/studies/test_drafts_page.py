"""What docs/drafts.md says is printed from the committed studies."""

import json
import pathlib

import numpy as np
import pytest

from launch import report, tables
from launch.studies.drafts import plots

PAGE = pathlib.Path("docs/drafts.md").read_text("utf-8")
STUDIES = sorted(pathlib.Path("docs/measurements/drafts").glob("*.jsonl"))


def cells(line: str) -> list[str]:
  return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_page_has_rows_and_columns_of_the_committed_studies(path, capsys):
  assert tables.main(["tables", "drafts", str(path)]) == 0
  head, _, *rows = map(cells, capsys.readouterr().out.strip().splitlines())
  section = PAGE.partition(f"## {path.stem.capitalize()}")[2]
  section = section.partition("\n## ")[0].splitlines()
  shown, _, *some = [cells(x) for x in section if x.startswith("| ")]
  places, start = [], 0
  for name in shown:
    places.append(head.index(name, start))
    start = places[-1] + 1
  assert len(places) > 5
  assert len(some) >= 4
  printed = [[row[place] for place in places] for row in rows]
  assert all(row in printed for row in some)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_drafts_of_a_study_had_equal_compute(path):
  rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
  assert len(rows) >= 4
  spent = [row["flops"] for row in rows if row["num_steps"]]
  assert spent == pytest.approx([max(spent)] * len(spent), rel=0.02)
  assert len({row["name"] for row in rows}) == len(rows)


def test_there_are_studies_of_shapes_and_heads():
  assert {"shapes", "heads"} <= {path.stem for path in STUDIES}


def test_the_committed_figure_is_drawn_anew_and_shown(tmp_path):
  drawn = tmp_path / "drawn.svg"
  study = "docs/measurements/drafts/heads.jsonl"
  assert plots.main(["plots", study, str(drawn)]) == 0
  name = "figures/acceptance-by-position.svg"
  assert drawn.read_bytes() == pathlib.Path("docs", name).read_bytes()
  assert f"]({name})" in PAGE


def test_the_figure_has_a_line_a_draft_and_the_intervals_hold_the_points():
  rows = report.read("docs/measurements/drafts/heads.jsonl")
  figure = plots.by_position(rows)
  assert [panel.get_title() for panel in figure.axes] == [
    "temperature 0", "temperature 1",
  ]  # fmt: skip
  for panel, temperature in zip(figure.axes, ("0", "1"), strict=True):
    for row, drawn in zip(rows, panel.containers, strict=True):
      assert drawn.get_label() == row["name"]
      found = row["decoding"][temperature]
      line, _, (bars,) = drawn
      np.testing.assert_allclose(line.get_ydata(), found["accepted"])
      for segment, ends in zip(
        bars.get_segments(), found["accepted_ci"], strict=True
      ):
        if ends is not None:
          np.testing.assert_allclose(segment[:, 1], ends)
