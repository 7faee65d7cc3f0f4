"""SpecTr-GBV (Lin et al., 2026) as its authors released it."""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from launch.studies.audit.shape import Entry, Law, Method, normal, paths

_TINY = 1e-20  # the decoder's own


class _State(NamedTuple):
  """Carry of the decoder from test to test."""

  weight: float
  accepted: tuple[int, ...] = ()
  drafted: float = 1.0  # probability of the accepted tokens, draft
  aimed: float = 1.0  # the same, target
  failed: frozenset = frozenset()
  done: bool = False


def _chance(tokens, p_path, q_path, draft, target, depth, count) -> float:
  """With what probability a test of these first tokens passes."""
  miss = lambda x: (1 - x) ** count
  if len(tokens) == depth:
    cap = min(p_path / (q_path + _TINY), 1)
    chance = q_path * (1 - miss(cap)) / (1 - miss(p_path) + _TINY)
  else:
    p, q = p_path * draft(tokens), q_path * target(tokens)
    caps = np.minimum(p / (q + _TINY), 1)
    wanted = (q * miss(caps)).sum() - q_path * miss(
      min(p_path / (q_path + _TINY), 1)
    )
    offered = 1 - miss(p_path) - (q * (1 - miss(caps))).sum()
    chance = wanted / (offered + _TINY)
  return min(max(chance, 0.0), 1.0)


def _tests(state: _State, tokens, draft, target, count) -> Iterator[_State]:
  """One path's tests: of what is longer than accepted so far, to the end."""
  states = [state]
  p_path = q_path = 1.0
  for length in range(1, len(tokens) + 1):
    p_path *= draft(tokens[: length - 1])[tokens[length - 1]]
    q_path *= target(tokens[: length - 1])[tokens[length - 1]]
    prefix, last = tokens[:length], length == len(tokens)
    # Tests start behind what an earlier path had accepted, whatever it was.
    if not last and length <= len(state.accepted):
      continue
    chance = _chance(prefix, p_path, q_path, draft, target, len(tokens), count)
    after = []
    for one in states:
      if not last and prefix in one.failed:
        after.append(one)
        continue
      after.append(
        one._replace(
          weight=one.weight * chance,
          accepted=prefix,
          drafted=p_path,
          aimed=q_path,
          done=last,
        )
      )
      failed = one.failed if last else one.failed | {prefix}
      after.append(
        one._replace(weight=one.weight * (1 - chance), failed=failed)
      )
    states = [one for one in after if one.weight > 0]
  yield from states


def _rounds(
  draft: Law, target: Law, depth: int, *, count: int
) -> Iterator[Entry]:
  """SpecTr-GBV of the authors' repository: K paths, tested as blocks.

  The paper lets later rounds have a modified target; the released decoder
  starts every round from the target itself. Where its residual has no mass it
  stops with an error; here the target's law is drawn from. Of the paper the
  abstract and its reviews were read.
  """
  for drafts in itertools.product(paths(draft, depth), repeat=count):
    states = [_State(float(np.prod([weight for weight, _ in drafts])))]
    for _, tokens in drafts:
      states = [
        after
        for one in states
        for after in (
          [one] if one.done else _tests(one, tokens, draft, target, count)
        )
      ]
    for one in states:
      law = target(one.accepted)
      if not one.done:
        aimed = one.aimed * law
        cap = one.drafted * draft(one.accepted) / (aimed + _TINY)
        left = aimed * (1 - np.minimum(cap, 1) ** count)
        law = normal(left) if left.sum() > 1e-15 else law
      yield one.weight, one.accepted, law


METHODS = tuple(
  Method(
    name=f"SpecTr-GBV, release, K = {count}",
    source="github.com/junemily/SpecTr-GBV, src/engine.py at e399f44; "
    "arXiv 2604.25925 (abstract)",
    finding="greedy block verification without its modified target",
    rounds=functools.partial(_rounds, count=count),
  )
  for count in (1, 2)
)
