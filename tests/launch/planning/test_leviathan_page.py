"""T5-XXL's plans beside the first published speed-ups."""

import json

import pytest

from launch import tables
from launch.planning import leviathan_page


def plan(draft, *, more=0.0):
  """A plan whose draft costs that much; each token more in verifying `more`."""
  verify = {str(n): 1 + more * (n - 1) for n in range(1, 9)}
  return {"roofline": {"draft_step_seconds": draft, "verify_seconds": verify}}


def test_the_formula_gives_what_was_quoted():
  quoted = (3.16, 3.25, 2.50, 2.26, 2.35, 1.93, 2.40, 2.62, 2.02, 1.89, 1.80,
            1.54)  # fmt: skip
  for row, value in zip(leviathan_page.REPORTED, quoted, strict=True):
    _, _, draft, count, acceptance, _ = row
    cost = leviathan_page.COST_RATIOS[draft]
    actual = leviathan_page.by_formula(acceptance, count, cost)
    assert actual == pytest.approx(value, abs=0.006)
    # A plan of the same costs predicts the same; dearer verifying, less.
    same = leviathan_page.by_plan(plan(cost), acceptance, count)
    assert same == pytest.approx(actual, rel=1e-9)
    dearer = leviathan_page.by_plan(plan(cost, more=0.1), acceptance, count)
    per_round = (1 + count * cost) / (1 + count * (cost + 0.1))
    assert dearer == pytest.approx(actual * per_round, rel=1e-9)


def test_a_plan_that_is_not_there_leaves_its_cells_empty(tmp_path, capsys):
  path = tmp_path / "xxl-small-v5e-8.json"
  path.write_text(json.dumps(plan(0.02)))
  assert tables.main(["tables", "t5_plans", str(path)]) == 0
  head, _, first, second, *_ = capsys.readouterr().out.splitlines()
  assert head.endswith("| by their formula | predicted, v5e-8 |")
  assert first == "| WMT EnDe | 0 | small | 7 | 0.75 | 3.4 | 3.16 | 3.16 |"
  assert second.endswith("| 3.25 | – |")
