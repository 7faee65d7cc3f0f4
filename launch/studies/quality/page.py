"""The table of a comparison of lossy rules."""

from launch import tables

RULES = ("opt", "uno")


def table(results: dict[str, dict]) -> str:
  """The result as a Markdown table."""
  (result,) = results.values()
  interval = lambda pair: f" ({pair[0]:.3f}–{pair[1]:.3f})" if pair else ""
  rows = []
  for row in result["rows"]:
    both = lambda name, row=row: " / ".join(
      "–" if row[name][r] is None else f"{row[name][r]:.3f}" for r in RULES
    )
    rows.append(
      [
        f"{row['epsilon']}",
        f"{row['comparisons_won']:.3f}{interval(row['comparisons_won_ci'])}",
        f"{row['prompts_won']:.3f}{interval(row['prompts_won_ci'])}",
        f"{row['opt_against_lossless']:.3f} / "
        f"{row['uno_against_lossless']:.3f}",
        both("rejections_saved"),
        both("total_variation"),
      ]
    )
  return tables.table(
    [
      "ε", "comparisons won by OPT", "prompts won by OPT",
      "won against lossless, OPT / UNO", "rejections saved, OPT / UNO",
      "total variation, OPT / UNO",
    ],
    rows,
  )  # fmt: skip
