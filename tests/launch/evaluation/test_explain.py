"""Explanations of an evaluation, against what they are by hand."""

import json
import types

import files
import numpy as np
import pytest

from launch import evaluate
from launch.evaluation import costs, explain, measure
from specjax.state import Origin
from specjax.theory import throughput

A, R, B = Origin.ACCEPTED, Origin.RESIDUAL, Origin.BONUS


def row(system, **more):
  """A row of a hundred tokens, with what is read of it."""
  known = {
    "system": system, "temperature": 1.0, "batch_size": 1, "level": "all",
    "num_tokens": 100, "num_requests": 10, "tokens_per_second": 40.0,
    "tokens_per_second_ci": (30.0, 50.0), "speedup": 1.5,
    "speedup_ci": (1.2, 1.8), "block_efficiency": 2.0,
    "block_efficiency_ci": None, "num_target_calls": 50,
    "acceptance_rate": 0.5, "expected_acceptance_rate": 0.6,
    "predicted_speedup": 1.4, "accept_counts": [15, 20, 15],
    "cut_counts": [0, 4, 1], "num_drafted": 100,
  }  # fmt: skip
  return known | more


def cost(system, depth=2, step=0.5, **more):
  """Rounds twice as dear as plain ones."""
  known = {
    "system": system, "batch_size": 1, "depth": depth, "doubts": [],
    "draft_cost": 0.4,
    "seconds": {
      "depth": depth, "step": step, "plain_step": 0.25, "nodes": depth + 1,
      "target": {"1": 0.2, "2": 0.25, "3": 0.3}, "draft": {"1": 0.1 / depth},
      "draft_passes": [1] * depth, "one_width": True,
      "proposal": None, "again": 0.2, "prefill": 1.0, "plain_prefill": 1.0,
    },
  }  # fmt: skip
  return known | more


def result(*, chosen="model(tokens=2)", **more):
  names = ("model(tokens=1)", "model(tokens=2)")
  return {
    "config": {"drafter": chosen},
    "systems": {n: {"parents": [-1, 0, 1][: i + 2]}
                for i, n in enumerate(names)},
    "runs": [
      row("plain", speedup=None, tokens_per_second=20.0),
      row(names[0], tokens_per_second=36.0, accept_counts=[20, 30],
          cut_counts=[0, 0], num_drafted=50, acceptance_rate=0.6),
      row(names[1], tokens_per_second=30.0),
    ],
    "costs": [cost(names[0], 1, 0.4), cost(names[1], **more)],
    "machine": {"processor": "P", "cores": 2, "backend": "cpu", "jax": "1"},
  }  # fmt: skip


def test_acceptance_by_position_excludes_truncated_rounds():
  done = [
    types.SimpleNamespace(origins=origins, accept_counts=[0] * 3)
    for origins in ([A, A, B, A, R, R, A, A], [A, R], [A])
  ]
  # Rounds of 2, 1, 0 and (cut) 2 accepted tokens, of 1, and of 1 that is cut.
  cut = measure._cut_counts(done)
  assert cut == [0, 1, 1]
  actual = explain.by_position({"accept_counts": [1, 3, 2], "cut_counts": cut})
  assert actual["tried"] == [6, 4]
  assert actual["conditional"] == [5 / 6, 2 / 4]
  assert actual["joint"] == pytest.approx([5 / 6, 5 / 12])


