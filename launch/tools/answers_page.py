"""The table of how answers were decoded, and how good they are."""

from launch import tables


def table(results: dict[str, dict]) -> str:
  """One row a run, of what `launch.tools.score_answers --output` wrote."""
  head = [
    "drafter", "rule", "temperature", "accepted a round",
    "tokens a round (95%)", "exact match", "chrF", "total variation",
  ]  # fmt: skip
  rows = []
  for result in results.values():
    for name, run in result["runs"].items():
      score = result["scores"][name]["all"]
      low, high = run["block_efficiency_ci"] or (None, None)
      interval = "" if low is None else f" ({low:.2f}–{high:.2f})"
      rows.append(
        [
          f"`{run['drafter']}`",
          f"`{run['rule']}`" if run["rule"] else "–",
          f"{run['temperature']:g}",
          f"{run['accepted_per_target_call']:.2f}",
          f"{score['block_efficiency']:.2f}{interval}",
          f"{score['exact_match']:.3f}",
          f"{score['chrf']:.1f}",
          "–"
          if run["total_variation"] is None
          else f"{run['total_variation']:.3f}",
        ]
      )
  return tables.table(head, rows)
