"""EAGLE (Li et al., 2024): releases of its first and second sampling."""

import functools
from collections.abc import Iterator

import numpy as np

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  normal,
  point,
  ratio,
  tempered,
)

_EAGLE = "github.com/SafeAILab/EAGLE"


def _eagle1(
  draft: Law, target: Law, depth: int, *, temperature: float, stale: bool
) -> Iterator[Entry]:
  """Two children without replacement, tested in turn.

  The release before the mend also skips token 0, and tests a child once for
  every path through it; neither is in here.

  Args:
    draft, target: raw laws.
    depth: 1; a node and its children.
    temperature: of draft and tests. The token after an accepted child comes
      from the target's raw law,
    stale: or, if the elder was rejected, from what was left at the parent.
  """
  warp = tempered(temperature)
  p, q = warp(draft)(()), warp(target)(())
  for x, y in np.ndindex(len(p), len(p)):
    untried = p * (1 - point(x, len(p)))
    if x == y or not untried[y]:
      continue
    untried = normal(untried)
    weight = p[x] * untried[y]
    accept = ratio(q[x], p[x])
    yield weight * accept, (x,), target((x,))
    weight, left = weight * (1 - accept), normal(q - p)
    accept = ratio(left[y], untried[y])
    yield weight * accept, (y,), left if stale else target((y,))
    yield weight * (1 - accept), (), normal(left - untried)


def certain(
  draft: Law,
  target: Law,
  depth: int,
  *,
  temperature: float = 1.0,
  said: bool = False,
) -> Iterator[Entry]:
  """The two likeliest children, tested in turn.

  Args:
    draft, target: raw laws.
    depth: 1; a node and its children.
    temperature: of the tests; the token after an accepted child comes from the
      target's raw law.
    said: whether they are tested as drawn from the draft's law, not as certain.
  """
  p, left = draft(()), tempered(temperature)(target)(())
  weight = 1.0
  for x in np.argsort(-p, kind="stable")[:2].tolist():
    law = p if said else point(x, len(p))
    accept = ratio(left[x], law[x])
    yield weight * accept, (x,), target((x,))
    weight, left = weight * (1 - accept), normal(left - law)
  yield weight, (), left


def _eagle(name, where, finding, rounds, temperature=1.0) -> Method:
  return Method(
    name=f"{name}, T = {temperature:g}",
    source=f"{_EAGLE}, {where}",
    finding=finding,
    depth=1,
    rounds=functools.partial(rounds, temperature=temperature),
    warp=tempered(temperature),
  )


_MENDED = functools.partial(_eagle1, stale=False)
_BONUS = "the token after the last accepted one is drawn before the warp"

METHODS = (
  _eagle(
    "EAGLE-1, before the mend",
    "model/utils.py at 38d5327",
    "the token after a second child comes from the parent's residual",
    functools.partial(_eagle1, stale=True),
  ),
  _eagle(
    "EAGLE-1, mended", "eagle/model/utils.py at 08dc06c", "as RSD", _MENDED
  ),
  _eagle(
    "EAGLE-1, mended", "eagle/model/utils.py at 08dc06c", _BONUS, _MENDED, 0.5
  ),
  _eagle(
    "EAGLE-2",
    "eagle/model/utils.py at 8009b6d",
    "certain children, tested as such",
    certain,
  ),
  _eagle("EAGLE-2", "eagle/model/utils.py at 8009b6d", _BONUS, certain, 0.5),
)
