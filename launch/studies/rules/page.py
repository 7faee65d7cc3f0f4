"""The tables about rules."""

import math
import statistics

from launch.tables import table
from specjax import rules


def efficiency(results: dict[str, dict]) -> str:
  """Block efficiency of every rule, of `launch.studies.rules.sweep`.

  Rules of one path are measured in the cells with one path only. A number with
  a star drafted more tokens than its column says (hub pairs at every node).
  """
  (result,) = results.values()
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
      text = f"{found['block_efficiency']:.2f}"
      text += "*" if found["num_drafted"] > budget else ""
      if found["block_efficiency_ci"]:
        text += " ({:.2f}–{:.2f})".format(*found["block_efficiency_ci"])
      if not found["lossless"]:
        text += f", TV {found['total_variation']:.2f}"
      row.append(text)
    rows.append(row)
  return table(head, rows)


def front(results: dict[str, dict]) -> str:
  """Who is on the front, and what it costs, of `launch.studies.rules.front`."""
  (result,) = results.values()
  shown = ("block_efficiency", "cross_entropy_ratio")
  rows = []
  for points in result["families"].values():
    for point in points:
      row = [f"`{point['rule']}`"]
      for key, digits in (
        ("acceptance", 3), ("total_variation", 3), ("above_front", 3),
        ("block_efficiency", 2), ("cross_entropy", 2),
        ("cross_entropy_ratio", 3),
      ):  # fmt: skip
        text = f"{point[key]:.{digits}f}".replace("-0.000", "0.000")
        if key in shown and point.get(f"{key}_ci"):
          ends = [f"{end:.{digits}f}" for end in point[f"{key}_ci"]]
          text += f" ({ends[0]}–{ends[1]})"
        row.append(text)
      rows.append(row)
  return table(
    [
      "rule", "accepted", "TV", "above the front", "tokens a call (95%)",
      "cross-entropy, nats", "over lossless (95%)",
    ],
    rows,
  )  # fmt: skip


def optimality(results: dict[str, dict]) -> str:
  """Share of the optimum, mean (minimum), of `rules.optimality`."""
  (result,) = results.values()
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
  return table(["V", "K", *(f"`{n}`" for n in names)], rows)


def joint(results: dict[str, dict]) -> str:
  """Share of the joint optimum, mean (least), of `rules.joint`: i.i.d. paths.

  A row a rule, the best first, a column each G and K.
  """
  (result,) = results.values()
  rows = [row for row in result["rows"] if row["siblings"] == "iid"]
  shape_of = lambda row: (row["num_speculative_tokens"], row["num_drafts"])
  shapes = sorted({shape_of(row) for row in rows})
  head = ["rule", *(f"G={g}, K={k}" for g, k in shapes), "all"]
  lines = [
    [f"`{name}`"]
    + [_share([r for r in rows if shape_of(r) == s], name) for s in shapes]
    + [_share(rows, name)]
    for name in by_share(rows)
  ]
  return table(head, lines)


def joint_others(results: dict[str, dict]) -> str:
  """The same for other siblings: a row each and rule, a column a kind of laws.

  Of each kind it is the optimum of drafts that are drawn so.
  """
  (result,) = results.values()
  kinds = list(dict.fromkeys(row["laws"] for row in result["rows"]))
  siblings = dict.fromkeys(row["siblings"] for row in result["rows"])
  lines = []
  for drawn in siblings:
    rows = [row for row in result["rows"] if row["siblings"] == drawn]
    if drawn == "iid":
      continue
    lines += [
      [drawn.replace("_", " "), f"`{name}`"]
      + [_share([r for r in rows if r["laws"] == k], name) for k in kinds]
      + [_share(rows, name)]
      for name in by_share(rows)
    ]
  return table(
    ["siblings", "rule", *(k.replace("_", " ") for k in kinds), "all"], lines
  )


