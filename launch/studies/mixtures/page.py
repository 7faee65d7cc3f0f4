"""The table of where drafting pays."""

from collections.abc import Mapping

from launch import tables
from launch.planning import mixtures


def table(results: dict[str, Mapping]) -> str:
  """By target, draft and batch size; slices that answer alike share a row."""
  rows: dict[tuple[str, ...], list[str]] = {}
  for line in next(iter(results.values()))["lines"]:
    draft = f"`{line['draft']}`" if line["draft"] else "free"
    for row in line["by_batch_size"]:
      cells = mixtures.cells(row)
      here = rows.setdefault((f"`{line['target']}`", draft, *cells), [])
      name = line["topology"]
      here.append(name if row["fits"] else f"{name} (does not fit)")
  return tables.table(
    ["target", "draft", "slice", *mixtures.HEAD],
    [
      [target, draft, ", ".join(slices), *cells]
      for (target, draft, *cells), slices in rows.items()
    ],
  )
