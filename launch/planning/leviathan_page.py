"""Table of T5-XXL's plans beside the speed-ups of Leviathan et al. (2023).

Leviathan et al. (ICML 2023), Table 2: T5-XXL at batch 1 on a TPU v4, drafts of
three sizes, quoted from notes. Their formula takes the cost of a draft's pass
over the target's from their own measurement; a plan takes it from its roofline
(`launch.planning.roofline`), at the plan's batch.
"""

import pathlib

from launch import report
from specjax.theory import throughput

COST_RATIOS = {"small": 0.02, "base": 0.04, "large": 0.11}
# Task, temperature, draft, number of drafted tokens, acceptance, speed-up.
REPORTED = (
  ("WMT EnDe", 0, "small", 7, 0.75, 3.4),
  ("WMT EnDe", 0, "base", 7, 0.80, 2.8),
  ("WMT EnDe", 0, "large", 7, 0.82, 1.7),
  ("WMT EnDe", 1, "small", 7, 0.62, 2.6),
  ("WMT EnDe", 1, "base", 5, 0.68, 2.4),
  ("WMT EnDe", 1, "large", 3, 0.71, 1.4),
  ("CNN/DM", 0, "small", 5, 0.65, 3.1),
  ("CNN/DM", 0, "base", 5, 0.73, 3.0),
  ("CNN/DM", 0, "large", 3, 0.74, 2.2),
  ("CNN/DM", 1, "small", 5, 0.53, 2.3),
  ("CNN/DM", 1, "base", 3, 0.55, 2.2),
  ("CNN/DM", 1, "large", 3, 0.56, 1.7),
)


def by_formula(acceptance: float, count: int, cost_ratio: float) -> float:
  """The speed-up of their Theorem 3.8, verifying as dear as one token."""
  tokens = throughput.tokens_per_cycle(count, acceptance)
  return float(tokens / (count * cost_ratio + 1))


def by_plan(plan: dict, acceptance: float, count: int) -> float:
  """The speed-up of a plan's roofline for so many drafted tokens."""
  line = plan["roofline"]
  verify = line["verify_seconds"]
  tokens = throughput.tokens_per_cycle(count, acceptance)
  seconds = count * line["draft_step_seconds"] + verify[str(count + 1)]
  return float(tokens * verify["1"] / seconds)


def table(plans: dict[str, dict]) -> str:
  """A row for each row of their table; plans are `xxl-DRAFT-SLICE.json`."""
  by_draft = {}
  for path, plan in plans.items():
    _, draft, where = pathlib.Path(path).stem.split("-", 2)
    by_draft[draft, where] = plan
  slices = sorted({where for _, where in by_draft})
  head = [
    "task", "temperature", "draft", "γ", "α", "reported", "by their formula",
    *(f"predicted, {where}" for where in slices),
  ]  # fmt: skip
  rows = []
  for task, temperature, draft, count, acceptance, reported in REPORTED:
    formula = by_formula(acceptance, count, COST_RATIOS[draft])
    predicted = [
      f"{by_plan(by_draft[draft, where], acceptance, count):.2f}"
      if (draft, where) in by_draft
      else "–"
      for where in slices
    ]
    rows.append(
      [task, f"{temperature}", draft, f"{count}", f"{acceptance:.2f}",
       f"{reported:.1f}", f"{formula:.2f}", *predicted]
    )  # fmt: skip
  return report.table(head, rows)
