"""`launch.studies.report`: measured and predicted agree where they must."""

import json

import jax
import numpy as np
import pytest
import toys

import specjax
from configs import huggingface as huggingface_config
from launch import prompts
from launch.build import pair as pair_lib
from launch.studies.report import __main__ as report
from launch.studies.report import findings, page
from specjax.runtime import engine, timing
from specjax.runtime.engine import Completion
from specjax.state import Origin
from specjax.theory import throughput

SMALL = ("--config.max_new_tokens=16", "--config.drafter=model(tokens=3)",
         "--sweep_tokens=1", "--report_rounds=1")  # fmt: skip
pytestmark = pytest.mark.usefixtures("quick_to_compile")
A, R, B = Origin.ACCEPTED, Origin.RESIDUAL, Origin.BONUS


@pytest.fixture(autouse=True)
def _few_widths(monkeypatch):
  monkeypatch.setattr(findings, "_WIDTHS", (1,))


def completion(*origins, expected=0.0):
  ends = sum(o != A for o in origins) + (origins[-1] == A)
  return Completion(
    token_ids=[0] * len(origins), origins=list(origins), stop_reason="length",
    num_target_calls=ends, num_fed=4, num_drafted=0,
    num_accepted=origins.count(A),
    expected_accepted=expected, total_variation=0.0, accept_counts=[],
  )  # fmt: skip


def test_acceptance_by_position_counts_rounds_and_forgets_what_was_cut():
  found = findings.acceptance_by_position(
    [completion(A, A, B, A, R, R, A, A), completion(A, R)], 2
  )
  assert found["tried"] == [5, 4]
  assert found["conditional"] == [4 / 5, 2 / 4]
  assert found["joint"] == pytest.approx([0.8, 0.4])


def row(distances, ratios, *origins):
  return findings.Row(
    prompt=object(),
    completion=completion(*origins),
    distances=np.array(distances),
    ratios=np.array(ratios),
  )


def test_rejections_are_predicted_where_tokens_were_drafted():
  found = findings.rejections(
    [row([0.2, 0.5, 0.9], [1, 1, 1], A, R, B), row([0.1], [1], A)]
  )
  assert found["counted"] == 1
  assert found["predicted"] == pytest.approx(0.8)
  assert found["every_position"] == pytest.approx(1.7)
  spread = np.sqrt(0.16 + 0.25 + 0.09)
  assert found["predicted_interval"] == pytest.approx(
    [0.8 - 1.96 * spread, 0.8 + 1.96 * spread]
  )


def test_block_efficiency_from_the_text_is_the_mean_over_starts():
  rows = [row([0.2, 0.5, 0.0], [0.5, 1.0, 0.25], A, R, R)]
  found = findings.block_efficiencies(rows, [0.5, 0.25], 2)
  by_hand = [1 + 0.8 + 0.5 * 0.5, 1 + 0.5 + 1.0 * 1.0]
  assert found["from_the_text"] == pytest.approx(np.mean(by_hand))
  assert found["identity"] == pytest.approx(1.75)
  assert found["measured"] == pytest.approx(3 / 2)
  alpha = 1 - 0.7 / 3
  assert found["independent"] == pytest.approx(1 + alpha + alpha**2)


def test_tokens_a_call_are_right_where_budgets_cut_rounds():
  """Short completions of independent acceptance, of which all is known."""
  logits = toys.table(5, seed=0, contexts=1)
  drafted = toys.near(logits, noise=0.6, seed=1)
  p, q = (np.exp(x[0]) / np.exp(x[0]).sum() for x in (drafted, logits))
  alpha = np.minimum(p, q).sum()
  exact = 8 / throughput.expected_calls(alpha ** np.arange(1, 7), 8)
  model, rows = toys.table_model(5), 4000
  decoder = specjax.make_decoder(
    model,
    drafter=specjax.drafters.model.drafter(
      model, tree=specjax.tree.chain(6), vocab_size=5
    ),
  )
  state = jax.jit(
    lambda params: decoder.generate(
      params,
      decoder.init(
        params, np.zeros((rows, 1), np.int32), np.ones(rows, np.int32),
        jax.random.key(0), buffer_length=9, max_new_tokens=8,
      ),
    )
  )(specjax.Params(target=logits, draft=drafted))  # fmt: skip
  found = findings.block_efficiencies(
    [
      findings.Row(
        prompt=object(),
        completion=one,
        distances=np.full(8, 1 - alpha),
        ratios=np.ones(8),
      )
      for one in engine.completions(state, rows)
    ],
    list(alpha ** np.arange(1, 7)),
    6,
  )
  assert found["rao_blackwell"] == pytest.approx(exact, abs=0.02)
  assert found["measured"] == pytest.approx(exact, abs=0.04)
  assert found["identity"] > exact + 0.3  # of rounds that nothing cuts


