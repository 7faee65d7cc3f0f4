"""Summarises records of groups: rows by category, by task and over all.

A *request* is one turn of a question. Counts are summed over requests before
they are divided. Seconds are those of groups, so a group is the unit of every
interval, all turns of its questions together; at batch size 1 it is a
question.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from launch.evaluation import experts
from launch.evaluation.systems import HF, PLAIN
from specjax import intervals

LEVELS = ("all", "task", "category")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A system's turn of a group beside plain decoding's turn of it.

  Attributes:
    turn: the turn's part of the record.
    numbers, plain: the two systems' parts of that.
  """

  turn: dict
  numbers: dict
  plain: dict


def rows_of(
  records: Sequence[dict], costs: Sequence[dict], counted: dict | None = None
) -> list[dict]:
  """The rows of a result: a system in a setting on some of the questions.

  Args:
    records: of groups, see `measure.measure`.
    costs: see `costs.measure_costs`.
    counted: see `experts.facts`, if experts were counted.

  Returns:
    A row for each setting, level, category and system: see `_row`, and
    `experts.row`.
  """
  known = {(c["batch_size"], c["system"]): c for c in costs}
  rows = []
  for (temperature, batch_size), of_setting in _by(
    records, "temperature", "batch_size"
  ).items():
    for level in LEVELS:
      names = (level,) if level != "all" else ()
      for key, some in _by(of_setting, *names).items():
        for system in _systems(some):
          rows.append(
            {
              "system": system,
              "temperature": temperature,
              "batch_size": batch_size,
              "level": level,
              "category": key[0] if key else "all",
              **_row(some, system, known.get((batch_size, system))),
              **experts.row(
                [e.numbers for record in some for e in entries(record, system)],
                batch_size, counted,
              ),
            }
          )  # fmt: skip
  return rows


def _by(records: Sequence[dict], *names: str) -> dict[tuple, list[dict]]:
  """Records by their values of some fields, in the order they come in."""
  grouped = collections.defaultdict(list)
  for record in records:
    grouped[tuple(record[name] for name in names)].append(record)
  return dict(grouped)


def _systems(records: Sequence[dict]) -> list[str]:
  """Systems that answered, plain decoding first, then by name."""
  names = {n for r in records for turn in r["turns"] for n in turn["systems"]}
  return sorted(names, key=lambda name: (name != PLAIN, name))


def entries(record: dict, system: str) -> Iterator[Entry]:
  """A system's turns of a group."""
  for turn in record["turns"]:
    if system in turn["systems"]:
      yield Entry(
        turn=turn, numbers=turn["systems"][system], plain=turn["systems"][PLAIN]
      )


def unit_of(record: dict, system: str) -> intervals.Unit:
  """A group as the unit of intervals: sums over its turns and rows."""
  every = list(entries(record, system))
  total = lambda name: sum(sum(e.numbers[name] or ()) for e in every)
  given = lambda e: sum(e.numbers.get("expected") or ())
  return intervals.Unit(
    num_tokens=total("tokens"),
    num_target_calls=total("calls"),
    num_drafted=total("drafted"),
    num_accepted=total("accepted"),
    expected_accepted=sum(map(given, every)),
    total_variation=intervals.sum_known(
      e.numbers["total_variation"] for e in every
    ),
    seconds=sum(e.numbers["seconds"] for e in every),
    baseline_num_tokens=sum(sum(e.plain["tokens"]) for e in every),
    baseline_num_target_calls=sum(sum(e.plain["calls"]) for e in every),
    baseline_seconds=sum(e.plain["seconds"] for e in every),
  )


def _row(records: Sequence[dict], system: str, cost: dict | None) -> dict:
  """A system's row for some groups of one setting.

  Returns:
    `block_efficiency` is emitted tokens per target call, bonus tokens included,
    of all requests together, and `block_efficiency_request_mean` the mean of
    the requests' own. `accepted_by_position[i]` is the share of target calls
    that emitted more than i drafted tokens, `accept_counts[i]` the number of
    those that emitted i, and `cut_counts[i]` of those that ended before the
    target's own token. `rounds_by_length` are a ladder's rounds by how many
    tokens they drafted, None without one. `fed_per_round` is how many tokens
    wide the target's passes were. `time_to_first_token` is the mean over
    requests of the seconds until the first round was over, `seconds_per_token`
    what each token after the first took. `prediction_error` is the predicted
    speed-up over the measured one, less 1. `_ci` are 95% intervals over groups;
    what cannot be known is None.
  """
  units = [unit_of(record, system) for record in records]
  every = [e for record in records for e in entries(record, system)]
  counts = _accept_counts(every)
  of_units = intervals.summarize(
    units, max_depth=len(counts) - 1 if counts else math.inf
  )
  is_plain = system == PLAIN
  prediction = _predicted(records, system, cost, of_units["speedup"])
  told = all(e.numbers.get("expected") is not None for e in every)
  rates = [
    tokens / calls
    for e in every
    for tokens, calls in zip(
      e.numbers["tokens"], e.numbers["calls"], strict=True
    )
    if calls  # none is counted where NaN logits ended the first round
  ]
  first = [
    e.numbers["first_seconds"] for e in every for _ in e.numbers["tokens"]
  ]
  return {
    "num_questions": len(
      {question for e in every for question in e.turn["questions"]}
    ),
    "num_requests": sum(len(e.numbers["tokens"]) for e in every),
    "num_groups": len(records),
    "num_tokens": of_units["num_tokens"],
    "num_target_calls": of_units["num_target_calls"],
    "num_drafted": of_units["num_drafted"] if counts else None,
    "block_efficiency": of_units["block_efficiency"],
    "block_efficiency_ci": of_units["block_efficiency_ci"],
    "block_efficiency_request_mean": statistics.fmean(rates) if rates else None,
    "fed_per_round": _fed(every),
    "acceptance_rate": of_units["acceptance_rate"],
    "expected_acceptance_rate": of_units["expected_acceptance_rate"]
    if told
    else None,
    "accepted_by_position": _by_position(counts),
    "accept_counts": counts,
    "cut_counts": _accept_counts(every, "cut_counts"),
    "rounds_by_length": _by_length(every),
    "seconds": of_units["seconds"],
    **intervals.ratio(
      "tokens_per_second",
      [[unit.num_tokens for unit in units]],
      [[unit.seconds for unit in units]],
    ),
    "speedup": None if is_plain else of_units["speedup"],
    "speedup_ci": None if is_plain else of_units["speedup_ci"],
    **prediction,
    "time_to_first_token": statistics.fmean(first),
    "seconds_per_token": _seconds_per_token(every),
    "total_variation": of_units["total_variation"],
    **{
      f"identical_to_{other}": _share(every, f"identical_to_{other}")
      for other in (PLAIN, HF)
    },
  }


