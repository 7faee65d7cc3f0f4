"""Paired comparison of two results, or of the systems of one."""

from collections.abc import Mapping, Sequence

from launch import report
from launch.evaluation import summary
from launch.evaluation.systems import PLAIN
from specjax import intervals


def compare(before: Mapping, after: Mapping) -> list[dict]:
  """A row for each system, setting and category that both results have.

  Groups count that hold the same prompts in both, as far as questions and
  lengths tell. Requests are paired in
  `block_efficiency_change`, the mean over questions of the second result's
  emitted tokens per target call less the first's; groups are paired in
  `speedup_ratio`, the second's speed-up over the first's, each against the
  plain decoding of its own run. 95% intervals, over questions and groups.

  Args:
    before, after: contents of two files that `launch.evaluate` wrote.

  Raises:
    ValueError: if they have no group, or no system, in common.
  """
  rows = []
  ours, theirs = (_by_group(result) for result in (before, after))
  common = [key for key in ours if key in theirs]
  if not common:
    raise ValueError(
      "the two results have no group of questions in common: the same "
      "temperature, batch size, questions and lengths of prompts"
    )
  rows = [
    {"system": system, **scope, **_row(both, system, system)}
    for scope, both in _scopes([(ours[key], theirs[key]) for key in common])
    for system in _shared_systems(both)
    if system != PLAIN
  ]
  if not rows:
    raise ValueError("the two results have no system in common but plain")
  return rows


def among(result: Mapping, over: str) -> list[dict]:
  """A row for each other system of one result, paired with one of them.

  As `compare`, of the groups that both answered; plain decoding is a system
  like the others, and `speedup_ratio` tokens per second over those of `over`.

  Args:
    result: the content of a file that `launch.evaluate` wrote.
    over: a system's name.

  Raises:
    ValueError: if the result has no such system, or no other.
  """
  rows = [
    {"system": system, **scope, **_row(both, over, system)}
    for scope, both in _scopes([(r, r) for r in result["groups"]])
    for system in _shared_systems(both)
    if over != system and over in _shared_systems(both)
  ]
  if not rows:
    names = {n for r in result["groups"] for n in _systems(r)}
    raise ValueError(
      f"the result has no system {over!r} beside others, but {sorted(names)}"
    )
  return rows


def _scopes(pairs: Sequence[tuple[dict, dict]]):
  """Scopes of rows, and the pairs of groups that each is made of."""
  parts: dict[str, set] = {}
  for record, _ in pairs:
    parts.setdefault(record["task"], set()).add(record["category"])
  for level in summary.LEVELS:
    scopes: dict[tuple, list] = {}
    for record, other in pairs:
      if level == "category" and len(parts[record["task"]]) == 1:
        continue  # the task's own row says it
      category = "all" if level == "all" else record[level]
      scope = (record["temperature"], record["batch_size"], category)
      scopes.setdefault(scope, []).append((record, other))
    for (temperature, batch_size, category), both in scopes.items():
      yield (
        {
          "temperature": temperature,
          "batch_size": batch_size,
          "level": level,
          "category": category,
        },
        both,
      )


def _by_group(result: Mapping) -> dict[tuple, dict]:
  """Records by setting and questions."""
  return {
    (
      record["temperature"],
      record["batch_size"],
      # Second turns hold answers: prompts of other lengths are other prompts.
      *(
        (tuple(turn["questions"]), tuple(turn["prompt_tokens"]))
        for turn in record["turns"]
      ),
    ): record
    for record in result["groups"]
  }


def _systems(record: dict) -> set[str]:
  return {n for turn in record["turns"] for n in turn["systems"]}


def _shared_systems(both: Sequence[tuple[dict, dict]]) -> list[str]:
  every = set.intersection(
    *(_systems(record) for pair in both for record in pair)
  )
  return sorted(every)


def _row(both: Sequence[tuple[dict, dict]], before: str, after: str) -> dict:
  units = [
    (summary.unit_of(one, before), summary.unit_of(other, after))
    for one, other in both
  ]
  column = lambda which, name: [getattr(u[which], name) for u in units]
  top = [
    column(1, "num_tokens"), column(1, "baseline_seconds"),
    column(0, "seconds"), column(0, "baseline_num_tokens"),
  ]  # fmt: skip
  bottom = [
    column(1, "seconds"), column(1, "baseline_num_tokens"),
    column(0, "num_tokens"), column(0, "baseline_seconds"),
  ]  # fmt: skip
  ones, others = zip(*both, strict=True)
  one, other = _per_question(ones, before), _per_question(others, after)
  changes = [other[q] - one[q] for q in one if q in other]
  return {
    "num_questions": len(changes),
    "num_groups": len(both),
    "block_efficiency_change": sum(changes) / len(changes),
    "block_efficiency_change_ci": intervals.mean_interval(changes),
    **intervals.ratio("speedup_ratio", top, bottom),
  }


def _per_question(records: Sequence[dict], system: str) -> dict:
  """Emitted tokens per target call of each question, its turns together."""
  tokens: dict = {}
  calls: dict = {}
  for record in records:
    for e in summary.entries(record, system):
      for question, count, number in zip(
        e.turn["questions"],
        e.numbers["tokens"],
        e.numbers["calls"],
        strict=True,
      ):
        tokens[question] = tokens.get(question, 0) + count
        calls[question] = calls.get(question, 0) + number
  return {q: tokens[q] / calls[q] for q in tokens if calls[q]}


def table(rows: Sequence[Mapping]) -> str:
  """The comparison as Markdown."""

  def cell(row: Mapping, name: str, form: str) -> str:
    text, ends = format(row[name], form), row[f"{name}_ci"]
    if ends:
      text += " ({} to {})".format(*(format(end, form) for end in ends))
    return text

  return report.table(
    [
      "system", "T", "batch", "questions of", "questions",
      "tokens per call, change (95%)", "speed-up, ratio (95%)",
    ],
    [
      [
        f"`{row['system']}`",
        f"{row['temperature']:g}",
        str(row["batch_size"]),
        row["category"],
        str(row["num_questions"]),
        cell(row, "block_efficiency_change", "+.3f"),
        cell(row, "speedup_ratio", ".3f"),
      ]
      for row in rows
    ],
  )  # fmt: skip
