"""Prints the tables about rules from committed measurements, as Markdown.

efficiency (of `launch.rule_sweep`), optimality (of `launch.optimality`) and
costs (of `launch.benchmark --suite=rules`):

  python -m launch.rule_tables costs docs/measurements/rules/costs.json
"""

import json
import os
import pathlib
import sys


def _table(head: list[str], rows: list[list[str]]) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def efficiency(result: dict) -> str:
  """Block efficiency of every rule, of `launch.rule_sweep`.

  Rules of one path are measured in the cells with one path only. A number with
  a star drafted more tokens than its column says (hub pairs at every node).
  """
  cells = result["cells"]
  names = dict.fromkeys(name for cell in cells for name in cell["rules"])
  head = ["rule"]
  for cell in cells:
    shape = f"{cell['num_drafts']}x{cell['num_speculative_tokens']}"
    head.append(f"{shape}, T={cell['temperature']}")
  rows = []
  for name in names:
    row = [f"`{name}`"]
    for cell in cells:
      found = cell["rules"].get(name)
      budget = cell["num_drafts"] * cell["num_speculative_tokens"]
      if found is None or found["num_drafted"] < budget:
        row.append("–")
        continue
      low, high = found["block_efficiency_ci"]
      star = "*" if found["num_drafted"] > budget else ""
      text = f"{found['block_efficiency']:.2f}{star} ({low:.2f}–{high:.2f})"
      if not found["lossless"]:
        text += f", TV {found['total_variation']:.2f}"
      row.append(text)
    rows.append(row)
  return _table(head, rows)


def optimality(result: dict) -> str:
  """Share of the optimum, mean (minimum), of `launch.optimality`."""
  names = list(result["rows"][0]["share_of_optimum"])
  rows = [
    [f"{row['vocab_size']:,}", str(row["num_drafts"])]
    + [
      f"{row['share_of_optimum'][n]['mean']:.4f} "
      f"({row['share_of_optimum'][n]['minimum']:.4f})"
      for n in names
    ]
    for row in result["rows"]
  ]
  return _table(["V", "K", *(f"`{n}`" for n in names)], rows)


def costs(result: dict) -> str:
  """Milliseconds and passes over the inputs, of the benchmark's rule suite.

  One row a rule: the cells at V = 131,072 with the fewest and most nodes
  measured for every rule at batch size 1.
  """
  shapes = sorted(
    {
      (c["num_drafts"], c["num_speculative_tokens"])
      for c in result["cells"]
      if c["vocab_size"] == 131_072 and c["batch_size"] == 1
    }
  )
  found = {
    (c["rule"], c["siblings"], c["num_drafts"], c["num_speculative_tokens"]): c
    for c in result["cells"]
    if c["vocab_size"] == 131_072 and c["batch_size"] == 1
  }
  names = dict.fromkeys(key[:2] for key in found)
  rows = []
  for rule, siblings in names:
    label = f"`{rule}`" if siblings == "iid" else f"`{rule}`, {siblings}"
    row = [label]
    for shape in shapes:
      cell = found.get((rule, siblings, *shape))
      row.append(
        f"{cell['milliseconds']:.1f} ({cell['ratio']:.1f}x)" if cell else "–"
      )
    rows.append(row)
  return _table(["rule", *(f"K={k}, G={g}" for k, g in shapes)], rows)


TABLES = {"efficiency": efficiency, "optimality": optimality, "costs": costs}


def main(argv: list[str]) -> int:
  """`rule_tables TABLE MEASUREMENT.json`; returns the exit code."""
  if len(argv) != 3 or argv[1] not in TABLES or not os.path.isfile(argv[2]):
    print(
      f"usage: python -m launch.rule_tables {{{','.join(TABLES)}}} "
      "MEASUREMENT.json",
      file=sys.stderr,
    )
    return 2
  _, name, path = argv
  print(TABLES[name](json.loads(pathlib.Path(path).read_text("utf-8"))))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
