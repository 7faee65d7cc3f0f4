"""Suggestions for mistyped names: "did you mean ...?"."""

import difflib
from collections.abc import Iterable


def guess(
  name: str, known: Iterable[str], *, write: str = "{!r}", cutoff: float = 0.6
) -> str:
  """` (did you mean NAME?)` of the nearest of the known names, or nothing.

  Args:
    name: what was written.
    known: what could have been.
    write: how a name is written there, as in `/{}`.
    cutoff: how near it must be, 1 being equal.
  """
  near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
  return f" (did you mean {write.format(near[0])}?)" if near else ""
