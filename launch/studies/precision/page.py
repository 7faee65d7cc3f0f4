"""The table of targets in few bits, beside the target."""

import pathlib

from launch import tables


def table(results: dict[str, dict]) -> str:
  """Results by their files, as a Markdown table."""
  rows = []
  for path, result in results.items():
    for row in result["rows"]:
      ends = row["kl_ci"]
      interval = f" ({ends[0]:.2g}–{ends[1]:.2g})" if ends else ""
      rows.append(
        [
          pathlib.Path(path).stem,
          f"`{row['precision']}`",
          f"{row['weight_bytes'] / 1e6:.1f}",
          f"{row['kl']:.2g}{interval}" if row["kl"] > 1e-6 else "0",
          f"{row['total_variation']:.4f}",
          f"{row['greedy_agreement']:.4f}",
          f"{row['perplexity']:.3f}",
        ]
      )
  return tables.table(
    [
      "target", "stored as", "weights, MB", "KL, nats a token",
      "total variation", "greedy agreement", "perplexity",
    ],
    rows,
  )  # fmt: skip
