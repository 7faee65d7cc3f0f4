"""`launch.studies.theory`: the loop against the theorems, and every figure."""

import functools
import json

import jax
import numpy as np
import pytest
from commands import execute

from launch.studies.theory import __main__ as theory
from launch.studies.theory import simulation
from specjax.theory import markov, rejections


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_simulated_rejections_and_outputs_match_theory(num_drafts):
  pair = markov.random_pair(7, vocab_size=3, horizon=6)
  runs = 40_000
  rejected, tokens = simulation.simulate(
    pair, runs=runs, num_drafts=num_drafts, seed=1
  )
  actual = simulation.summary(rejected)
  expected = theory.float64(rejections.theorem3, pair, num_drafts)
  assert abs(actual["mean"] - expected) < 5 * actual["standard_error"]
  # And the runs are the target's: its joint law of the last two tokens.
  mass = pair.target_initial
  for step in pair.target[:-1]:
    mass = mass @ step
  true = mass[:, None] * pair.target[-1]
  counts = np.zeros((3, 3))
  np.add.at(counts, (tokens[:, -2], tokens[:, -1]), 1 / runs)
  limit = np.sqrt(8 / runs) / 2 + np.sqrt(np.log(1e6) / (2 * runs))
  assert np.abs(counts - true).sum() / 2 < limit


@pytest.mark.slow
@pytest.mark.parametrize("name", theory.FIGURES)
def test_every_figure_is_written_with_its_json(tmp_path, name, monkeypatch):
  monkeypatch.setattr(theory, "_HORIZON", 3)
  few = functools.partial(theory.acceptance, counts=(1, 2))
  monkeypatch.setitem(theory.FIGURES, "acceptance", few)
  assert execute(theory.run, f"--figure={name}", f"--workdir={tmp_path}",
                 "--simulate=300") == 0  # fmt: skip
  numbers = json.loads((tmp_path / f"{name}.json").read_text())
  assert numbers["machine"]["jax"] == jax.__version__
  assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
  assert (tmp_path / f"{name}.png").stat().st_size > 5_000
  if name == "acceptance":
    assert_below_the_optimum(numbers)


def assert_below_the_optimum(numbers):
  """Rules for i.i.d. drafts; transport attains it."""
  optimum = dict(zip(numbers["num_drafts"], numbers["optimum"], strict=True))
  for name in ("recursive", "kseq", "transport", "match"):
    for point in numbers["rules"][name]:
      best = optimum[point["num_drafts"]]
      assert point["acceptance"] <= best + 1e-9
      if name == "transport":
        assert point["acceptance"] == pytest.approx(best, abs=1e-9)
