"""Compares the systems of one result with one of them, or two results.

  python -m launch.evaluation.compare BEFORE.json AFTER.json
  python -m launch.evaluation.compare E.json --over=ngram

Results are those of `launch.evaluate`. Of two, groups count that hold the same
prompts at the same temperature and batch size in both, and a system's speed-up
is against the plain decoding of its own run. Ratios have 95% intervals over
groups, paired.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

from launch import report
from launch.evaluation import summary
from launch.evaluation.systems import PLAIN
from specjax import intervals


def compare(
  pairs: Sequence[tuple[Mapping, Mapping]], over: str | None = None
) -> list[dict]:
  """A row for each system, setting and task.

  Args:
    pairs: records of groups, each with the other result's of the same prompts,
      or with itself.
    over: the system of the first record; None for the same system.

  Returns:
    Rows with `speedup_ratio` and `block_efficiency_ratio`, the second's
    speed-up and emitted tokens per target call over the first's.
  """
  scopes: dict[tuple, list[tuple[Mapping, Mapping]]] = {}
  for one, other in pairs:
    for task in ("all", one["task"]):
      scope = (one["temperature"], one["batch_size"], task)
      scopes.setdefault(scope, []).append((one, other))
  rows = []
  for (temperature, batch_size, task), both in scopes.items():
    every = [summary.systems_of(record) for pair in both for record in pair]
    shared = set.intersection(*every)
    for system in sorted(shared - {over or PLAIN}):
      if over is None or over in shared:
        before = [summary.unit_of(one, over or system) for one, _ in both]
        after = [summary.unit_of(other, system) for _, other in both]
        rows.append(
          {
            "system": system, "temperature": temperature,
            "batch_size": batch_size, "task": task, "num_groups": len(both),
            **_ratios(before, after),
          }
        )  # fmt: skip
  return rows


def _ratios(
  before: Sequence[intervals.Unit], after: Sequence[intervals.Unit]
) -> dict:
  column = lambda units, name: [getattr(unit, name) for unit in units]
  tokens, seconds = "num_tokens", "seconds"
  theirs = [f"baseline_{tokens}", f"baseline_{seconds}"]
  return {
    **intervals.ratio(
      "speedup_ratio",
      [column(after, tokens), column(after, theirs[1]),
       column(before, seconds), column(before, theirs[0])],
      [column(after, seconds), column(after, theirs[0]),
       column(before, tokens), column(before, theirs[1])],
    ),
    **intervals.ratio(
      "block_efficiency_ratio",
      [column(after, tokens), column(before, "num_target_calls")],
      [column(after, "num_target_calls"), column(before, tokens)],
    ),
  }  # fmt: skip


def table(rows: Sequence[Mapping]) -> str:
  """The comparison as Markdown."""
  return report.columns(
    rows,
    {
      "system": lambda row: f"`{row['system']}`",
      "T": lambda row: f"{row['temperature']:g}",
      "batch": lambda row: str(row["batch_size"]),
      "questions of": lambda row: row["task"],
      "groups": lambda row: str(row["num_groups"]),
      "speed-up, ratio (95%)": lambda row: report.estimate(
        row, "speedup_ratio", ".3f"
      ),
      "tokens per call, ratio (95%)": lambda row: report.estimate(
        row, "block_efficiency_ratio", ".3f"
      ),
    },
  )


def _groups_of(path: str) -> dict[str, dict]:
  """A result's records by setting, questions and lengths of their prompts."""
  try:
    groups = json.loads(pathlib.Path(path).read_text("utf-8"))["groups"]
  except (ValueError, LookupError, TypeError):
    raise ValueError(f"{path} is no result of launch.evaluate") from None
  prompts = lambda turn: (turn["questions"], turn["prompt_tokens"])
  return {
    json.dumps(
      [one["temperature"], one["batch_size"], *map(prompts, one["turns"])]
    ): one
    for one in groups
  }


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("results", nargs="+", help="two results, or one")
  parser.add_argument("--over", help="the system that others are divided by")
  given = parser.parse_args(argv)
  paths, over = given.results, given.over
  try:
    if len(paths) != (1 if over else 2):
      raise ValueError("give two results, or one and --over=SYSTEM")
    ours, theirs = _groups_of(paths[0]), _groups_of(paths[-1])
    rows = compare([(ours[k], theirs[k]) for k in ours if k in theirs], over)
    if not rows:
      what = f"system {over!r} beside others" if over else "question and system"
      raise ValueError(f"there is no {what} in {' and '.join(paths)}")
  except (OSError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(table(rows))
  return 0


if __name__ == "__main__":
  sys.exit(main())
