"""Every number of a result, against what it is by hand."""

import pytest

from launch.evaluation import intervals, summary


def part(seconds, tokens, calls, **more):
  """A system's numbers on a turn."""
  known = {
    "seconds": seconds, "first_seconds": 0.5, "prefill_seconds": 0.25,
    "rounds": max(calls), "fed": 3 * max(calls), "tokens": tokens,
    "calls": calls, "drafted": None,
    "accepted": None, "accept_counts": None, "total_variation": 0.0,
  }  # fmt: skip
  return known | more


def turn(questions, **systems):
  """A turn of a group."""
  return {
    "questions": questions, "prompt_tokens": [9] * len(questions),
    "refused": [], "systems": systems, "differences": [],
  }  # fmt: skip


def group(category, *turns, temperature=0.0, batch_size=2, task=None):
  """A group's record."""
  ids = ",".join(map(str, turns[0]["questions"]))
  return {
    "batch": f"T={temperature:g} B={batch_size} {ids}",
    "temperature": temperature, "batch_size": batch_size, "category": category,
    "task": task or category, "turns": list(turns),
    "compile_seconds": {"plain": 1.0, "ngram": 2.0},
  }  # fmt: skip


def example():
  """Two groups; the first has two turns, and only one question the second."""
  ngram = dict(
    prefill_seconds=0.5, drafted=[12, 6], accepted=[6, 0],
    accept_counts=[4, 0, 3],
  )  # fmt: skip
  return [
    group(
      "math",
      turn(
        [1, 2],
        plain=part(4.0, [10, 4], [10, 4]),
        ngram=part(2.0, [10, 4], [4, 3], **ngram,
                   identical_to_plain=[True, False]),
      ),
      turn(
        [1],
        plain=part(3.0, [6], [6]),
        ngram=part(1.5, [6], [3], drafted=[6], accepted=[3],
                   accept_counts=[1, 1, 1], identical_to_plain=[True]),
      ),
    ),
    group(
      "code",
      turn(
        [3],
        plain=part(2.0, [8], [8]),
        ngram=part(2.5, [8], [5], drafted=[10], accepted=[3],
                   accept_counts=[3, 1, 1], identical_to_plain=[True]),
      ),
    ),
  ]  # fmt: skip


def thrice():
  """The example of nine questions, in six groups: enough for an interval."""
  groups = []
  for number in range(3):
    for one in example():
      for part in one["turns"]:
        part["questions"] = [3 * number + q for q in part["questions"]]
      groups.append(one | {"batch": f"{one['batch']} {number}"})
  return groups


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


def test_rates_divide_counts_summed_over_turns():
  rows = summary.rows_of(example(), [])
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


def test_paired_intervals_use_whole_groups_as_units():
  rows = summary.rows_of(thrice(), [])
  actual = row(rows, "ngram")
  expected = intervals.ratio(
    "x", [[20, 8] * 3, [7.0, 2.0] * 3], [[3.5, 2.5] * 3, [20, 8] * 3]
  )
  assert actual["speedup_ci"] == pytest.approx(expected["x_ci"])
  one = row(rows, "ngram", "math", "task")
  assert one["num_groups"] == 3
  assert one["speedup_ci"] is None  # of three groups too little is known


def test_predicted_speedup_combines_round_costs_and_round_counts():
  costs = [cost_of("ngram", 1.2)]
  rows = summary.rows_of(thrice(), costs)
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
  wider = [one | {"batch_size": 8} for one in example()]
  other = summary.rows_of(wider, costs)  # of another batch size
  assert row(other, "ngram")["predicted_speedup"] is None