def _fed(every: Sequence[Entry]) -> float | None:
  rounds = sum(e.numbers["rounds"] for e in every)
  if not rounds or any(e.numbers["fed"] is None for e in every):
    return None
  return sum(e.numbers["fed"] for e in every) / rounds


def _accept_counts(
  every: Sequence[Entry], name: str = "accept_counts"
) -> list[int] | None:
  if any(e.numbers.get(name) is None for e in every):
    return None
  columns = zip(*(e.numbers[name] for e in every), strict=True)
  return [sum(column) for column in columns]


def _by_length(every: Sequence[Entry]) -> dict[str, int] | None:
  parts = [e.numbers.get("rounds_by_length") for e in every]
  if not all(parts):
    return None
  return {n: sum(part[n] for part in parts) for n in parts[0]}


def _by_position(counts: Sequence[int] | None) -> list[float] | None:
  """Share of calls that emitted 1 or more drafted tokens, 2 or more, ..."""
  if not counts or not sum(counts):
    return None
  return [sum(counts[i:]) / sum(counts) for i in range(1, len(counts))]


def _seconds_per_token(every: Sequence[Entry]) -> float | None:
  """Seconds after the first round for each token after the first one.

  A row of a batch has its share of the time after the first round: that of the
  rounds which it took part in.
  """
  seconds, tokens = 0.0, 0
  for e in every:
    rest = e.numbers["seconds"] - e.numbers["first_seconds"]
    for count, calls in zip(
      e.numbers["tokens"], e.numbers["calls"], strict=True
    ):
      if calls:
        seconds += rest * (calls - 1) / max(e.numbers["rounds"] - 1, 1)
        tokens += count - 1
  return seconds / tokens if tokens else None


def _share(every: Sequence[Entry], name: str) -> float | None:
  same = [one for e in every for one in e.numbers.get(name, ())]
  return sum(same) / len(same) if same else None


def predicted_seconds(every: Sequence[Entry], cost: dict) -> float:
  """Seconds that follow from a round's cost and the rounds there were.

  A turn should take the prompts' pass, as long as it took, and its rounds, each
  so many times a plain round of the same turn as was timed apart, where passes
  were as wide as there.

  Args:
    every: turns of one system and setting.
    cost: `round_cost`, `round_fed` and `fed_cost` of `costs.measure_costs`.
  """
  seconds = 0.0
  for e in every:
    plain_rounds = e.plain["seconds"] - e.plain["prefill_seconds"]
    plain_round = plain_rounds / max(e.plain["rounds"], 1)
    seconds += e.numbers["prefill_seconds"]
    rounds = e.numbers["rounds"]
    more = e.numbers["fed"] - rounds * cost["round_fed"]
    seconds += plain_round * (
      rounds * cost["round_cost"] + more * cost["fed_cost"]
    )
  return seconds


def _predicted(
  records: Sequence[dict], system: str, cost: dict | None, speedup: float | None
) -> dict[str, Any]:
  """The speed-up that costs predict, beside the one that was measured.

  It is None where it cannot be known, timings that disagree included.
  """
  names = ("predicted_speedup", "prediction_error", "prediction_error_ci")
  if cost is None or cost.get("doubts") or not speedup:
    return dict.fromkeys(names)
  units = [unit_of(record, system).seconds for record in records]
  should = [
    predicted_seconds(list(entries(record, system)), cost) for record in records
  ]
  ends = intervals.interval([units], [should])
  error = sum(units) / sum(should) - 1
  values = speedup * (1 + error), error, ends and [end - 1 for end in ends]
  return dict(zip(names, values, strict=True))
