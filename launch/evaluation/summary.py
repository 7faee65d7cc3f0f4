"""Summarizes records of groups as rows by category, by task and overall.

A *request* is one turn of a question. Counts are summed over requests before
division. Seconds belong to groups, so a group, with all turns of its questions,
is the unit of every interval; at batch size 1 it is one question.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch.assembly.pair import Pair
from launch.evaluation import intervals
from launch.evaluation.systems import PLAIN, System

LEVELS = ("all", "task", "category")


def describe(
  compared: Sequence[System], pairs: Mapping[str, Pair]
) -> dict[str, dict]:
  """Describes each system: its rule and the shape of its drafts."""
  described = {}
  for system in compared:
    one: dict[str, Any] = {
      "dtype": system.config.dtype, "rule": None, "lossless": None,
      "draft_shape": None, "parents": None,
    }  # fmt: skip
    if system.drafting and system.drafting.drafts:
      pair = pairs[system.name]
      tree, lengths = pair.decoder.drafter.tree, pair.drafting.lengths
      shape = f"tree of {tree.num_nodes} nodes, {tree.max_depth} deep"
      if tree.is_chain:
        shape = f"chain of {tree.max_depth}"
      if lengths:
        shape = f"chains of {', '.join(map(str, lengths))}"
      one |= {
        "rule": pair.decoder.rule.name, "lossless": pair.decoder.rule.lossless,
        "draft_shape": shape, "parents": list(tree.parents),
        "weights": list(pair.notes),
      }  # fmt: skip
    elif system.reference and system.reference.tokens:
      one["draft_shape"] = f"chain of {system.reference.tokens}"
    described[system.name] = one
  return described


def result_of(
  records: Sequence[dict], facts: Mapping[str, Any]
) -> dict[str, Any]:
  """The contents of E.json: the rows of the summary and their raw data.

  Records are of groups and of costs (`measure.measure_all`); facts are known
  before anything is measured, such as the prompts `refused`.
  """
  groups = [record for record in records if "turns" in record]
  timed = [record for record in records if "turns" not in record]
  seconds: dict[str, float] = collections.defaultdict(float)
  refused, differences = list(facts["refused"]), []
  for record in groups:
    for name, value in record["compile_seconds"].items():
      seconds[name] += value
    where = {n: record[n] for n in ("temperature", "batch_size")}
    for turn in record["turns"]:
      refused += [r | where for r in turn["refused"]]
      differences += [d | where for d in turn.get("differences", ())]
  return {
    **facts,
    "refused": refused,
    "compile_seconds": dict(seconds),
    "runs": rows_of(groups, timed),
    "costs": timed,
    "differences": differences,
    "groups": groups,
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A turn's record, with the numbers of a system and of plain decoding."""

  turn: dict
  numbers: dict
  plain: dict


def rows_of(records: Sequence[dict], costs: Sequence[dict]) -> list[dict]:
  """A row per setting, level of LEVELS, category and system; see `_row`.

  At level "task", `category` is the task's name.
  """
  known = {(c["batch_size"], c["system"]): c for c in costs}
  parts: dict[tuple, list[dict]] = {}
  for level in LEVELS:
    for record in records:
      category = "all" if level == "all" else record[level]
      setting = (record["temperature"], record["batch_size"])
      parts.setdefault((*setting, level, category), []).append(record)
  return [
    {
      "system": system, "temperature": temperature, "batch_size": batch_size,
      "level": level, "category": category,
      **_row(some, system, known.get((batch_size, system))),
    }
    for (temperature, batch_size, level, category), some in parts.items()
    for system in sorted(
      set.union(*map(systems_of, some)), key=lambda name: (name != PLAIN, name)
    )
  ]  # fmt: skip


def systems_of(record: Mapping) -> set[str]:
  """The systems that answered."""
  return {name for turn in record["turns"] for name in turn["systems"]}


def entries(record: Mapping, system: str) -> Iterator[Entry]:
  """A system's turns in a group."""
  for turn in record["turns"]:
    if system in turn["systems"]:
      yield Entry(
        turn=turn, numbers=turn["systems"][system], plain=turn["systems"][PLAIN]
      )


def unit_of(record: Mapping, system: str) -> intervals.Unit:
  """A group as the unit of intervals: sums over its turns and rows."""
  every = list(entries(record, system))
  total = lambda name: sum(sum(e.numbers.get(name) or ()) for e in every)
  return intervals.Unit(
    num_tokens=total("tokens"),
    num_target_calls=total("calls"),
    num_drafted=total("drafted"),
    num_accepted=total("accepted"),
    expected_accepted=total("expected"),
    total_variation=intervals.sum_known(
      e.numbers["total_variation"] for e in every
    ),
    seconds=sum(e.numbers["seconds"] for e in every),
    baseline_num_tokens=sum(sum(e.plain["tokens"]) for e in every),
    baseline_num_target_calls=sum(sum(e.plain["calls"]) for e in every),
    baseline_seconds=sum(e.plain["seconds"] for e in every),
  )


