"""Ends rows from the host between rounds, for example at stop strings.

A stop string may span tokens, and a decoder sees only token ids. So the host
checks the new tokens after every round and decides where a row ends. Rows stay
independent.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.state import DecodeState, Origin, StopReason

# `tokens since the last call -> count`: how many to keep if the row ends within
# or right after them, else None.
Watch = Callable[[Sequence[int]], int | None]


class Stopping:
  """Stop strings of the rows of one running state.

  Attributes:
    done: whether every row has ended, as of the last `end_rows`.
  """

  def __init__(self, watches: Sequence[Watch | None], state: DecodeState):
    """Starts before the first round.

    Args:
      watches: one for each of the first rows, or None.
      state: before the first round.
    """
    self._watches = list(watches)
    self._seen = np.array(fetch(state.length))
    self.done = False

  def end_rows(self, state: DecodeState) -> DecodeState:
    """Ends rows by their watches; call it after every round.

    Tokens beyond the end are not counted in `num_accepted` and `accept_counts`;
    `expected_accepted` and `total_variation` include the whole last round.

    Args:
      state: after a round.

    Returns:
      The state, with these rows done (`StopReason.STOP_STRING`).
    """
    tokens, length, reason = map(
      np.array, fetch((state.tokens, state.length, state.stop_reason))
    )
    kept, some = length.copy(), False
    for row, watch in enumerate(self._watches):
      start, end = self._seen[row], length[row]
      if watch is None or start == end:
        continue
      count = watch(tokens[row, start:end].tolist())
      if count is not None:
        kept[row] = start + count
        reason[row] = StopReason.STOP_STRING
        self._watches[row], some = None, True
    self.done = bool((reason != StopReason.RUNNING).all())
    if some:
      state = self._ended(state, length, kept, reason)
    self._seen = kept
    return state

  def _ended(self, state, length, kept, reason) -> DecodeState:
    """The state cut to `kept`, `i32[B]`, and its counters with it."""
    origins, accepted, counts = map(
      np.array,
      fetch(
        (
          state.origins,
          state.counters.num_accepted,
          state.counters.accept_counts,
        )
      ),
    )
    for row in np.flatnonzero(kept < length):
      cut = origins[row, kept[row] : length[row]] == Origin.ACCEPTED
      whole = origins[row, self._seen[row] : length[row]] == Origin.ACCEPTED
      accepted[row] -= cut.sum()
      counts[row, whole.sum()] -= 1
      counts[row, whole.sum() - cut.sum()] += 1
    old = state.counters
    return dataclasses.replace(
      state,
      length=_like(state.length, kept),
      stop_reason=_like(state.stop_reason, reason),
      counters=dataclasses.replace(
        old,
        num_accepted=_like(old.num_accepted, accepted),
        accept_counts=_like(old.accept_counts, counts),
      ),
    )


def fetch(tree: Any) -> Any:
  """Copies arrays to the host, also from devices of other processes."""
  leaves = jax.tree.leaves(tree)
  if not all(x.is_fully_addressable for x in leaves):
    where: Any = leaves[0].sharding
    whole = NamedSharding(where.mesh, P())
    tree = jax.jit(lambda x: x, out_shardings=whole)(tree)
  return jax.device_get(tree)


def _like(old: jax.Array, new: np.ndarray) -> jax.Array:
  """Places a host array, equal in all processes, like an existing one."""
  return jax.make_array_from_callback(
    old.shape, old.sharding, lambda index: new[index]
  )
