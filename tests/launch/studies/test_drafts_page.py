"""What docs/drafts.md says is printed from the committed studies."""

import json
import pathlib

import pytest

from launch import tables

PAGE = pathlib.Path("docs/drafts.md").read_text("utf-8")
STUDIES = sorted(pathlib.Path("docs/measurements/drafts").glob("*.jsonl"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_tables_are_printed_from_the_committed_studies(path, capsys):
  assert tables.main(["tables", "drafts", str(path)]) == 0
  assert capsys.readouterr().out.strip() in PAGE


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_drafts_of_a_study_had_equal_compute(path):
  rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
  assert len(rows) >= 4
  spent = [row["flops"] for row in rows if row["num_steps"]]
  assert spent == pytest.approx([max(spent)] * len(spent), rel=0.02)
  assert len({row["name"] for row in rows}) == len(rows)


def test_there_is_a_study_of_shapes():
  assert "shapes" in [path.stem for path in STUDIES]