def _row(records: Sequence[dict], system: str, cost: dict | None) -> dict:
  """A system's row for some groups of one setting (docs/pay.md).

  `accept_counts[i]` is the number of target calls that emitted i drafted
  tokens, `cut_counts[i]` of those that were cut before the target's own token,
  and `prediction_error` the predicted over the measured speed-up, minus 1.
  Unknown numbers are None.
  """
  units = [unit_of(record, system) for record in records]
  every = [e for record in records for e in entries(record, system)]
  counts = _summed(every, "accept_counts")
  of_units = intervals.summarize(
    units, max_depth=len(counts) - 1 if counts else math.inf
  )
  is_plain = system == PLAIN
  drafted = of_units["num_drafted"] if counts else None
  reported = all(e.numbers.get("expected") is not None for e in every)
  expected = of_units["expected_acceptance_rate"] if reported else None
  requests = [
    pair
    for e in every
    for pair in zip(e.numbers["tokens"], e.numbers["calls"], strict=True)
  ]
  # There are no calls if NaN logits ended the first round.
  rates = [tokens / calls for tokens, calls in requests if calls]
  same = [x for e in every for x in e.numbers.get("identical_to_plain", ())]
  return {
    "num_questions": len({q for e in every for q in e.turn["questions"]}),
    "num_requests": len(requests),
    "num_groups": len(records),
    "num_tokens": of_units["num_tokens"],
    "num_target_calls": of_units["num_target_calls"],
    "num_drafted": drafted,
    "block_efficiency": of_units["block_efficiency"],
    "block_efficiency_ci": of_units["block_efficiency_ci"],
    "block_efficiency_request_mean": statistics.fmean(rates) if rates else None,
    "acceptance_rate": of_units["acceptance_rate"],
    "expected_acceptance_rate": expected,
    "accept_counts": counts,
    "cut_counts": _summed(every, "cut_counts"),
    **intervals.ratio(
      "tokens_per_second",
      [[unit.num_tokens for unit in units]],
      [[unit.seconds for unit in units]],
    ),
    "speedup": None if is_plain else of_units["speedup"],
    "speedup_ci": None if is_plain else of_units["speedup_ci"],
    **_predicted(records, system, cost, of_units["speedup"]),
    "time_to_first_token": statistics.fmean(
      e.numbers["first_seconds"] for e in every for _ in e.numbers["tokens"]
    ),
    "total_variation": of_units["total_variation"],
    "identical_to_plain": sum(same) / len(same) if same else None,
  }


def _summed(every: Sequence[Entry], name: str) -> list[int] | None:
  if any(e.numbers.get(name) is None for e in every):
    return None
  return [sum(c) for c in zip(*(e.numbers[name] for e in every), strict=True)]


def _predicted_seconds(every: Sequence[Entry], cost: Mapping) -> float:
  """Predicted seconds, from the cost of a round and the number of rounds.

  A turn takes its measured prefill plus its rounds, each of which is the timed
  multiple of a plain round of that turn, corrected for the width of its passes.
  """
  seconds = 0.0
  for e in every:
    plain_rounds = e.plain["seconds"] - e.plain["prefill_seconds"]
    rounds = e.numbers["rounds"]
    more = e.numbers["fed"] - rounds * cost["round_fed"]
    cost_in_rounds = rounds * cost["round_cost"] + more * cost["fed_cost"]
    seconds += e.numbers["prefill_seconds"]
    seconds += plain_rounds / max(e.plain["rounds"], 1) * cost_in_rounds
  return seconds


def _predicted(
  records: Sequence[dict], system: str, cost: dict | None, speedup: float | None
) -> dict[str, Any]:
  """The speed-up that costs predict, and its error.

  Both are None if unknown, or if timings are inconsistent.
  """
  names = ("predicted_speedup", "prediction_error", "prediction_error_ci")
  if cost is None or cost.get("doubts") or not speedup:
    return dict.fromkeys(names)
  units = [unit_of(record, system).seconds for record in records]
  predicted = [
    _predicted_seconds(list(entries(record, system)), cost)
    for record in records
  ]
  found = intervals.ratio("error", [units], [predicted])
  error, ends = found["error"] - 1, found["error_ci"]
  values = speedup * (1 + error), error, ends and [end - 1 for end in ends]
  return dict(zip(names, values, strict=True))
