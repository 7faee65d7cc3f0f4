"""Figure of a sweep of plans."""

from matplotlib.figure import Figure


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
