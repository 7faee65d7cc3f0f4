"""Reads completions from a state, whole or token by token."""

import dataclasses
import math
from typing import Any

from specjax.runtime.stopping import fetch
from specjax.state import DecodeState, Origin, StopReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """The completion of one prompt, with its counters.

  Attributes:
    token_ids: emitted tokens, a stop token included.
    origins: an `Origin` per token.
    stop_reason: "stop_token", "length", "nan_logits", "stop_string" or
      "unknown_token".
    num_target_calls, num_fed, num_drafted, num_accepted, expected_accepted,
      total_variation, accept_counts: see `specjax.state.Counters`.
  """

  token_ids: list[int]
  origins: list[int]
  stop_reason: str
  num_target_calls: int
  num_fed: int
  num_drafted: int
  num_accepted: int
  expected_accepted: float
  total_variation: float | None
  accept_counts: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
  """An emitted token of a stream.

  Attributes:
    prompt: index of its prompt.
    token_id: the token.
    origin: ACCEPTED from the draft, or drawn by the target: RESIDUAL after a
      rejection, BONUS after a fully accepted draft.
  """

  prompt: int
  token_id: int
  origin: Origin


def completions(state: DecodeState, count: int) -> list[Completion]:
  """Reads the first `count` rows of a final state."""
  small: dict[str, Any] = dict(target_cache=None, drafter_state=None, keys=None)
  state = dataclasses.replace(state, **small)
  state = fetch(state)
  c = state.counters
  done = []
  for row in range(count):
    distance = float(c.total_variation[row])
    part = slice(int(state.prompt_length[row]), int(state.length[row]))
    done.append(
      Completion(
        token_ids=state.tokens[row, part].tolist(),
        origins=state.origins[row, part].tolist(),
        stop_reason=StopReason(int(state.stop_reason[row])).name.lower(),
        num_target_calls=int(c.num_target_calls[row]),
        num_fed=int(c.num_fed[row]),
        num_drafted=int(c.num_drafted[row]),
        num_accepted=int(c.num_accepted[row]),
        expected_accepted=float(c.expected_accepted[row]),
        total_variation=None if math.isnan(distance) else distance,
        accept_counts=c.accept_counts[row].tolist(),
      )
    )
  return done
