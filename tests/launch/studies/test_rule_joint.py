"""Shares of the joint optimum: what is measured, and what the page shows."""

import json
import math
import pathlib
import re

import jax
import pytest

from launch.studies.rules import joint, off_draft, plots
from specjax import rules
from specjax import siblings as siblings_lib

DOCS = pathlib.Path("docs")


def measured(name):
  path = DOCS / "measurements" / "rules" / f"{name}.json"
  return json.loads(path.read_text("utf-8"))


@pytest.mark.usefixtures("quick_to_compile")
def test_of_one_token_a_path_transport_is_the_optimum(monkeypatch):
  some = ("transport", "match", "typical", "gumbel_list", "hub")
  monkeypatch.setattr(rules, "RULES", {n: rules.RULES[n] for n in some})
  shape = joint.Shape(vocab_size=2, length=1, count=2)
  with jax.enable_x64(True):
    actual = joint.shares(shape, "dirichlet_1", 4)
  # Lossy rules, and those for other drafts, are not asked.
  assert set(actual["share_of_optimum"]) == {"transport", "match"}
  best, match = actual["share_of_optimum"].values()
  assert best == pytest.approx({"mean": 1, "minimum": 1}, abs=1e-9)
  assert match["minimum"] < match["mean"] < 1
  assert actual["error_of_output_law"] < 1e-12


def test_every_shape_has_rules_and_few_drafts():
  for shape in joint.SHAPES:
    assert "match" in shape.rules()
    assert shape.vocab_size**shape.tree.num_drafted <= 4096
  hub = next(s for s in joint.SHAPES if s.siblings is siblings_lib.HUB)
  assert hub.tree.parents == (-1, 0, 0, 1, 1, 2, 2)


def test_the_committed_shares_are_of_every_rule_that_fits():
  fitting = {
    (s.vocab_size, s.length, s.count, s.siblings.name): set(s.rules())
    for s in joint.SHAPES
  }
  names = "vocab_size", "num_speculative_tokens", "num_drafts", "siblings"
  rows = measured("joint")["rows"]
  assert {tuple(row[name] for name in names) for row in rows} == set(fitting)
  for row in rows:
    key = tuple(row[name] for name in names)
    assert set(row["share_of_optimum"]) == fitting[key]


def test_no_committed_share_is_above_one_and_all_laws_are_exact():
  result = measured("joint")
  least, most = 1.0, 0.0
  for row in result["rows"]:
    assert row["error_of_output_law"] < 1e-10
    for share in row["share_of_optimum"].values():
      least, most = min(least, share["minimum"]), max(most, share["mean"])
      assert share["minimum"] <= share["mean"] <= 1 + 1e-6
  assert least < 0.5
  assert math.isclose(most, 1, abs_tol=1e-6)  # certain drafts, by match
  for row in measured("off_draft")["rows"]:
    share = row["share_of_optimum"]
    assert 0.99 < share["minimum"] <= share["mean"] <= 1 + 1e-6


def test_what_the_page_says_of_other_drafts_is_in_the_committed_tables():
  text = " ".join((DOCS / "joint.md").read_text("utf-8").split())
  others = plots.joint_others({"joint": measured("joint")}).splitlines()
  rows = [[x.strip() for x in row.split("|")] for row in others]
  shares = {(siblings, rule): last for _, siblings, rule, *_, last, _ in rows}
  for siblings, rule in (
    ("without replacement", "`score_block`"),
    ("greedy", "`univer`"),
    ("hub", "`hub`"),
  ):
    assert re.search(f"{rule} (has )?{re.escape(shares[siblings, rule])}", text)
  assert shares["top k", "`match`"] == "1.000 (1.000)"
  rows = measured("off_draft")["rows"]
  least = min(row["share_of_optimum"]["minimum"] for row in rows)
  assert f"has at least {least:.4f} of the optimum" in text


def test_the_table_averages_over_sizes_and_sorts_by_share():
  row = lambda g, **shares: {
    "num_speculative_tokens": g, "num_drafts": 2, "siblings": "iid",
    "share_of_optimum": {
      n: {"mean": mean, "minimum": least}
      for n, (mean, least) in shares.items()
    },
  }  # fmt: skip
  result = {
    "rows": [
      row(2, worse=(0.5, 0.2), better=(0.9, 0.8)),
      row(3, worse=(0.7, 0.4), better=(0.8, 0.6)),
    ]
  }
  assert plots.joint_table({"x": result}).splitlines()[2:] == [
    "| `better` | 0.900 (0.800) | 0.800 (0.600) | 0.850 (0.600) |",
    "| `worse` | 0.500 (0.200) | 0.700 (0.400) | 0.600 (0.200) |",
  ]


@pytest.mark.usefixtures("quick_to_compile")
def test_a_prior_of_sharp_laws_has_a_share():
  share = off_draft.share("dirichlet_0.3", (2, 2, 2, 2), 0)
  assert 0.99 < share <= 1 + 1e-8
