"""Every number of a result, against what it is by hand."""

import copy

import evaluations
import pytest

from launch.evaluation import intervals, page, summary


def row(rows, system, category="all", level=None):
  (actual,) = [
    r for r in rows
    if (r["system"], r.get("category", r.get("task"))) == (system, category)
    and level in (None, r.get("level"))
  ]  # fmt: skip
  return actual


def cost_of(system, round_cost, fed_cost=0.0):
  """Rounds of so many plain ones, timed where they fed three tokens each."""
  return {
    "batch_size": 2, "system": system, "round_cost": round_cost,
    "round_fed": 3.0, "fed_cost": fed_cost, "doubts": [],
  }  # fmt: skip


def test_counts_are_summed_over_turns_before_they_are_divided():
  rows = summary.rows_of(evaluations.example(), [])
  actual = row(rows, "ngram")
  assert (actual["num_questions"], actual["num_requests"]) == (3, 4)
  assert actual["num_groups"] == 2
  assert (actual["num_tokens"], actual["num_target_calls"]) == (28, 15)
  assert actual["block_efficiency"] == pytest.approx(28 / 15)
  assert actual["block_efficiency_request_mean"] == pytest.approx(
    (10 / 4 + 4 / 3 + 6 / 3 + 8 / 5) / 4
  )
  assert actual["acceptance_rate"] == pytest.approx(12 / 34)
  assert actual["accept_counts"] == [8, 2, 5]
  assert actual["tokens_per_second"] == pytest.approx(28 / 6)
  assert actual["speedup"] == pytest.approx((28 / 6) / (28 / 9))
  assert actual["identical_to_plain"] == pytest.approx(3 / 4)
  assert actual["time_to_first_token"] == pytest.approx(0.5)
  plain = row(rows, "plain")
  assert plain["block_efficiency"] == 1
  assert plain["tokens_per_second"] == pytest.approx(28 / 9)
  assert plain["speedup"] is None
  assert plain["accept_counts"] is None


def test_an_answer_that_nan_ended_at_once_counts_for_nothing():
  """No call is counted of its only round."""
  records = evaluations.example()
  first = records[0]["turns"][0]["systems"]["ngram"]
  first |= {"tokens": [0, 4], "calls": [0, 3], "accept_counts": [3, 0, 0]}
  actual = row(summary.rows_of(records, []), "ngram")
  assert actual["num_requests"] == 4
  assert actual["block_efficiency_request_mean"] == pytest.approx(
    (4 / 3 + 6 / 3 + 8 / 5) / 3
  )
  for record in records:
    for turn in record["turns"]:
      for name in turn["systems"]:
        count = len(turn["questions"])
        turn["systems"][name] |= {
          "tokens": [0] * count, "calls": [0] * count, "rounds": 0, "fed": 0,
          "accept_counts": [0, 0, 0],
        }  # fmt: skip
  costs = [cost_of("ngram", 1.1)]
  actual = row(summary.rows_of(records, costs), "ngram")
  assert actual["block_efficiency_request_mean"] is None
  assert actual["predicted_speedup"] is None


def test_a_group_with_all_its_turns_is_the_unit_of_the_paired_interval():
  rows = summary.rows_of(evaluations.thrice(), [])
  actual = row(rows, "ngram")
  expected = intervals.ratio(
    "x", [[20, 8] * 3, [7.0, 2.0] * 3], [[3.5, 2.5] * 3, [20, 8] * 3]
  )
  assert actual["speedup_ci"] == pytest.approx(expected["x_ci"])
  one = row(rows, "ngram", "math", "task")
  assert one["num_groups"] == 3
  assert one["speedup_ci"] is None  # of three groups too little is known


