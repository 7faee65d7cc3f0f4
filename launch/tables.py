"""The command that prints the tables of committed results, as Markdown.

  python -m launch.tables speed docs/measurements/*.json

prints what the pages under docs/ and the README show.
"""

import importlib
import sys

from launch import report

# Where each is made of results by their files.
TABLES = {
  "speed": "launch.evaluation.page:speed",
  "explained": "launch.evaluation.explain_page:table",
  "evaluation": "launch.evaluation.page:table",
  "plans": "launch.planning.page:table",
  "pays": "launch.planning.page:pays",
  "stored_weights": "launch.planning.page:weights",
  "t5_plans": "launch.planning.page:t5_table",
  "passes": "launch.tools.passes:table",
  "answers": "launch.tools.score_answers:table",
  "loads": "launch.serving.loads_page:table",
  "drafts": "launch.studies.drafts.plots:table",
  "layers": "launch.layer_search:table",
  "online": "launch.studies.online_plots:table",
  "depths": "launch.studies.depth.plots:table",
  "static_depths": "launch.studies.depth.plots:static_table",
  "quality": "launch.studies.quality:table",
  "precision": "launch.studies.precision:table",
  "efficiency": "launch.studies.rules.plots:efficiency_table",
  "optimality": "launch.studies.rules.plots:optimality_table",
  "joint": "launch.studies.rules.plots:joint_table",
  "joint_others": "launch.studies.rules.plots:joint_others",
  "off_draft": "launch.studies.rules.plots:off_draft",
  "front": "launch.studies.rules.plots:front_table",
  "costs": "launch.studies.rules.cost_plots:costs_table",
  "cost_limits": "launch.studies.rules.cost_plots:cost_limits",
  "settings": "launch.studies.rules.cost_plots:settings_table",
  "rejections": "launch.studies.theory.plots:rejections",
  "tradeoff": "launch.studies.theory.plots:tradeoff_table",
  "throughput": "launch.studies.theory.plots:throughput_table",
  "acceptance": "launch.studies.theory.plots:acceptance_table",
  "mixture": "launch.studies.theory.plots:mixture_table",
  "mixtures": "launch.studies.mixtures:table",
  "audit": "launch.studies.audit.page:methods",
  "audit_sources": "launch.studies.audit.page:sources",
  "power": "launch.studies.audit.page:power",
}


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
    results = {path: report.read(path) for path in paths}
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


if __name__ == "__main__":
  report.run(main)
