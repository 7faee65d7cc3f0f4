"""Pages of plans: tables, T5-XXL's beside published speed-ups, and a figure.

Leviathan et al. (ICML 2023), Table 2: T5-XXL at batch 1 on a TPU v4, drafts of
three sizes, quoted from notes. Their formula takes the cost of a draft's pass
over the target's from their own measurement; a plan takes it from its roofline
(`launch.planning.roofline`), at the plan's batch.
"""

import pathlib

from matplotlib.figure import Figure

from launch import report
from launch.hardware import GIB
from models.networks.lowbits import Format
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


def table(plans: dict[str, dict]) -> str:
  """A row for each plan, as `launch.plan --output` wrote them, by name."""
  head = [
    "plan", "slice", "mesh", "drafted", "GiB a device", "largest batch",
    "all-reduces a draft step / verify", "cache copies", "compile, s of a core",
    "c", "break-even", "best N at .8", "speed-up at .8, as drafted",
  ]  # fmt: skip
  rows = [_row(pathlib.Path(path).stem, p) for path, p in plans.items()]
  return report.table(head, rows)


def pays(plans: dict[str, dict]) -> str:
  """The largest batch at which drafting pays, by acceptance, for each plan.

  Batches are powers of two on each group of devices, drafts of the best length.
  """
  of_plans = {
    pathlib.Path(path).stem: plan["roofline"] for path, plan in plans.items()
  }
  largest = {
    name: {x["acceptance"]: x["batch_size"] for x in line["pays_by_acceptance"]}
    for name, line in of_plans.items()
  }
  at = sorted(set().union(*largest.values()))
  rows = [
    [name, f"{of_plans[name]['cost_ratio']:.2f}"]
    + [f"{batches[p] or 'none'}" for p in at]
    for name, batches in largest.items()
  ]
  return report.table(["plan", "c", *(f"{p:g}" for p in at)], rows)


def weights(plans: dict[str, dict]) -> str:
  """Weights in few bits that a plain round reads and writes, by plan."""
  mega = lambda count: f"{count / 1e6:,.0f}"
  return report.columns(
    [
      {"plan": pathlib.Path(path).stem} | plan
      for path, plan in plans.items()
      if plan.get("weights")
    ],
    {
      "plan": lambda x: x["plan"],
      "slice": lambda x: f"`{x['topology']}`",
      "weights": lambda x: f"`{Format(**x['settings']['weights'])}`",
      "MB a device": lambda x: mega(x["weights"]["bytes"]),
      "read a round": lambda x: mega(x["weights"]["read"]),
      "written": lambda x: mega(x["weights"]["written"]),
      "bytes over the least": lambda x: (
        f"{x['roofline']['bytes_over_minimum']:.2f}"
      ),
    },
  )


def _row(name: str, plan: dict) -> list[str]:
  size, settings, line = (
    plan[part] for part in ("per_chip_bytes", "settings", "roofline")
  )
  mesh = settings["mesh"]
  cells = [
    name,
    f"`{plan['topology']}`",
    f"data:{mesh['data']}, model:{mesh['model']}, draft on {mesh['draft']}",
    f"{len(settings['parents']) - 1}",
    f"{size['peak'] / GIB:.2f} of {size['hbm'] / GIB:.2f}",
    f"{plan['largest']['batch_size']}",
  ]
  if plan["collectives"] is None:
    return [*cells, "does not fit", *[""] * 6]
  reduced = "{:g} / {:g}".format(
    *(
      plan["collectives"][phase].get("all-reduce", {"count": 0})["count"]
      for phase in ("draft_step", "verify")
    )
  )
  even = line["break_even_acceptance"]
  (rates,) = [r for r in line["tokens_per_second"] if r[0] == 0.8]
  return [
    *cells,
    reduced,
    f"{plan['cache_copies']}",
    f"{plan['compile_cpu_seconds']:.0f}",
    f"{line['cost_ratio']:.3f}",
    "none" if even is None else f"{even:.2f}",
    f"{line['best_num_speculative_tokens']}",
    f"{rates[2] / rates[1]:.2f}",
  ]


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


def t5_table(plans: dict[str, dict]) -> str:
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


def sweep(plans: list[dict]) -> Figure:
  """Predicted speed-up and memory of every plan, in the order of the sweep.

  Args:
    plans: from `launch.planning.answer.plan`.
  """
  labels = [_label(plan, plans) for plan in plans]
  figure = Figure(figsize=(7, 1 + 0.32 * len(plans)), layout="constrained")
  speed, memory = figure.subplots(1, 2, sharey=True)
  rows = range(len(plans))
  for row, plan in zip(rows, plans, strict=True):
    if not plan["fits"]:
      speed.annotate("does not fit", (1.02, row), va="center", color="#b33")
      continue
    for acceptance, plain, speculative in plan["roofline"]["tokens_per_second"]:
      if acceptance in (0.6, 0.8, 0.9):
        speed.plot(
          speculative / plain, row, "o", color="#26547c",
          alpha=0.25 + 0.75 * (acceptance - 0.6) / 0.3,
        )  # fmt: skip
  speed.axvline(1, color="0.6", lw=1)
  speed.set_yticks(list(rows), labels)
  speed.invert_yaxis()
  speed.set_xlabel("over plain decoding (roofline)\nat acceptance .6, .8, .9")
  used = [
    p["per_chip_bytes"]["peak"] / p["per_chip_bytes"]["hbm"] for p in plans
  ]
  memory.barh(
    list(rows), used, color=["#26547c" if p["fits"] else "#b33" for p in plans]
  )
  memory.axvline(1, color="0.6", lw=1)
  memory.set_xlabel("memory of a device, used")
  return figure


def _label(plan: dict, plans: list[dict]) -> str:
  """Label of a plan: the settings that differ between the plans."""
  named = {
    "topology": lambda p: p["topology"],
    "B": lambda p: p["settings"]["batch_size"],
    "N": lambda p: p["settings"]["num_speculative_tokens"],
    "K": lambda p: p["settings"]["num_drafts"],
  }
  parts = [
    str(get(plan)) if name == "topology" else f"{name}={get(plan)}"
    for name, get in named.items()
    if len({get(p) for p in plans}) > 1
  ]
  return " ".join(parts) or plan["topology"]
