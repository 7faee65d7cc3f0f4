"""Every number of a result, against what it is by hand."""

import copy

import evaluations
import pytest

from launch.evaluation import compare, page, summary
from specjax import intervals


def row(rows, system, category="all", level=None):
  (actual,) = [
    r for r in rows
    if (r["system"], r["category"]) == (system, category)
    and level in (None, r["level"])
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
  assert actual["accepted_by_position"] == pytest.approx([7 / 15, 5 / 15])
  assert actual["tokens_per_second"] == pytest.approx(28 / 6)
  assert actual["speedup"] == pytest.approx((28 / 6) / (28 / 9))
  assert actual["identical_to_plain"] == pytest.approx(3 / 4)
  assert actual["identical_to_hf"] is None
  plain = row(rows, "plain")
  assert plain["block_efficiency"] == 1
  assert plain["tokens_per_second"] == pytest.approx(28 / 9)
  assert plain["speedup"] is None
  assert plain["accepted_by_position"] is None


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
  for name in ("block_efficiency_request_mean", "accepted_by_position",
               "predicted_speedup", "seconds_per_token"):  # fmt: skip
    assert actual[name] is None, name


def test_a_group_with_all_its_turns_is_the_unit_of_the_paired_interval():
  rows = summary.rows_of(evaluations.thrice(), [])
  actual = row(rows, "ngram")
  low, high = intervals.interval(
    [[20, 8] * 3, [7.0, 2.0] * 3], [[3.5, 2.5] * 3, [20, 8] * 3]
  )
  assert actual["speedup_ci"] == pytest.approx((low, high))
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


def test_the_times_of_the_first_token_and_of_the_next_ones():
  actual = row(summary.rows_of(evaluations.example(), []), "ngram")
  assert actual["time_to_first_token"] == pytest.approx(0.5)
  # The shorter row of the first batch took part in two of the three rounds
  # after the first, and each row emitted a token less than it has.
  seconds = 1.5 * 3 / 3 + 1.5 * 2 / 3 + 1.0 + 2.0
  assert actual["seconds_per_token"] == pytest.approx(seconds / (9 + 3 + 5 + 7))


def test_the_prediction_is_made_of_the_rounds_cost_and_of_the_rounds():
  costs = [cost_of("ngram", 1.2)]
  rows = summary.rows_of(evaluations.example(), costs)
  # A plain round takes 3.75 / 10, 2.75 / 6 and 1.75 / 8 seconds in the turns.
  seconds = 0.5 + 2 * 0.25 + 1.2 * (4 * 0.375 + 3 * 2.75 / 6 + 5 * 1.75 / 8)
  assert row(rows, "ngram")["predicted_speedup"] == pytest.approx(9 / seconds)
  assert row(rows, "plain")["predicted_speedup"] is None
  wider = [one | {"batch_size": 8} for one in evaluations.example()]
  other = summary.rows_of(wider, costs)  # of another batch size
  assert row(other, "ngram")["predicted_speedup"] is None


def test_of_timings_that_disagree_nothing_is_predicted():
  cost = cost_of("ngram", 0.89) | {
    "doubts": ["laws took -3.10 ms of a round"], "draft_cost": 0.1,
  }  # fmt: skip
  rows = summary.rows_of(evaluations.example(), [cost])
  assert row(rows, "ngram")["predicted_speedup"] is None
  kinds = {"rule": "token", "lossless": True, "draft_shape": "chain of 2",
           "dtype": "float32"}  # fmt: skip
  result = {
    "runs": rows, "costs": [cost],
    "systems": {"plain": kinds | {"lossless": None}, "ngram": kinds},
  }  # fmt: skip
  told, plain = page.over_all(result).splitlines()[:1:-1]
  assert "| none: timings disagree |" in told
  assert "disagree" not in plain
  head, _, plain, told = page._systems(result).splitlines()[:4]
  assert head.endswith("| timings that disagree |")
  assert told.endswith("| laws took -3.10 ms of a round |")
  sound = result | {"costs": [cost | {"doubts": []}]}
  assert "disagree" not in page._systems(sound).splitlines()[0]


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
  assert actual["fed_per_round"] == pytest.approx(51 / 12)


def test_a_prediction_with_true_costs_is_what_was_measured():
  some = evaluations.example()
  for one in some:
    for turn in one["turns"]:
      plain, actual = turn["systems"]["plain"], turn["systems"]["ngram"]
      each = (plain["seconds"] - 0.25) / plain["rounds"]
      actual["seconds"] = (
        actual["prefill_seconds"] + 1.3 * each * actual["rounds"]
      )
  costs = [cost_of("ngram", 1.3)]
  for actual in summary.rows_of(some, costs):
    if actual["system"] == "ngram":
      assert actual["predicted_speedup"] == pytest.approx(actual["speedup"])
      assert actual["prediction_error"] == pytest.approx(0)


def test_a_prediction_s_error_has_an_interval_over_groups():
  costs = [cost_of("ngram", 1.2)]
  actual = row(summary.rows_of(evaluations.thrice(), costs), "ngram")
  error = actual["predicted_speedup"] / actual["speedup"] - 1
  assert actual["prediction_error"] == pytest.approx(error)
  seconds = [0.5 + 0.25 + 1.2 * (4 * 0.375 + 3 * 2.75 / 6),
             0.25 + 1.2 * 5 * 1.75 / 8]  # fmt: skip
  low, high = intervals.interval([[3.5, 2.5] * 3], [seconds * 3])
  assert actual["prediction_error_ci"] == pytest.approx([low - 1, high - 1])


def test_what_transformers_does_not_tell_is_none():
  some = evaluations.example()
  for one in some:
    for turn in one["turns"]:
      turn["systems"]["hf"] = turn["systems"]["plain"] | {
        "prefill_seconds": None, "total_variation": None,
      }  # fmt: skip
  actual = row(summary.rows_of(some, []), "hf")
  for name in ("acceptance_rate", "accept_counts", "accepted_by_position",
               "total_variation", "predicted_speedup"):  # fmt: skip
    assert actual[name] is None
  assert actual["speedup"] == 1


# ------------------------------------------------------------------ comparing


def changed():
  """The same again: more calls for question 3, ngram half as fast."""
  after = evaluations.thrice()
  for one in after:
    for turn in one["turns"]:
      turn["systems"]["ngram"]["seconds"] *= 2
  after[1]["turns"][0]["systems"]["ngram"]["calls"] = [8]
  return after


def test_comparing_pairs_questions_and_groups():
  before, after = {"groups": evaluations.thrice()}, {"groups": changed()[::-1]}
  rows = compare.compare(before, after)
  actual = row(rows, "ngram")
  assert actual["num_questions"] == 9
  assert actual["block_efficiency_change"] == pytest.approx((1 - 8 / 5) / 9)
  assert actual["block_efficiency_change_ci"] == pytest.approx(
    intervals.mean_interval([*[0] * 8, 1 - 8 / 5])
  )
  assert actual["speedup_ratio"] == pytest.approx(0.5)
  # Every group's ratio is the same: nothing is uncertain.
  assert actual["speedup_ratio_ci"] == pytest.approx((0.5, 0.5))
  assert row(rows, "ngram", "math", "task")["block_efficiency_change"] == 0
  # A category that is all of its task has no row of its own.
  assert not [r for r in rows if r["level"] == "category"]
  assert not [r for r in rows if r["system"] == "plain"]
  assert "| `ngram` | 0 | 2 | all | 9 | -0.067 (" in compare.table(rows)
  few = compare.compare(
    {"groups": evaluations.example()}, {"groups": evaluations.example()}
  )
  assert "| all | 3 | +0.000 | 1.000 |" in compare.table(few)


def test_one_system_over_another_is_the_ratio_of_their_rates():
  groups = evaluations.thrice()
  rows = compare.among({"groups": groups}, "ngram")
  rates = {
    r["system"]: r["tokens_per_second"]
    for r in summary.rows_of(groups, [])
    if r["level"] == "all"
  }
  actual = row(rows, "plain")
  assert actual["speedup_ratio"] == pytest.approx(
    rates["plain"] / rates["ngram"]
  )
  assert actual["speedup_ratio_ci"][0] < actual["speedup_ratio"]
  assert actual["block_efficiency_change"] < 0
  assert not [r for r in rows if r["system"] == "ngram"]
  with pytest.raises(ValueError, match="no system 'hf' beside others"):
    compare.among({"groups": groups}, "hf")


def test_only_groups_of_the_same_questions_are_compared():
  after = changed()
  after[0]["turns"][1]["questions"] = [2]
  before = {"groups": evaluations.example()}
  rows = compare.compare(before, {"groups": after})
  actual = row(rows, "ngram")
  assert actual["num_questions"] == 1
  after[1]["batch_size"] = 8
  with pytest.raises(ValueError, match="no group of questions in common"):
    compare.compare({"groups": evaluations.example()}, {"groups": after})


def test_results_without_a_common_system_are_refused():
  after = evaluations.example()
  for one in after:
    for turn in one["turns"]:
      turn["systems"]["other"] = turn["systems"].pop("ngram")
  with pytest.raises(ValueError, match="no system in common"):
    compare.compare({"groups": evaluations.example()}, {"groups": after})