def predictions(step):
  return findings.predictions(
    timing.StepCosts(
      step=step, plain_step=0.25, target={1: 0.2, 2: 0.25, 3: 0.3},
      draft={1: 0.04, 2: 0.06}, draft_passes=(2, 1), nodes=3, in_order=0.42,
      with_laws=0.45, dispatch=0.0, prefill=1.0, plain_prefill=1.0,
    ),
    {"independent": 1.8, "measured": 1.5, "rao_blackwell": 2.0},
    [0.5, 0.25, 0.1], seconds=12.0, round_seconds=10.0, batches=2,
    lengths=[15, 15], rows=1, num_tokens=2,
  )  # fmt: skip


def test_predictions_from_costs_by_hand():
  found = predictions(0.5)
  assert found["rates"] == pytest.approx(
    {
      "independent": 1.8 / 0.4,
      "real_acceptance": 1.5 / 0.4,
      "with_overhead": 1.5 / 0.5,
      "with_prompts": 30 / 12,
      "expected": 30 / (0.75 * 10 + 2),
    }
  )
  # Three tokens would need a pass over four, which was not timed; two are what
  # was predicted. The loop adds 0.05 s to a plain pass, and 0.1 s to a round's.
  calls = 2 * throughput.expected_calls([0.5], 15)
  assert found["sweep"] == pytest.approx(
    {
      1: 30 / (calls * (0.05 + 0.25 + 0.05 + 0.025) + 2),
      2: found["rates"]["expected"],
    }
  )
  # 1 + P + P^2 tokens must pay for two plain steps.
  least = found["costs"]["break_even_acceptance"]
  assert 1 + least + least**2 == pytest.approx(2)
  parts = found["costs"]["costs"]["round_seconds"]
  assert parts == pytest.approx(
    {"passes": 0.4, "out_of_cache": 0.02, "laws": 0.03, "bookkeeping": 0.05}
  )


def test_of_timings_that_disagree_nothing_is_predicted():
  """A round that takes less than its passes, and the target's alone."""
  found = predictions(0.15)
  assert found["costs"]["costs"]["doubts"]
  assert {*found["rates"].values()} == {None}
  assert found["sweep"] == {}
  assert found["costs"]["break_even_acceptance"] is None


def test_what_never_pays_has_no_break_even():
  assert predictions(0.9)["costs"]["break_even_acceptance"] is None


def test_at_temperature_0_theorem_1_is_no_prediction():
  found = {
    "counted": 588, "predicted": 588.0, "predicted_interval": [588.0, 588.0],
    "every_position": 600.0, "drafted_positions": 2175,
  }  # fmt: skip
  text = page.rejections(found, 0.0)
  assert "this very count (588)" in text
  assert "95%" not in text
  found["predicted_interval"] = [560.0, 590.0]
  assert "(95% 560.0–590.0)" in page.rejections(found, 1.0)


@pytest.mark.parametrize(
  "interval, least, words",
  [
    ((1.1, 1.3), 0.4, "pays here: 1.20 times"),
    ((0.9, 1.3), 0.4, "makes no clear difference here"),
    ((0.7, 0.9), None, "even if all were accepted"),
    ((0.7, 0.9), 0.4, "does not pay here"),
    (None, 0.4, "pays here"),
  ],
)
def test_the_verdict_follows_the_interval(interval, least, words):
  text = page.verdict(
    {
      "num_speculative_tokens": 2,
      "costs": {"step_ratio": 1.5},
      "speedup": {"measured": 1.2, "measured_ci": interval},
      "block_efficiency": {"acceptance": 0.7, "measured": 1.9},
      "break_even_acceptance": least,
      "sweep": {"best_measured": 4, "measured": {"4": 30.0}},
      "tokens_per_second": {"plain": 20.0},
    }
  )
  assert words in text
  assert "1.90 tokens and takes 1.50 times" in text
  assert text.endswith("The best N measured is 4, 1.50 times plain decoding.")


