"""The advice, the tables and the figure of a study of depths."""

import numpy as np
from matplotlib.figure import Figure

from launch import report

_POLICIES = ("confidence", "survival", "predicted", "optimal")
_RULES = {
  "best_static": "best static depth",
  "confidence": "confidence of the newest token",
  "survival": "survival",
  "predicted": "predicted by a head",
  "optimal": "optimal, at its own rate",
  "optimum": "optimum of the bins' process",
}


def advice(result: dict) -> str:
  """The policy to use and its gain, in a sentence."""
  one = result["batches"][0]
  static, plain = one["best_static"], one["plain"]
  options = [one[name] for name in _POLICIES if name in one]
  best = max(options, key=lambda option: option["tokens_per_second"])
  gain = best["tokens_per_second"] / static["tokens_per_second"] - 1
  ceiling = (
    one["optimum"]["tokens_per_second"] / static["tokens_per_second"] - 1
  )
  rows = one["batch_size"]
  if max(static["tokens_per_second"], best["tokens_per_second"]) <= plain:
    return (
      f"At batch size {rows} no depth pays: plain decoding is predicted to be "
      "the fastest."
    )
  if gain < 0.02:
    return (
      f"At batch size {rows} draft a static {static['name']}: the best policy "
      f"({best['name']}) is predicted to change tokens per second by "
      f"{gain:+.1%}, and the optimum for this pair's confidences by "
      f"{ceiling:+.1%}."
    )
  return (
    f"At batch size {rows} use policy={best['name']} with "
    f"tokens={best['width']}: predicted {gain:+.1%} over the "
    f"best static depth, which is {static['name']} (the optimum for this "
    f"pair's confidences: {ceiling:+.1%})."
  )


def rules_in(every: list[dict]) -> dict[str, str]:
  """The rules that were compared in all results, with what they are called."""
  batches = [one for result in every for one in result["batches"]]
  return {
    key: name
    for key, name in _RULES.items()
    if all(key in one for one in batches)
  }


def _batches(results: dict[str, dict]) -> list[dict]:
  """Results at each temperature and batch size."""
  return [
    {"temperature": f"{result['config']['temperature']:g}"} | one
    for result in results.values()
    for one in result["batches"]
  ]


def table(results: dict[str, dict]) -> str:
  """Predicted tokens per second by batch size, and over the best static."""
  static = lambda one: one["best_static"]["tokens_per_second"]
  gain = lambda key: (
    lambda one: (
      f"{one[key]['tokens_per_second'] / static(one) - 1:+.1%} "
      f"({one[key]['name'].replace('(', ' ').rstrip(')')}, "
      f"≤ {one[key]['width']})"
    )
  )
  _, *others = rules_in([*results.values()]).items()
  return report.columns(
    _batches(results),
    {
      "temperature": lambda one: one["temperature"],
      "batch": lambda one: str(one["batch_size"]),
      "cost of a level": lambda one: f"{one['draft_cost']:.3f}",
      "plain": lambda one: f"{one['plain']:.0f}",
      "best static (depth)": lambda one: (
        f"{static(one):.0f} ({one['best_static']['name']})"
      ),
      **{name: gain(key) for key, name in others},
    },
  )


def static_table(results: dict[str, dict]) -> str:
  """Every static depth by batch size."""
  most = max(result["depth"] for result in results.values())
  return report.table(
    ["temperature", "batch", *map(str, range(most + 1))],
    [
      [
        one["temperature"],
        str(one["batch_size"]),
        *(f"{rate:.0f}" for rate in one["static"].values()),
      ]
      for one in _batches(results)
    ],
  )


def page(result: dict) -> str:
  """The study as Markdown."""
  parts = [
    "# How deep to draft",
    advice(result),
    "![Tokens per second against batch size](depth.svg)",
    "*Predicted tokens per second of every way to choose a depth, over plain "
    "decoding's, against the batch size.*",
    table({"": result}),
    "Tokens per second are predicted: from acceptances of "
    f"{result['num_rounds']} rounds of {result['depth']} drafted tokens, and "
    "from the costs given. A level costs so much of a plain round; `optimal` "
    "is told what it costs of a round as wide as its own. Beside each rule "
    "stands its setting, and how many tokens it may draft at most. Every "
    "static depth:",
    static_table({"": result}),
  ]
  return "\n\n".join(parts) + "\n"


def figure(result: dict) -> Figure:
  """Rates over plain decoding's, against the batch size."""
  drawn, ((panel,),) = report.panels(6, 3.6)
  batches = result["batches"]
  rows = [one["batch_size"] for one in batches]
  over = lambda values: np.array(values) / [one["plain"] for one in batches]
  _, *depths = batches[0]["static"]
  for depth in depths:
    panel.plot(
      rows, over([one["static"][depth] for one in batches]), color="0.8",
      linewidth=0.8, label="static depths" if depth == depths[0] else None,
    )  # fmt: skip
  for index, (key, name) in enumerate(rules_in([result]).items()):
    panel.plot(
      rows, over([one[key]["tokens_per_second"] for one in batches]),
      color=f"C{index}", marker="o", label=name,
      linestyle="--" if key == "optimum" else "-",
    )  # fmt: skip
  panel.axhline(1, color="black", linewidth=0.8, label="plain decoding")
  panel.set_xscale("log", base=2)
  panel.set_xticks(rows, [str(r) for r in rows])
  panel.set_xlabel("rows of a batch")
  panel.set_ylabel("predicted tokens per second, over plain")
  panel.legend()
  return drawn
