"""`launch.studies.rules.costs`: what it measures, resumes and draws."""

import json

import pytest
from absl.testing import flagsaver

from launch import cli, provenance, report
from launch.results import Journal
from launch.studies.rules import costs, plots
from specjax import rules, siblings

pytestmark = pytest.mark.usefixtures("quick_to_compile")
SMALL = ("--vocab_sizes=256", "--turns=1",
         "--rule_num_speculative_tokens=2", "--rule_batch_sizes=1")  # fmt: skip


def grid(**axes):
  sizes = {"vocab_size": [256], "num_drafts": [1, 2, 4],
           "num_speculative_tokens": [1, 4], "batch_size": [1, 8]}  # fmt: skip
  sizes |= axes
  return [
    costs.Cell(
      vocab_size=v, num_drafts=k, num_speculative_tokens=g, batch_size=b
    )
    for v in sizes["vocab_size"]
    for k in sizes["num_drafts"]
    for g in sizes["num_speculative_tokens"]
    for b in sizes["batch_size"]
  ]


def execute(*flags):
  with flagsaver.flagsaver():
    return cli.execute(costs.run, ["test", *flags])


@pytest.fixture
def measure(tmp_path):
  def run(*flags):
    path = tmp_path / "costs.json"
    assert execute(*SMALL, *flags, f"--output={path}") == 0
    assert not (tmp_path / "costs.json.journal").exists()
    return json.loads(path.read_text())

  return run


def test_measures_what_fits_and_draws_it(
  measure, tmp_path, capsys, monkeypatch
):
  flags = ("--rule_num_drafts=2", "--rules=token,match,gumbel_list")
  result = measure(*flags)
  cells = {cell["rule"]: cell for cell in result["cells"]}
  assert set(cells) == {"match", "gumbel_list"}  # token takes a single path
  assert cells["gumbel_list"]["siblings"] == "shared_noise"
  for cell in cells.values():
    assert cell["bytes"] == 2 * (2 * 2 + 1) * 256 * 4
    assert cell["milliseconds"] > 0
    assert cell["ratio"] == cell["milliseconds"] / cell["pass_milliseconds"]
  assert result["rounds"] == 1
  assert result["machine"]["jax"]
  assert capsys.readouterr().err.count("passes") == 2

  # A stopped run goes on: what is finished is not measured again.
  path, timed = tmp_path / "costs.json", []
  path.unlink()

  def dies_at_the_second(name, *_, **__):
    timed.append(name)
    if len(timed) == 2:
      raise KeyboardInterrupt
    return 3.0, 2.0

  monkeypatch.setattr(costs, "time_rule", dies_at_the_second)
  with pytest.raises(KeyboardInterrupt):
    execute(*SMALL, *flags, f"--output={path}")
  other = (flags[0], "--rules=match")  # whose cells are not mixed in
  assert execute(*SMALL, *other, f"--output={path}") == 2
  assert "rules was" in capsys.readouterr().err
  resumed = measure(*flags)
  assert timed == [timed[0], timed[1], timed[1]]
  assert [cell["ratio"] for cell in resumed["cells"]] == [1.5, 1.5]

  drawn = [tmp_path / "a" / "costs.svg", tmp_path / "costs.svg"]
  for figure in drawn:
    arguments = ["costs", str(tmp_path / "costs.json"), str(figure)]
    assert plots.main(["rule_plots", *arguments]) == 0
  assert "gumbel_list" in drawn[0].read_text()
  assert drawn[0].read_bytes() == drawn[1].read_bytes()


def test_a_partial_result_of_another_run_is_not_mixed_in(tmp_path, capsys):
  path = tmp_path / "costs.json"
  settings = {"rounds": 7, "machine": provenance.machine()}
  with Journal(str(path), settings) as journal:
    journal.add({"batch": "x"})
  assert execute(*SMALL, f"--output={path}") == 2
  assert "rounds was 7, is 1" in capsys.readouterr().err


def test_cells_that_are_too_large_are_named(measure):
  result = measure("--rule_num_drafts=2", "--rules=match", "--max_gib=1e-9")
  assert not result["cells"]
  assert [cell["rule"] for cell in result["skipped"]] == ["match"]


@pytest.mark.parametrize(
  "flag", ["--rules=none", "--vocab_sizes=0", "--vocab_sizes=many"]
)
def test_mistakes_are_named(flag):
  assert execute(*SMALL, flag) == 2


@pytest.mark.parametrize(
  "rule, drawn, centre, count",
  [
    ("match", siblings.IID, (256, 4, 4, 1), 5),
    ("token", siblings.IID, (256, 1, 4, 1), 3),
    ("hub", siblings.HUB, (256, 2, 1, 1), 2),
  ],
)
def test_a_rules_star_is_around_a_cell_it_can_verify(
  rule, drawn, centre, count
):
  cells = costs.cells_of(rule, drawn, grid(), full=False)
  assert centre in [tuple(vars(cell).values()) for cell in cells]
  assert len(cells) == count
  assert count <= len(costs.cells_of(rule, drawn, grid(), full=True))


def test_inputs_are_laws_and_tokens_drawn_from_them():
  cell = grid(num_drafts=[4])[0]
  draft, target = costs.make_inputs(cell, siblings.WITHOUT_REPLACEMENT)
  assert draft.tokens.shape == (1, cell.tree.num_nodes)
  assert len(set(draft.tokens[0, 1:5].tolist())) == 4
  assert target.shape == draft.log_probs.shape == (1, cell.tree.num_nodes, 256)
  # Never a token twice: the second's law has lost the first.
  assert draft.log_probs[0, 2, draft.tokens[0, 1]] == -float("inf")


def test_costs_have_a_row_a_rule_and_a_number_a_place():
  result = report.read("docs/measurements/rules/costs.json")
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
