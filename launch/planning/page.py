"""Table of several plans, as Markdown."""

import pathlib

from launch import report
from launch.hardware import GIB
from models.networks.lowbits import Format


def table(plans: dict[str, dict]) -> str:
  """A row for each plan, as `launch.plan --output` wrote them, by name."""
  head = [
    "plan", "slice", "mesh", "drafted", "GiB a device", "largest batch",
    "all-reduces a draft step / verify", "cache copies", "compile, s of a core",
    "c", "break-even", "best N at .8", "speed-up at .8",
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
