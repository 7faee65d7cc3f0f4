"""Experts that the target's passes touched, beside those of uniform routing.

Counted where it is asked for (`--count_experts`), in the passes that answered.
Rows that have ended, or that fill a batch up, are fed like the others and
counted with them: they are read for.
"""

from collections.abc import Mapping, Sequence

from launch import report
from launch.assembly.pair import Pair
from specjax.theory.experts import expected_distinct


def facts(pair: Pair) -> dict:
  """Sizes of the mixtures: E and k of each layer, and groups of devices."""
  return {
    "num_experts": [m.num_experts for m in pair.mixtures],
    "num_chosen": [m.num_chosen for m in pair.mixtures],
    "groups": pair.layout.data if pair.layout else 1,
  }


def row(
  every: Sequence[Mapping], batch_size: int, counted: Mapping | None
) -> dict:
  """A system's passes on some turns.

  Args:
    every: what was found of a system in each turn.
    batch_size: rows of a batch.
    counted: from `facts`; None if nothing was.

  Returns:
    `pass_tokens`, tokens that a pass was over on average; `experts_by_layer`,
    different experts of each layer that it touched; `experts_uniform`, their
    expectation under uniform and independent routing, for the mean width where
    passes have several. Each None where it was not counted.
  """
  names = ("pass_tokens", "experts_by_layer", "experts_uniform")
  if not counted or any(not e.get("num_experts") for e in every):
    return dict.fromkeys(names)
  calls = sum(sum(e["calls"]) for e in every)
  rounds = sum(e["rounds"] for e in every)
  if not calls or not rounds:
    return dict.fromkeys(names)
  fed = sum(e["fed"] for e in every) / rounds
  tokens = batch_size / counted["groups"] * fed
  sums = zip(*(e["num_experts"] for e in every), strict=True)
  sizes = zip(counted["num_experts"], counted["num_chosen"], strict=True)
  return {
    "pass_tokens": tokens,
    "experts_by_layer": [sum(of_layer) / calls for of_layer in sums],
    "experts_uniform": [
      float(expected_distinct(tokens, *size)) for size in sizes
    ],
  }


def section(result: Mapping) -> list[str]:
  """A section of the page; nothing where nothing was counted."""
  rows = [r for r in result["runs"] if r["level"] == "all"]
  rows = [r for r in rows if r.get("experts_by_layer")]
  if not rows:
    return []
  mean = lambda x: f"{sum(x) / len(x):.2f}"
  lines = [
    [
      f"{r['temperature']:g}", str(r["batch_size"]), f"`{r['system']}`",
      f"{r['pass_tokens']:.1f}", mean(r["experts_by_layer"]),
      f"{min(r['experts_by_layer']):.2f}–{max(r['experts_by_layer']):.2f}",
      mean(r["experts_uniform"]),
    ]
    for r in rows
  ]  # fmt: skip
  head = ["T", "batch", "system", "tokens a pass", "experts a layer",
          "least and most of a layer", "if uniform"]  # fmt: skip
  sizes = result["experts"]
  return [
    "## Experts a pass touched",
    report.table(head, lines),
    f"Of {mean(sizes['num_experts'])} experts a layer, of which a token is "
    f"given {mean(sizes['num_chosen'])}, in {len(sizes['num_experts'])} "
    "layers; uniform is the expectation if tokens chose independently, all "
    "experts alike. `launch.plan --experts=` of the JSON file plans with the "
    "measured counts.",
  ]
