"""`launch.studies.theory`: the loop against the theorems, and every figure."""

import functools
import json

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

from launch import cli, report
from launch.studies.theory import __main__ as theory
from launch.studies.theory import plots, simulation
from specjax.theory import markov

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def execute(*flags):
  with flagsaver.flagsaver():
    return cli.execute(theory.run, ["theory", *flags])


def save(path, pair):
  np.savez(path, **{name: getattr(pair, name) for name in theory._ARRAYS})
  return str(path)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_the_loop_rejects_as_often_as_the_theorem_says(num_drafts):
  pair = markov.random_pair(7, vocab_size=3, horizon=6)
  runs = 40_000
  rejected, tokens = simulation.simulate(
    pair, runs=runs, num_drafts=num_drafts, seed=1
  )
  actual = simulation.summary(rejected)
  expected = theory.theorem3(pair, num_drafts)
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


def test_runs_are_many_parts_of_one_call_and_their_own_streams(monkeypatch):
  pair = markov.random_pair(7, vocab_size=3, horizon=4)
  whole, tokens = simulation.simulate(pair, runs=50, seed=3)
  monkeypatch.setattr(simulation, "_NODES_AT_ONCE", 35)  # 7 runs at once
  parts, same = simulation.simulate(pair, runs=50, seed=3)
  np.testing.assert_array_equal(whole, parts)
  np.testing.assert_array_equal(tokens, same)
  assert len(np.unique(tokens, axis=0)) > 10
  for bad in (dict(runs=0), dict(runs=1, num_drafts=0)):
    with pytest.raises(ValueError, match="must be >= 1"):
      simulation.simulate(pair, **bad)


def test_a_chain_from_a_file(tmp_path):
  pair = markov.repeated([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 2)
  path, output = save(tmp_path / "c.npz", pair), tmp_path / "f.json"
  assert execute(f"--chain={path}", "--num_drafts=1,2", f"--output={output}",
                 "--simulate=2000") == 0  # fmt: skip
  record = json.loads(output.read_text())
  assert record["horizon"] == 2
  assert record["theorem1"] == pytest.approx(0.6, abs=1e-12)
  assert record["theorem2_bound"] == record["theorem1"]
  assert record["theorem3"] == pytest.approx({"1": 0.6, "2": 0.5256}, abs=1e-12)
  assert record["limit"] < 0.5256
  for m, simulated in record["simulated"].items():
    assert simulated["runs"] == 2000
    away = abs(simulated["mean"] - record["theorem3"][m])
    assert away < 5 * simulated["standard_error"]
  assert execute(f"--chain={path}", f"--output={output}", "--overwrite") == 0
  assert json.loads(output.read_text())["simulated"] == {}


@pytest.mark.parametrize(
  "flags, words",
  [
    ((), "either --figure or --chain"),
    (("--chain=no.npz",), "no such file"),
    (("--figure=pie", "--workdir=w"), "unknown figures ['pie']"),
    (("--figure=all",), "needs --workdir"),
    (("--figure=all", "--chain=c.npz"), "either --figure or --chain"),
    (("--figure=all", "--workdir=w", "--simulate=0"), "at least 1 run"),
    (("--figure=all", "--workdir=w", "--simulate=99"), "at least 100 runs"),
  ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, flags, words):
  assert execute(*flags) == 2
  error = capsys.readouterr().err
  assert words in error
  assert error.count("\n") == 1


def test_broken_chains(tmp_path, capsys):
  pair = markov.random_pair(0, vocab_size=2, horizon=3)
  good = {name: np.array(getattr(pair, name)) for name in theory._ARRAYS}
  path = tmp_path / "c.npz"
  for change, words in (
    ({"draft": good["draft"] * 1.1}, "draft must sum to 1"),
    ({"target": -good["target"]}, "not negative"),
    ({"target": good["target"][:1]}, "shape"),
    ({"target": np.full((2, 2, 2), "a")}, "must be numbers"),
  ):
    np.savez(path, **good | change)
    assert execute(f"--chain={path}") == 2
    assert words in capsys.readouterr().err
  np.savez(path, draft=good["draft"])
  assert execute(f"--chain={path}") == 2
  assert "missing" in capsys.readouterr().err
  path.write_text("no")
  assert execute(f"--chain={path}") == 2
  assert "not an .npz file" in capsys.readouterr().err
  np.save(tmp_path / "one.npy", good["draft"])
  assert execute(f"--chain={tmp_path / 'one.npy'}") == 2
  assert "not an .npz file" in capsys.readouterr().err
  save(path, pair)
  assert execute(f"--chain={path}", "--num_drafts=0") == 2
  assert "positive integers" in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.parametrize("name", theory.FIGURES)
def test_every_figure_is_drawn_from_its_json(tmp_path, name, monkeypatch):
  monkeypatch.setattr(theory, "_HORIZON", 3)
  few = functools.partial(theory.acceptance, counts=(1, 2))
  monkeypatch.setitem(theory.FIGURES, "acceptance", few)
  assert execute(f"--figure={name}", f"--workdir={tmp_path}",
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


# ------------------------------------------------------------ what is committed


def test_simulations_agree_with_the_theorems():
  paths = [f"docs/theory/{name}.json" for name in ("single", "batch", "drafts")]
  table = plots.rejections({path: report.read(path) for path in paths})
  rows = [row.split("|") for row in table.splitlines()[2:]]
  assert len(rows) == 7
  for row in rows:
    assert abs(float(row[6])) < 4
    assert row[7].strip() == "100,000"
