"""Prints the table of a study of drafts, as Markdown.

python -m launch.training.tables docs/measurements/drafts/shapes.jsonl
"""

import json
import pathlib
import statistics
import sys


def table(rows: list[dict]) -> str:
  """One row a draft, as `launch.draft_study` wrote them."""
  temperatures = list(rows[0]["decoding"])
  head = [
    "draft", "parameters", "steps", "seconds", "validation nats",
    "accepted, one token", "draft pass, ms", "of the target's",
  ]  # fmt: skip
  for temperature in temperatures:
    head += [f"block efficiency, T={temperature}", "tok/s", "speed-up"]
  lines = [head, ["---"] * len(head)]
  target = statistics.median(row["target_pass_seconds"] for row in rows)
  for row in rows:
    seconds = row["draft_pass_seconds"]
    cells = [
      f"`{row['name']}`",
      f"{row['parameters']:,}",
      f"{row['num_steps']:,}",
      f"{row['training_seconds']:,.0f}",
      f"{row['validation_loss']:.3f}",
      f"{row['validation_acceptance']:.3f}",
      f"{1e3 * seconds:.3f}",
      f"{seconds / target:.3f}",
    ]
    for temperature in temperatures:
      found = row["decoding"][temperature]
      cells += [
        _with_interval(found, "block_efficiency"),
        f"{found['tokens_per_second']:.0f}",
        _with_interval(found, "speedup"),
      ]
    lines.append(cells)
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _with_interval(found: dict, name: str) -> str:
  interval = found[f"{name}_ci"]
  text = f"{found[name]:.2f}"
  return text + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")


def main(argv: list[str]) -> int:
  """`tables FILE.jsonl`; returns the exit code."""
  if len(argv) != 2 or not pathlib.Path(argv[1]).is_file():
    print("usage: python -m launch.training.tables FILE.jsonl", file=sys.stderr)
    return 2
  lines = pathlib.Path(argv[1]).read_text("utf-8").splitlines()
  print(table([json.loads(line) for line in lines]))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
