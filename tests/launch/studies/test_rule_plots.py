"""The figures about rules: drawn from what is committed, and readable."""

import json
import pathlib

import pytest

from launch.studies.rules import plots
from specjax import rules

MEASURED = pathlib.Path("docs/measurements/rules")


def measured(name):
  return json.loads((MEASURED / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize(
  "figure, numbers, committed",
  [
    ("costs", "costs", "rule-costs"),
    ("efficiency", "embedded", "rule-efficiency"),
    ("optimality", "optimality", "optimality"),
    ("front", "front", "rule-front"),
    ("joint", "joint", "joint"),
  ],
)
def test_the_committed_figures_are_drawn_anew(
  figure, numbers, committed, tmp_path
):
  drawn = tmp_path / "drawn.svg"
  arguments = [figure, str(MEASURED / f"{numbers}.json"), str(drawn)]
  assert plots.main(["plots", *arguments]) == 0
  before = pathlib.Path(f"docs/figures/{committed}.svg")
  assert drawn.read_bytes() == before.read_bytes()


def test_costs_have_a_row_a_rule_and_a_number_a_place():
  result = measured("costs")
  shown = {
    (cell["rule"], cell["siblings"])
    for cell in result["cells"]
    if cell["rule"] in rules.RULES
  }
  panels = plots.costs(result).axes
  labels = [text.get_text() for text in panels[0].get_yticklabels()]
  assert len(set(labels)) == len(shown)
  for panel in panels:
    places = [text.get_position() for text in panel.texts]
    assert len(set(places)) == len(places) > 0
  at = {label: row for row, label in enumerate(labels)}
  written = {
    text.get_position(): text.get_text() for text in panels[1].texts
  }  # along K
  for column, count in enumerate((1, 2, 4, 8)):
    (cell,) = (
      c
      for c in result["cells"]
      if (c["rule"], c["siblings"], c["num_drafts"]) == ("kseq", "iid", count)
      and (c["vocab_size"], c["num_speculative_tokens"]) == (131_072, 4)
      and c["batch_size"] == 1
    )
    assert written[column, at["kseq"]] == f"{cell['ratio']:.1f}"


def test_efficiencies_share_one_scale():
  panels = plots.efficiency(measured("embedded")).axes
  assert len({panel.get_xlim() for panel in panels}) == 1
