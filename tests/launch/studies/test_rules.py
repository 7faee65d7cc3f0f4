"""`launch.studies.rules`: values by hand, on laws and along real contexts."""

import contextlib
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from commands import execute

from launch.studies.rules import __main__ as rules
from launch.studies.rules import on_pair
from specjax import rules as rules_lib
from specjax import siblings
from specjax.tree import chain, paths
from specjax.types import Draft

TARGET, DRAFT = "--target=0.2,0.3,0.5", "--draft=0.5,0.3,0.2"


def compare(path, *flags):
  """The JSON report of a run."""
  assert execute(rules.run, *flags, f"--output={path}") == 0
  return json.loads(path.read_text())


# ---------------------------------------------------------------- on two laws


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
  """The report on all rules with two drafts, and what was printed."""
  path = tmp_path_factory.mktemp("rules") / "r.json"
  with contextlib.redirect_stdout(io.StringIO()) as out:
    result = compare(path, TARGET, DRAFT, "--shapes=2x1")
  return result, out.getvalue()


def test_acceptance_matches_hand_computed_values(everything):
  result, _ = everything
  assert result["optimum"] == pytest.approx(0.86)
  expected = {
    "token": 0.7, "match": 0.483, "kseq": 0.791355, "transport": 0.86,
    "greedy_draft": 0.9, "hub": 0.9, "recursive (without_replacement)": 0.82,
    "lenient": 0.9, "typical": 1.0, "cascade_token": 0.6,
  }  # fmt: skip
  for name, value in expected.items():
    entry = result["rules"][name]
    assert entry["acceptance"] == pytest.approx(value, abs=1e-6), name
    assert entry["share_of_optimum"] == pytest.approx(value / 0.86, abs=1e-6)
    assert entry["method"] == "exact"
    assert entry["standard_error"] is None


def test_only_lossy_rules_have_nonzero_total_variation(everything):
  result, _ = everything
  for name, distance in {
    "decoding_opt": 0.1, "decoding_uno": 0.2, "top_beta": 0.3, "blockwise": 0.15
  }.items():  # fmt: skip
    entry = result["rules"][name]
    assert entry["total_variation"] == pytest.approx(distance, abs=1e-9), name
  for name, entry in result["rules"].items():
    if name != "gumbel_list":  # sampled
      assert entry["lossless"] == (entry["total_variation"] < 1e-9), name


# -------------------------------------------------------- along real contexts

SMALL = ("--config.max_new_tokens=6", "--max_contexts=2",
         "--config.batch_size=4")  # fmt: skip


def along(cli, path, *flags, config=None):
  """The JSON report of a run on a tiny pair, two paths of two tokens."""
  drafter = "--config.drafter=model(tokens=2, tree=paths(2))"
  flags = (*SMALL, drafter, *flags, f"--output={path}")
  assert cli(rules.run, *flags, config=config) == 0
  return json.loads(path.read_text())


def test_rules_are_compared_on_the_same_drafts(
  cli, tmp_path, capsys, monkeypatch
):
  names = ("token", "lenient", "transport")
  monkeypatch.setattr(
    on_pair, "ROWS", {name: on_pair.ROWS[name] for name in names}
  )
  flags = "--config.temperature=0.7", "--shapes=1x2,2x2"
  result = along(cli, tmp_path / "r.json", *flags)
  actual, shown = result["rules"], capsys.readouterr().out
  assert [*actual] == [f"{name} 1x2" for name in names] + ["transport 2x2"]
  for name, entry in actual.items():
    value = entry["expected_accepted"]
    assert 0 <= value <= 2
    assert entry["block_efficiency"] == pytest.approx(1 + value)
    low, high = entry["block_efficiency_ci"]
    assert low <= 1 + value <= high
    # Six built-in prompts; the rows that fill the last batch do not count.
    assert 6 <= entry["num_contexts"] <= 12
    assert (entry["total_variation"] is None) == entry["lossless"]
    if name != "token 1x2":
      assert f"{entry['block_efficiency_ratio']:.3f} (" in shown
  # On the same contexts and drafts, so without any noise between them:
  token, lenient = actual["token 1x2"], actual["lenient 1x2"]
  one, two = (actual[f"transport {shape}"] for shape in ("1x2", "2x2"))
  assert one["expected_accepted"] == pytest.approx(token["expected_accepted"])
  assert one["expected_accepted"] != two["expected_accepted"]
  assert lenient["expected_accepted"] >= token["expected_accepted"] - 1e-5
  assert 0 < lenient["total_variation"] < 1
  assert lenient["block_efficiency_ratio"] == pytest.approx(
    lenient["block_efficiency"] / token["block_efficiency"]
  )


def test_first_path_of_a_draft_is_rated_as_a_chain():
  rng = np.random.default_rng(0)
  p, q = jnp.log(rng.dirichlet(np.ones(5), (2, 1, 7)))
  tokens = jnp.asarray(rng.integers(0, 5, (1, 7)))
  one, rule = chain(2), rules_lib.get("block")
  row = on_pair.Case(name="", rule=rule, tree=one, siblings=siblings.IID)
  # Nodes are numbered level by level.
  rated = [
    on_pair._rate(
      row,
      Draft(
        tree=tree, siblings=siblings.IID, tokens=tokens[:, at],
        log_probs=p[:, at],
      ),
      q[:, at],
    )
    for tree, at in ((paths(3, 2), np.arange(7)), (one, np.array([0, 1, 3])))
  ]  # fmt: skip
  np.testing.assert_allclose(*rated, atol=1e-6)
