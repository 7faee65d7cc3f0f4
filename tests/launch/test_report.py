"""`launch.report`: measured and predicted agree where they must."""

import json

import numpy as np
import pytest

from launch import report, report_data
from launch.engine import Completion
from specjax.types import Origin

SMALL = ("--config.max_new_tokens=16", "--config.num_speculative_tokens=3",
         "--sweep=1", "--report_rounds=1")  # fmt: skip
A, R, B = Origin.ACCEPTED, Origin.RESIDUAL, Origin.BONUS


@pytest.fixture(autouse=True)
def _few_widths(monkeypatch):
  monkeypatch.setattr(report_data, "_WIDTHS", (1,))


def completion(*origins, expected=0.0):
  ends = sum(o != A for o in origins) + (origins[-1] == A)
  return Completion(
    token_ids=[0] * len(origins), origins=list(origins), stop_reason="length",
    num_target_calls=ends, num_drafted=0, num_accepted=0,
    expected_accepted=expected, total_variation=0.0, accept_counts=[],
  )  # fmt: skip


def test_acceptance_by_position_counts_rounds_and_forgets_what_was_cut():
  found = report_data.acceptance_by_position(
    [completion(A, A, B, A, R, R, A, A), completion(A, R)], 2
  )
  assert found["tried"] == [5, 4]
  assert found["conditional"] == [4 / 5, 2 / 4]
  assert found["joint"] == pytest.approx([0.8, 0.4])


def row(distances, ratios, *origins):
  return report_data.Row(
    completion=completion(*origins),
    distances=np.array(distances),
    ratios=np.array(ratios),
  )


def test_rejections_are_predicted_where_tokens_were_drafted():
  found = report_data.rejections(
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
  found = report_data.block_efficiencies(rows, [0.5, 0.25], 2)
  by_hand = [1 + 0.8 + 0.5 * 0.5, 1 + 0.5 + 1.0 * 1.0]
  assert found["from_the_text"] == pytest.approx(np.mean(by_hand))
  assert found["identity"] == pytest.approx(1.75)
  assert found["measured"] == pytest.approx(3 / 2)
  alpha = 1 - 0.7 / 3
  assert found["independent"] == pytest.approx(1 + alpha + alpha**2)


@pytest.mark.heavy
@pytest.mark.parametrize("temperature", [0.0, 1.0])
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
  predicted = found["tokens_per_second"]["predicted"]
  assert predicted["real_acceptance"] >= predicted["with_overhead"] * 0.9
  assert set(found["sweep"]["measured"]) == {"1", "3"}
  assert found["costs"]["loop_overhead"] > 0
  text = (tmp_path / "report.md").read_text()
  assert text.startswith("# Does speculation pay?\n\nSpeculation ")
  for name in ("throughput", "acceptance", "distances"):
    assert (tmp_path / f"{name}.svg").exists()
    assert f"({name}.svg)" in text
  assert capsys.readouterr().out.startswith("Speculation ")


@pytest.mark.parametrize(
  "flags, words",
  [
    (("--config.drafter=ngram",), "config.drafter must be"),
    (("--config.rule=block",), "rule 'token' on one path"),
    (("--config.num_drafts=2",), "rule 'token' on one path"),
    (("--config.num_speculative_tokens=0",), "must be >= 1"),
    (("--sweep=0,2",), "--sweep must be positive"),
  ],
)
def test_mistakes_are_one_line_and_exit_code_2(
  cli, tmp_path, capsys, flags, words
):
  assert cli(report.run, *SMALL, *flags, f"--workdir={tmp_path}") == 2
  assert words in capsys.readouterr().err
