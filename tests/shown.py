"""Printed tables, of which pages show some rows."""

import itertools


def rows_of(table: str, page: str) -> list[str]:
  """The rows that a page shows of a table: as printed, in its order."""
  head, line, *rows = table.strip().splitlines()
  _, found, after = page.partition(f"{head}\n{line}\n")
  assert found, f"the page has no table {head}"
  lines = after.split("\n")
  shown = [*itertools.takewhile(lambda x: x.startswith("| "), lines)]
  assert shown
  assert shown == [row for row in rows if row in shown]
  return shown
