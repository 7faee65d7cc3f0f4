"""`launch.benchmark`: every number is there, and is of the right kind."""

import json
import types

import files
import jax
import pytest

from launch import bandwidth, benchmark, prompts, rates
from specjax import intervals
from specjax.runtime import engine

pytestmark = pytest.mark.usefixtures("quick_to_compile")

KEYS = (
  "autoregressive_tokens_per_second", "speculative_tokens_per_second",
  "speedup", "speedup_ci", "hf_autoregressive_tokens_per_second",
  "hf_assisted_tokens_per_second", "prefill_seconds", "draft_step_seconds",
  "verify_seconds", "step_seconds", "loop_overhead", "compile_seconds",
  "predicted_speedup", "memory_bandwidth", "lossless", "total_variation",
)  # fmt: skip
ON_CPU = {
  "hf_autoregressive_tokens_per_second",
  "hf_assisted_tokens_per_second",
}
SMALL = ("--config.max_new_tokens=8", "--config.drafter=model(tokens=2)",
         "--rounds=1")  # fmt: skip


@pytest.fixture(autouse=True)
def _few_widths(monkeypatch):
  monkeypatch.setattr(benchmark, "_WIDTHS", (1, 4))


def measure(cli, tmp_path, *flags, config=None):
  path = tmp_path / "b.json"
  flags = (*SMALL, *flags, f"--output={path}")
  assert cli(benchmark.run, *flags, config=config) == 0
  return json.loads(path.read_text())


def test_the_documented_numbers_are_measured(cli, tmp_path, capsys):
  # transformers asks for equal paddings of the two vocabularies. No id beyond
  # the tokenizer's 4,096 may be drawn, there or here.
  target, draft = (
    files.make_checkpoint(
      tmp_path / str(n), seed=n, vocab_size=8192, num_layers=1
    )
    for n in range(2)
  )
  config = f"configs/huggingface.py:target={target},draft={draft}"
  result = measure(cli, tmp_path, config=config)
  on_cpu = jax.default_backend() == "cpu"
  for key in KEYS:
    told = result[key] is not None
    if key == "predicted_speedup":  # a busy machine leaves doubts
      assert told == (not result["doubts"])
    else:
      assert told or (key in ON_CPU and not on_cpu), key
  assert result["rule"] == "token"
  assert result["lossless"]
  low, high = result["speedup_ci"]
  assert low <= high
  if result["prediction_error_ci"]:
    low, high = result["prediction_error_ci"]
    assert low <= result["prediction_error"] <= high
  assert sum(result["round_seconds"].values()) == pytest.approx(
    result["step_seconds"]
  )
  assert result["hf_identical_completions"] == (1.0 if on_cpu else None)
  assert result["machine"]["jax"]
  assert result["target_pass_seconds"]["1"] > 0
  printed = capsys.readouterr()
  assert json.loads(printed.out) == result
  found = result["memory_bandwidth"]
  assert bandwidth.row(found) in printed.err
  assert found["bytes_per_second"] == pytest.approx(
    (found["weight_bytes_per_pass"] + found["cache_bytes_per_pass"])
    / result["autoregressive_step_seconds"]
  )


def test_rows_of_one_prompt_are_one_unit_of_a_speedup():
  """Six prompts, three rows each, one a batch, alike but for the prompt."""
  rows = [
    prompts.Prompt(3 * i + s, i, "", (i,), sample=s)
    for i in range(6)
    for s in range(3)
  ]
  batches = engine.make_batches(rows, batch_size=1, max_width=16)

  def system(seconds):
    def run(batch):
      (row,) = batch.prompts
      done = engine.Completion(
        token_ids=[0] * 8, origins=[], stop_reason="length",
        num_target_calls=4, num_fed=8, num_drafted=8, num_accepted=4,
        expected_accepted=4.0, total_variation=0.0, accept_counts=[],
      )  # fmt: skip
      return [done], seconds(row.id)

    return types.SimpleNamespace(run=run)

  turns = rates.measure_rates(
    batches,
    {
      "autoregressive": system(lambda i: 1.0),
      "speculative": system(lambda i: 0.5 + 0.1 * i),
    },
    None,
    rounds=2,
  )
  units = turns.units()
  assert len(units) == 6
  assert {unit.num_tokens for unit in units} == {24}
  seconds = [3 * (0.5 + 0.1 * i) for i in range(6)]
  equal = [1.0] * 6
  assert intervals.speedup_interval(units) == pytest.approx(
    intervals.interval([equal, [3.0] * 6], [seconds, equal])
  )
  assert turns.rate_interval("speculative") == pytest.approx(
    intervals.ratio_interval([24.0] * 6, seconds)
  )


@pytest.mark.gpu
@pytest.mark.heavy
@pytest.mark.parametrize(
  "flags",
  [
    ("--config.drafter=layer_skip('SET', tokens=2)",),
    ("--config.drafter=plain",),
    (
      "--config.rule=match",
      "--config.drafter=model(tokens=2, tree=paths(2))",
      "--config.batch_size=3",
      "--config.temperature=1.0",
    ),
  ],
)
def test_other_settings_leave_out_only_what_does_not_apply(
  cli, tmp_path, flags
):
  skipped = tmp_path / "skip.json"
  skipped.write_text('{"skip_attention": [1], "skip_mlp": []}')
  flags = [flag.replace("SET", str(skipped)) for flag in flags]
  result = measure(cli, tmp_path, "--noreference", *flags)
  missing = {k for k in KEYS if result[k] is None}
  allowed = {*ON_CPU, "draft_step_seconds"}
  if result["config"]["batch_size"] > 1:  # two batches of six prompts
    allowed.add("speedup_ci")
  if result["doubts"]:
    allowed.add("predicted_speedup")
  assert missing <= allowed