def off_draft(results: dict[str, dict]) -> str:
  """What laws off the draft are worth, of `rules.off_draft`: a row a size."""
  (result,) = results.values()
  names = "vocab_size", "num_speculative_tokens", "num_drafts", "pairs"
  groups: dict[tuple, list[dict]] = {}
  for row in result["rows"]:
    size = tuple(str(row[name]) for name in names)
    groups.setdefault(size, []).append(row["share_of_optimum"])
  lines = [[*size, _mean_and_least(some, 4)] for size, some in groups.items()]
  return table(["V", "G", "K", "m", "share, mean (least)"], lines)


def by_share(rows: list[dict]) -> list[str]:
  """The rules of some rows of `rules.joint`, the best on average first."""
  names = dict.fromkeys(n for row in rows for n in row["share_of_optimum"])
  return sorted(
    names,
    key=lambda n: -statistics.fmean(s["mean"] for s in _shares_of(rows, n)),
  )


def _shares_of(rows: list[dict], name: str) -> list[dict]:
  """Those of a rule, of the rows whose drafts it takes."""
  shares = [row["share_of_optimum"] for row in rows]
  return [of_rule[name] for of_rule in shares if name in of_rule]


def _share(rows: list[dict], name: str) -> str:
  """A rule's share over the rows whose drafts it takes."""
  return _mean_and_least(_shares_of(rows, name), 3)


def _mean_and_least(shares: list[dict], digits: int) -> str:
  """Mean (least) over shares, which are of equally many models."""
  mean = statistics.fmean(share["mean"] for share in shares)
  least = min(share["minimum"] for share in shares)
  return f"{mean:.{digits}f} ({least:.{digits}f})"


def costs(results: dict[str, dict]) -> str:
  """Milliseconds (passes over the inputs), of `launch.studies.rules.costs`.

  One row a rule, one column a shape, at the vocabulary closest to 131,072 and
  the smallest batch that were measured.
  """
  (result,) = results.values()
  near = min(
    (c["vocab_size"] for c in result["cells"]),
    key=lambda v: abs(math.log(v / 131_072)),
  )
  rows_of = min(c["batch_size"] for c in result["cells"])
  cells = [
    c
    for c in result["cells"]
    if c["vocab_size"] == near and c["batch_size"] == rows_of
  ]
  shape_of = lambda c: (c["num_drafts"], c["num_speculative_tokens"])
  shapes = sorted({shape_of(c) for c in cells})
  rows = []
  for label, own in _by_rule(cells).items():
    found = {shape_of(c): c for c in own}
    rows.append(
      [label]
      + [
        f"{found[s]['milliseconds']:.1f} ({found[s]['ratio']:.1f}x)"
        if s in found
        else "–"
        for s in shapes
      ]
    )
  head = [f"V = {near:,}, B = {rows_of}", *(f"K={k}, G={g}" for k, g in shapes)]
  return table(head, rows)


def cost_limits(results: dict[str, dict], limit: float = 3.0) -> str:
  """In how many of the cells measured a rule costs at most `limit` passes."""
  (result,) = results.values()
  rows = []
  for label, own in _by_rule(result["cells"]).items():
    ratios = [c["ratio"] for c in own]
    most = max(own, key=lambda c: c["ratio"])
    rows.append(
      [
        label,
        str(len(own)),
        str(sum(ratio <= limit for ratio in ratios)),
        f"{statistics.median(ratios):.1f}",
        f"{most['ratio']:.1f} (V = {most['vocab_size']:,}, "
        f"K = {most['num_drafts']}, G = {most['num_speculative_tokens']}, "
        f"B = {most['batch_size']})",
      ]
    )
  return table(
    ["rule", "cells", f"within {limit:g} passes", "median", "most"], rows
  )


def _by_rule(cells: list[dict]) -> dict[str, list[dict]]:
  """Cells by rule and siblings, in words; without rules that are gone."""
  groups: dict[str, list[dict]] = {}
  for cell in cells:
    if cell["rule"].partition("(")[0] not in rules.RULES:
      continue
    drawn = "" if cell["siblings"] == "iid" else f", {cell['siblings']}"
    groups.setdefault(f"`{cell['rule']}`{drawn}", []).append(cell)
  return groups
