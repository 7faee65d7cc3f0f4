"""Markdown tables, and the command that prints those of committed results.

  python -m launch.tables speed docs/measurements/*.json

prints what the pages under docs/ and the README show. Every study has its
tables in a file `page.py`.
"""

import importlib
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from launch import jsonl, terminal
from specjax import intervals, rules

# Where each is made of results by their files.
TABLES = {
  "speed": "launch.evaluation.page:speed",
  "explained": "launch.evaluation.explain_page:table",
  "evaluation": "launch.evaluation.page:table",
  "plans": "launch.planning.page:table",
  "t5_plans": "launch.planning.leviathan_page:table",
  "passes": "launch.tools.passes:table",
  "answers": "launch.tools.answers_page:table",
  "loads": "launch.serving.loads_page:table",
  "drafts": "launch.studies.drafts.page:table",
  "layers": "launch.layer_search:table",
  "online": "launch.studies.online.page:table",
  "depths": "launch.studies.depth.page:table",
  "static_depths": "launch.studies.depth.page:static_table",
  "quality": "launch.studies.quality.page:table",
  "efficiency": "launch.studies.rules.page:efficiency",
  "optimality": "launch.studies.rules.page:optimality",
  "joint": "launch.studies.rules.page:joint",
  "joint_others": "launch.studies.rules.page:joint_others",
  "off_draft": "launch.studies.rules.page:off_draft",
  "front": "launch.studies.rules.page:front",
  "costs": "launch.studies.rules.page:costs",
  "cost_limits": "launch.studies.rules.page:cost_limits",
  "rejections": "launch.studies.theory.page:rejections",
  "tradeoff": "launch.studies.theory.page:tradeoff",
  "throughput": "launch.studies.theory.page:throughput",
  "acceptance": "launch.studies.theory.page:acceptance",
  "mixture": "launch.studies.theory.page:mixture",
  "mixtures": "launch.studies.mixtures.page:table",
  "audit": "launch.studies.audit.page:methods",
  "audit_sources": "launch.studies.audit.page:sources",
  "power": "launch.studies.audit.page:power",
}
# What `plus_minus` means, for captions.
PLUS_MINUS = f"± is a 95% interval, {intervals.SIDE:g} standard errors."


def plus_minus(value: float, standard_error: float, digits: int) -> str:
  """A mean over many with its 95% interval: what ± is, wherever it stands."""
  side = intervals.SIDE * standard_error
  return f"{value:.{digits}f} ± {side:.{digits}f}"


def loss_in_words(
  rule: str, lossless: bool, total_variation: float | None
) -> str:
  """Distance of the tokens' law from the target's: beside every speed-up.

  Args:
    rule: its name; of one that is not the library's the claim is its own.
    lossless: whether it says that it is.
    total_variation: the mean over tokens, or None if the rule does not say.
  """
  if lossless:
    is_ours = rule.partition("(")[0] in rules.RULES
    return "lossless" if is_ours else "lossless (declared)"
  if total_variation is None:
    return "lossy, distance not reported"
  return f"lossy, total variation {total_variation:.3f}"


def table(head: list[str], rows: list[list[str]]) -> str:
  """A Markdown table."""
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read(path: str) -> Any:
  """The contents of a JSON file, or the list of a JSONL file's lines."""
  if path.endswith(".jsonl"):
    return [line for _, line in jsonl.read(path)]
  return json.loads(pathlib.Path(path).read_text("utf-8"))


def main(argv: list[str]) -> int:
  """`tables TABLE RESULT...`; returns the exit code."""
  usage = f"usage: python -m launch.tables {{{','.join(TABLES)}}} RESULT..."
  if argv[1:] == ["--help"]:
    print(f"{__doc__}\n{usage}")
    return 0
  if len(argv) < 3 or argv[1] not in TABLES:
    print(usage, file=sys.stderr)
    return 2
  _, name, *paths = argv
  module, _, function = TABLES[name].partition(":")
  try:
    results = {path: read(path) for path in paths}
    print(getattr(importlib.import_module(module), function)(results))
  except FileNotFoundError as error:
    print(f"error: no such file: {error.filename}", file=sys.stderr)
    return 2
  except (LookupError, TypeError, ValueError, RecursionError) as error:
    kind = type(error).__name__
    print(f"error: {' '.join(paths)} hold no results for {name} "
          f"({kind}: {error})\n{usage}", file=sys.stderr)  # fmt: skip
    return 2
  return 0


def run(main: Callable[[list[str]], int]) -> None:
  """Runs what draws committed results as the program, and exits with its code.

  Files are what may be wrong: one that holds something else is one line.
  """
  terminal.guard()
  try:
    code = main(sys.argv)
    sys.stdout.flush()
  except BrokenPipeError:
    code = terminal.reader_left()
  except (LookupError, TypeError, ValueError, RecursionError) as error:
    files, kind = " ".join(sys.argv[1:]), type(error).__name__
    print(f"error: no results in {files} ({kind}: {error})", file=sys.stderr)
    code = 2
  sys.exit(code)


if __name__ == "__main__":
  run(main)
