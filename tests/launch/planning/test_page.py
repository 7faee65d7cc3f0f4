"""docs/pods.md says what the committed plans say."""

import json
import pathlib

import pytest

from launch.planning import page

PAGE = pathlib.Path("docs/pods.md").read_text("utf-8")
FOLDER = pathlib.Path("docs/plans")
PLANS = sorted(FOLDER.glob("*.json"))
SWEEPS = sorted(FOLDER.glob("sweeps/*.json"))


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_committed_plans_fit_and_copy_no_cache(path):
  plan = json.loads(path.read_text("utf-8"))
  assert plan["fits"] is True
  assert plan["cache_copies"] == 0
  assert plan["donation_honoured"] is True
  size = plan["per_chip_bytes"]
  assert size["peak"] <= size["hbm"]
  assert plan["largest"]["batch_size"] >= plan["settings"]["batch_size"]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_sweeps_are_drawn_with_a_row_for_every_plan(path):
  plans = json.loads(path.read_text("utf-8"))
  speed, memory = page.sweep(plans).axes
  labels = [t.get_text() for t in speed.get_yticklabels()]
  assert len(set(labels)) == len(plans) == len(memory.patches)
  assert f"({path.relative_to('docs').with_suffix('.svg')})" in PAGE


def test_what_does_not_fit_says_so_in_its_row():
  plan = json.loads(PLANS[0].read_text("utf-8"))
  unfit = plan | {"fits": False, "collectives": None}
  *_, row = page.table({"x": unfit}).splitlines()
  assert "does not fit" in row
  assert row.count("|") == page.table({"x": plan}).splitlines()[0].count("|")


def of_costs(draft, *, more=0.0):
  """A plan whose draft costs that much; each token more in verifying `more`."""
  verify = {str(n): 1 + more * (n - 1) for n in range(1, 9)}
  return {"roofline": {"draft_step_seconds": draft, "verify_seconds": verify}}


def test_the_formula_gives_what_was_quoted():
  quoted = (3.16, 3.25, 2.50, 2.26, 2.35, 1.93, 2.40, 2.62, 2.02, 1.89, 1.80,
            1.54)  # fmt: skip
  for row, value in zip(page.REPORTED, quoted, strict=True):
    _, _, draft, count, acceptance, _ = row
    cost = page.COST_RATIOS[draft]
    actual = page.by_formula(acceptance, count, cost)
    assert actual == pytest.approx(value, abs=0.006)
    # A plan of the same costs predicts the same; dearer verifying, less.
    same = page.by_plan(of_costs(cost), acceptance, count)
    assert same == pytest.approx(actual, rel=1e-9)
    dearer = page.by_plan(of_costs(cost, more=0.1), acceptance, count)
    per_round = (1 + count * cost) / (1 + count * (cost + 0.1))
    assert dearer == pytest.approx(actual * per_round, rel=1e-9)