def test_rows_are_for_all_for_tasks_and_for_categories_of_each_setting():
  some = evaluations.example()
  for one in some:
    one["task"] = "talk"
  other = copy.deepcopy(some[:1])
  other[0]["temperature"] = 1.0
  rows = summary.rows_of(some + other, [])
  of = lambda temperature: [
    (r["level"], r["category"])
    for r in rows
    if r["temperature"] == temperature and r["system"] == "ngram"
  ]
  assert of(0.0) == [
    ("all", "all"), ("task", "talk"), ("category", "math"),
    ("category", "code"),
  ]  # fmt: skip
  assert of(1.0) == [("all", "all"), ("task", "talk"), ("category", "math")]
  assert row(rows, "ngram", "code")["speedup"] == pytest.approx(2.0 / 2.5)


def test_the_prediction_is_made_of_the_rounds_cost_and_of_the_rounds():
  costs = [cost_of("ngram", 1.2)]
  rows = summary.rows_of(evaluations.thrice(), costs)
  actual = row(rows, "ngram")
  # A plain round takes 3.75 / 10, 2.75 / 6 and 1.75 / 8 seconds in the turns.
  seconds = [0.5 + 0.25 + 1.2 * (4 * 0.375 + 3 * 2.75 / 6),
             0.25 + 1.2 * 5 * 1.75 / 8]  # fmt: skip
  predicted = actual["predicted_speedup"]
  assert predicted == pytest.approx(9 / sum(seconds))
  error = predicted / actual["speedup"] - 1
  assert actual["prediction_error"] == pytest.approx(error)
  low, high = intervals.ratio("x", [[3.5, 2.5] * 3], [seconds * 3])["x_ci"]
  assert actual["prediction_error_ci"] == pytest.approx([low - 1, high - 1])
  assert row(rows, "plain")["predicted_speedup"] is None
  wider = [one | {"batch_size": 8} for one in evaluations.example()]
  other = summary.rows_of(wider, costs)  # of another batch size
  assert row(other, "ngram")["predicted_speedup"] is None


def test_rounds_that_fed_more_than_where_they_were_timed_cost_more():
  """Of 12 rounds in three turns, which fed 24, 12 and 15 tokens."""
  some = evaluations.example()
  widths = iter([24, 12, 15])
  for one in some:
    for turn in one["turns"]:
      turn["systems"]["ngram"]["fed"] = next(widths)
  rows = summary.rows_of(some, [cost_of("ngram", 1.2, fed_cost=0.1)])
  seconds = 0.5 + 2 * 0.25 + 1.2 * (4 * 0.375 + 3 * 2.75 / 6 + 5 * 1.75 / 8)
  seconds += 0.1 * ((24 - 12) * 0.375 + (12 - 9) * 2.75 / 6)
  actual = row(rows, "ngram")
  assert actual["predicted_speedup"] == pytest.approx(9 / seconds)


def test_of_inconsistent_timings_nothing_is_predicted():
  doubts = ["laws took -3.10 ms of a round"]
  cost = cost_of("ngram", 0.89) | {"doubts": doubts, "draft_cost": 0.1}
  rows = summary.rows_of(evaluations.example(), [cost])
  assert row(rows, "ngram")["predicted_speedup"] is None
  kinds = {"rule": "token", "lossless": True, "draft_shape": "chain of 2"}
  result = {
    "runs": rows, "costs": [cost],
    "systems": {"plain": kinds | {"rule": None}, "ngram": kinds},
  }  # fmt: skip
  shown, plain = page.over_all(result).splitlines()[:1:-1]
  assert "| none: inconsistent timings |" in shown
  assert "inconsistent" not in plain
  said = f"`ngram` at batch size 2 nothing is predicted: {doubts[0]}."
  assert said in page._systems(result)


def test_what_transformers_does_not_report_is_none():
  some = evaluations.example()
  for one in some:
    for turn in one["turns"]:
      turn["systems"]["hf"] = turn["systems"]["plain"] | {
        "prefill_seconds": None, "total_variation": None,
      }  # fmt: skip
  actual = row(summary.rows_of(some, []), "hf")
  for name in ("acceptance_rate", "accept_counts", "total_variation",
               "predicted_speedup"):  # fmt: skip
    assert actual[name] is None
  assert actual["speedup"] == 1
