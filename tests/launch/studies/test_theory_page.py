"""What docs/theory.md says is printed from the committed results."""

import json
import pathlib
import re

import pytest
import shown

from launch import tables
from launch.evaluation import explain_page
from launch.studies.theory import plots

PAGE = pathlib.Path("docs/theory.md").read_text("utf-8")
RESULTS = {
  "rejections": ("single", "batch", "drafts"),
  "real_rejections": ("real_pair",),
  "tradeoff": ("tradeoff",),
  "throughput": ("throughput",),
  "acceptance": ("acceptance",),
  "mixture": ("mixture",),
  "quality": ("quality",),
}


def paths_of(table):
  if table == "explained":
    return sorted(map(str, pathlib.Path("docs/reports").glob("*.json")))
  return [f"docs/theory/{name}.json" for name in RESULTS[table]]


@pytest.mark.parametrize("table", [*RESULTS, "explained"])
def test_the_tables_are_printed_from_the_committed_results(table, capsys):
  assert tables.main(["tables", table, *paths_of(table)]) == 0
  assert len(shown.rows_of(capsys.readouterr().out, PAGE)) >= 2


def test_every_figure_is_committed_with_its_numbers():
  for name in plots.FIGURES:
    assert f"(theory/{name}.svg)" in PAGE
    assert pathlib.Path(f"docs/theory/{name}.svg").exists()
    numbers = json.loads(pathlib.Path(f"docs/theory/{name}.json").read_text())
    assert numbers["seconds"] < 120


def test_simulations_agree_with_the_theorems():
  rows = plots.rejections(
    {p: json.loads(pathlib.Path(p).read_text()) for p in paths_of("rejections")}
  ).splitlines()[2:]
  assert len(rows) == 7
  for row in rows:
    cells = [cell.strip() for cell in row.split("|")]
    assert abs(float(cells[6])) < 4
    assert cells[7] == "100,000"


def test_pages_that_are_named_exist():
  for name in re.findall(r"\]\(([\w/.-]+)\)", PAGE):
    assert (pathlib.Path("docs") / name).exists(), name


def test_predictions_of_a_real_pair_are_what_was_measured():
  for path in paths_of("explained"):
    result = json.loads(pathlib.Path(path).read_text())
    for found in result["explained"]:
      assert abs(found["tokens_per_second"]["prediction_error"]) < 0.05, path
    drawn = pathlib.Path(path.replace(".json", "-explained.md")).read_text()
    figure = pathlib.Path(path).stem + "-throughput.svg"
    assert explain_page.page(result, figure=figure) == drawn