def test_predictions_match_hand_computed_values():
  (actual,) = explain.findings(result())
  efficiency = actual["block_efficiency"]
  # 46 tokens judged at the first position or the second, 50 of 81 accepted.
  alpha = (35 + 15) / (50 + 15 + 16)
  assert efficiency["acceptance"] == pytest.approx(alpha)
  assert efficiency["independent"] == pytest.approx(1 + alpha + alpha**2)
  assert efficiency["identity"] == pytest.approx(1 + 35 / 50 * (1 + 15 / 31))
  assert efficiency["rao_blackwell"] == pytest.approx(2 + 100 * 0.1 / 50)
  share = 0.5 * 5 / (0.5 * 5 + 1)
  expected = 28 / (1 + (2 / 2.2 - 1) * share)
  error = actual["tokens_per_second"]["prediction_error"]
  assert error == pytest.approx(expected / 30 - 1)
  # A round adds to its passes 0.05 s, as a plain one does, and 0.025 s a level.
  sweep, joint = actual["sweep"], [35 / 50]
  calls = throughput.expected_calls(joint, 10)
  seconds = calls * (0.05 + 0.05 + 0.025 + 0.25) + 1
  assert sweep["predicted"] == pytest.approx(
    {"1": 20 * (10 * 0.25 + 1) / seconds, "2": expected}
  )
  assert sweep["measured"] == {"1": 36.0, "2": 30.0}
  assert sweep["best_measured"] == 1
  # 1 + P + P^2 tokens must pay for two plain steps.
  least = actual["break_even_acceptance"]
  assert 1 + least + least**2 == pytest.approx(2)


def test_with_tokens_sets_or_removes_the_draft_length():
  assert explain.with_tokens('model("D", tokens=4, policy=survival)', 6) == (
    'model("D", policy=survival, tokens=6)'
  )
  assert explain.with_tokens("model(tokens=4)", None) == "model"
  ruled = "with_rule(with_widths(model(tokens=4), 3), block)"
  assert explain.with_tokens(ruled, 2) == ruled.replace("4", "2")
  assert explain.with_tokens(ruled, None) == (
    "with_rule(with_widths(model, 3), block)"
  )


def test_evaluate_explains_measured_prompts(
  cli, pair, tmp_path, monkeypatch, capfd
):
  """The target drafts for itself: all is accepted."""
  monkeypatch.setattr(costs, "WIDTHS", (1, 3))
  monkeypatch.setattr(explain, "SWEEP", (1,))
  texts = ["import os", "def f(x):", "import os"]  # one is there twice
  asked = files.write_jsonl(
    tmp_path / "p.jsonl", [{"id": i, "prompt": x} for i, x in enumerate(texts)]
  )
  out = tmp_path / "E.json"
  code = cli(
    evaluate.run, "--config.max_new_tokens=12", "--config.temperature=1.0",
    "--config.drafter=model(tokens=2)", f"--prompts={asked}", "--rounds=2",
    "--explain", f"--output={out}",
    config=f"configs/huggingface.py:target={pair[0]},draft={pair[0]}",
  )  # fmt: skip
  assert code == 0
  record = json.loads(out.read_text())
  assert {*record["systems"]} == {"plain", "model(tokens=2)", "model(tokens=1)"}
  assert record["questions"]["by_category"] == {"prompts": 2}
  assert [g["turns"][0]["questions"] for g in record["groups"]] == [[0], [1]]
  assert record["rounds"] == 2
  widths = {c["system"]: {*c["seconds"]["target"]} for c in record["costs"]}
  assert widths == {
    "model(tokens=2)": {"1", "3"}, "model(tokens=1)": {"1", "2"},
  }  # fmt: skip
  (one,) = record["explained"]
  assert one["num_speculative_tokens"] == 2
  assert one["acceptance_by_position"] == {
    "tried": [8, 8], "accepted": 16, "conditional": [1, 1], "joint": [1, 1],
  }  # fmt: skip
  tokens = one["block_efficiency"]
  for name in ("measured", "identity", "independent", "rao_blackwell"):
    assert tokens[name] == pytest.approx(3)
  assert {*one["sweep"]["measured"]} == {"1", "2"}
  plain, _, two = (r for r in record["runs"] if r["level"] == "all")
  assert np.isclose(
    two["speedup"], two["tokens_per_second"] / plain["tokens_per_second"]
  )
  page = (tmp_path / "E.md").read_text()
  assert "Every system answered everything 2 times" in page
  assert "By task and category" not in page
  assert "## Does speculation pay?" in page
  assert "(E-throughput.svg)" in page
  assert (tmp_path / "E-throughput.svg").exists()
  assert "timing rounds of model(tokens=1)" in capfd.readouterr().err