@pytest.mark.parametrize(
  "temperature", [1.0, pytest.param(0.0, marks=pytest.mark.heavy)]
)
def test_a_pair_is_reported(cli, tmp_path, capsys, temperature):
  code = cli(
    report.run, *SMALL, f"--config.temperature={temperature}",
    f"--workdir={tmp_path}",
  )  # fmt: skip
  assert code == 0
  found = json.loads((tmp_path / "report.json").read_text())
  rejected = found["rejections"]
  if temperature == 0:  # laws are points: nothing is left to chance
    assert rejected["counted"] == pytest.approx(rejected["predicted"], abs=1)
  else:
    low, high = rejected["predicted_interval"]
    away = abs(rejected["counted"] - rejected["predicted"])
    assert away <= 5 * (high - low) / 3.92
  efficiency = found["block_efficiency"]
  assert 1 <= efficiency["measured"] <= 4
  assert efficiency["identity"] == pytest.approx(
    efficiency["measured"], rel=0.3
  )
  assert set(found["sweep"]["measured"]) == {"1", "3"}
  costs = found["costs"]
  assert sum(costs["round_seconds"].values()) == pytest.approx(
    costs["step_seconds"]
  )
  # One number for one quantity.
  assert costs["verify_seconds"]["1"] == costs["plain_pass_seconds"]
  rates = found["tokens_per_second"]["predicted"]
  assert found["sweep"]["predicted"].get("3") == rates["expected"]
  assert (rates["expected"] is None) == bool(costs["doubts"])
  text = (tmp_path / "report.md").read_text()
  assert text.startswith("# Does speculation pay?\n\nSpeculation ")
  for name in ("throughput", "acceptance", "distances"):
    assert (tmp_path / f"{name}.svg").exists()
    assert f"({name}.svg)" in text
  assert capsys.readouterr().out.startswith("Speculation ")


@pytest.mark.parametrize(
  "flags, words",
  [
    (("--config.drafter=ngram",), "that a model draws"),
    (("--config.rule=block",), "rule 'token' on one path"),
    (("--config.drafter=model(tree=paths(2))",), "rule 'token' on one path"),
    (("--config.drafter=plain",), "rule 'token' on one path"),
    (("--sweep_tokens=0,2",), "--sweep_tokens must be positive"),
    (
      ("--sweep_tokens=2,17",),
      "--sweep_tokens must be at most config.max_new_tokens (16)",
    ),
  ],
)
def test_mistakes_are_one_line_and_exit_code_2(
  cli, tmp_path, capsys, flags, words
):
  assert cli(report.run, *SMALL, *flags, f"--workdir={tmp_path}") == 2
  assert words in capsys.readouterr().err


@pytest.mark.parametrize(
  "drafter", ["model(tokens=3)", "layer_skip('SET', tokens=3)"]
)
def test_laws_along_the_text_are_those_that_the_loop_drew_from(
  pair, drafter, tmp_path
):
  """A thinned target drafts on the target's own cache, and so it is read."""
  config = huggingface_config.get_config(f"target={pair[0]},draft={pair[1]}")
  skipped = tmp_path / "skip.json"
  skipped.write_text('{"skip_attention": [], "skip_mlp": [0]}')
  drafter = drafter.replace("SET", str(skipped))
  config.update(max_new_tokens=24, temperature=2.0, drafter=drafter)
  models = pair_lib.build(config)
  one = pair_lib.engine_of(config, models)
  items = prompts.built_in(models.tokenizer, max_tokens=32)[:1]
  (batch,) = engine.make_batches(items, batch_size=1, max_width=64)
  one.compile(batch)
  state, step = one.prefill(batch), jax.jit(models.decoder.step)
  laws = []
  while not bool(state.done[0]):
    state, info = step(models.params, state)
    p, q = (
      np.exp(np.asarray(x[0], np.float64))
      for x in (info.draft.log_probs, info.target_log_probs)
    )
    p = np.roll(p, -1, axis=0)  # row n is the law that token n was drawn from
    met = 0.5 * np.abs(p - q).sum(1)
    laws += met[: int(info.num_emitted[0])].tolist()
  (done,) = engine.completions(state, 1)
  assert findings.rounds(done)
  (row,) = findings.laws_along(models, config, [(batch.prompts[0], done)])
  assert len(laws) == len(row.distances) == 24
  assert row.drafted.sum() > 10
  np.testing.assert_allclose(
    row.distances[row.drafted], np.array(laws)[row.drafted], atol=1e-4
  )
  assert np.ptp(row.distances) > 0.01


def test_a_round_ends_with_a_token_of_the_targets():
  assert findings.rounds(completion(A, A, B, A, R, R, A, A)) == [3, 2, 1, 2]
  assert findings.rounds(completion(B)) == [1]
