"""The tables of searches for layers to skip."""

from launch import tables


def table(results: dict[str, dict]) -> str:
  """A row a search: the best sets after so many evaluations, and the bound."""
  rows = []
  for found in results.values():
    best, search = found["best"], found["search"]
    measured = " measured" if search["objective"] == "measured" else ""
    steps = [
      f"{step['score']:.3f}{measured} after {step['evaluations']}"
      for step in _thinned(found["improvements"])
    ]
    rows.append(
      [
        search["method"],
        search["costs"],
        f"{len(found['evaluations'])}",
        ", ".join(steps),
        f"{len(best['skip_attention'])} + {len(best['skip_mlp'])} of "
        f"{2 * found['num_layers']}",
        f"{best['acceptance']:.3f}",
        f"{best['draft_cost']:.2f}",
        f"{best['speedup']:.3f}",
        _number(best["break_even"]),
        f"{best['bound']:.2f}",
      ]
    )
  return tables.table(
    [
      "method", "costs", "evaluations", "best so far",
      "attention + MLP skipped", "acceptance", "draft pass",
      "predicted speed-up",
      "acceptance to break even", "bound of that acceptance",
    ],
    rows,
  )  # fmt: skip


def _number(value: float | None) -> str:
  return "none" if value is None else f"{value:.3f}"


def _thinned(steps: list[dict]) -> list[dict]:
  """The first, the last, and two between."""
  if len(steps) <= 4:
    return steps
  third = len(steps) // 3
  return [steps[0], steps[third], steps[2 * third], steps[-1]]
