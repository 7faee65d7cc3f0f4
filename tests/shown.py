"""What pages show: rows and columns of printed tables, whole figures."""

import itertools


def _cells(line: str) -> list[str]:
  return [cell.strip() for cell in line.strip("|").split("|")]


def _places(some: list[str], head: list[str]) -> list[int] | None:
  """Places of columns among others, in their order; None if one is missing."""
  places, start = [], 0
  for name in some:
    if name not in head[start:]:
      return None
    places.append(head.index(name, start))
    start = places[-1] + 1
  return places


def rows_of(table: str, page: str) -> list[str]:
  """The rows that a page shows of a table: as printed, in its order."""
  head, _, *rows = map(_cells, table.strip().splitlines())
  assert head
  groups = itertools.groupby(page.splitlines(), lambda x: x.startswith("|"))
  for first, _, *lines in (list(group) for is_row, group in groups if is_row):
    places = _places(_cells(first), head)
    if places is None:
      continue
    shown = [*map(_cells, lines)]
    printed = [[row[place] for place in places] for row in rows]
    if shown and shown == [row for row in printed if row in shown]:
      return lines
  raise AssertionError(f"the page shows no rows of {table}")


def is_whole(figure) -> bool:
  """True if nothing of a figure that was drawn lies outside of it."""
  box, (wide, high) = figure.get_tightbbox(), figure.get_size_inches()
  slack = 3 / 72  # three points, which boxes of labels have around them
  low, top = min(box.x0, box.y0), max(box.x1 - wide, box.y1 - high)
  return low > -slack and top < slack
