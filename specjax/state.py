"""The state of the decoding loop, its counters, and the record of a round.

Letters in shapes as in `specjax.types`.
"""

import dataclasses
import enum
from typing import Any

import jax
from jax import Array

from specjax.cache import Cache
from specjax.structs import struct
from specjax.tree import Topology, Tree
from specjax.types import Draft, ModelOutput, Sampling


class StopReason(enum.IntEnum):
  """Why a row ended.

  NAN_LOGITS: the target's logits for the next token, or the drafter's
  distribution (`Draft.log_probs`), were NaN.
  STOP_STRING: the host ended it because of its text
  (`specjax.runtime.stopping`).
  UNKNOWN_TOKEN: its text has an id outside 0..V-1.
  """

  RUNNING = 0
  STOP_TOKEN = 1
  LENGTH = 2
  NAN_LOGITS = 3
  STOP_STRING = 4
  UNKNOWN_TOKEN = 5


class Origin(enum.IntEnum):
  """Origin of a committed token: prompt, accepted, residual or bonus."""

  PROMPT = 0
  ACCEPTED = 1
  RESIDUAL = 2
  BONUS = 3


@struct
class Counters:
  """Per-row sums over the steps a row took part in.

  Attributes:
    num_target_calls: `i32[B]`, verification passes (without prefill).
    num_fed: `i32[B]`, summed widths of those passes in tokens, the same for all
      rows; see `Decoder.widths`.
    num_drafts: `i32[B]`, passes that verified any drafted token.
    num_drafted: `i32[B]`, drafted tokens: nodes that were not masked.
    num_accepted: `i32[B]`, emitted drafted tokens, without residual and bonus
      tokens.
    expected_accepted: `f32[B]`, the expectation of `num_accepted` given the
      drafts (Rao-Blackwellized).
    accept_counts: `i32[B, G + 1]`, how many steps emitted 0, 1, .., G drafted
      tokens.
    total_variation: `f32[B]`, summed over emitted tokens: the distance of each
      token's distribution from the target's (`Verification.total_variation`); 0
      for lossless rules, NaN if the rule is lossy and does not report it.
    rank_offered: `f32[B, C]`, expected number of visited nodes with a child of
      rank 0, .., C - 1 (in the order siblings were drawn).
    rank_accepted: `f32[B, C]`, expected number of steps to that child:
      `specjax.tree_search` builds trees from their ratio.
  """

  num_target_calls: Array
  num_fed: Array
  num_drafts: Array
  num_drafted: Array
  num_accepted: Array
  expected_accepted: Array
  accept_counts: Array
  total_variation: Array
  rank_offered: Array
  rank_accepted: Array

  @classmethod
  def zeros(cls, rows: int, tree: Tree) -> "Counters":
    """Zero counters for B rows."""
    count = lambda *more: jax.numpy.zeros((rows, *more), jax.numpy.int32)
    total = lambda *more: jax.numpy.zeros((rows, *more))
    return cls(
      num_target_calls=count(),
      num_fed=count(),
      num_drafts=count(),
      num_drafted=count(),
      num_accepted=count(),
      expected_accepted=total(),
      accept_counts=count(tree.max_depth + 1),
      total_variation=total(),
      rank_offered=total(tree.max_children),
      rank_accepted=total(tree.max_children),
    )


@struct
class Likeliest:
  """The target's most likely tokens where each token was emitted.

  Attributes:
    tokens: `i32[B, L, K]`, most likely first; stale where none was emitted.
    log_probs: `f32[B, L, K]`, the target's own, as `DecodeState.log_probs`.
    wanted: `bool[B]`, rows to record; the host may change it.
  """

  tokens: Array
  log_probs: Array
  wanted: Array

  @classmethod
  def zeros(cls, rows: int, columns: int, count: int) -> "Likeliest":
    """Empty records for B rows of L columns, K tokens each."""
    shape = (rows, columns, count)
    return cls(
      tokens=jax.numpy.zeros(shape, jax.numpy.int32),
      log_probs=jax.numpy.zeros(shape),
      wanted=jax.numpy.ones((rows,), bool),
    )


@struct
class DecodeState:
  """Everything the `while_loop` carries.

  Attributes:
    tokens: `i32[B, L]`, prompt and completion; stale from `length` on.
    origins: `i8[B, L]`, an `Origin` for each token.
    log_probs: `f32[B, L]`, the target's own log-probability (temperature 1, no
      truncation) of each emitted token, or None if not requested.
    likeliest: the most likely tokens at each, or None if not requested.
    prompt_length: `i32[B]`.
    length: `i32[B]`, the number of committed tokens.
    max_length: `i32[B]`, the length at which the row must end.
    max_depth: `i32[B]`, see `Context`; initially G, and the host may change it.
    stop_reason: `i32[B]`, a `StopReason`.
    stop_tokens: `i32[n]`, token ids that end a row.
    ignores_stop: `bool[B]`, rows that ignore stop tokens.
    keys: `key[B]`, one stream per row.
    sampling: the warp.
    target_cache: holds all committed tokens but the newest.
    drafter_state: the drafter's state.
    counters: sums for reports.
    num_steps: `i32[]`, rounds so far.
  """

  tokens: Array
  origins: Array
  log_probs: Array | None
  likeliest: Likeliest | None
  prompt_length: Array
  length: Array
  max_length: Array
  max_depth: Array
  stop_reason: Array
  stop_tokens: Array
  ignores_stop: Array
  keys: Array
  sampling: Sampling
  target_cache: Cache
  drafter_state: Any
  counters: Counters
  num_steps: Array

  @property
  def done(self) -> Array:
    """`bool[B]`, rows that have ended."""
    return self.stop_reason != StopReason.RUNNING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
  """A drafted and scored round, before verification.

  Attributes:
    draft: the draft.
    topology: its shape, no deeper than `DecodeState.max_depth` in any row.
    drafter_state: the drafter's state after it.
    output: the target's output at all F tokens.
    target_cache: the cache with all F tokens.
    logits: `f32[B, N + 1, V]`, the target's own, for real tokens only.
    target_log_probs: `f32[B, N + 1, V]`, the warped target's distributions.
    broken: `bool[B, N + 1]`, where distributions were NaN.
    num_fed: tokens the target was actually fed: F unless the decoder has
      narrower passes.
  """

  draft: Draft
  topology: Topology
  drafter_state: Any
  output: ModelOutput
  target_cache: Cache
  logits: Array
  target_log_probs: Array
  broken: Array
  num_fed: Array | int


@struct
class StepInfo:
  """Record of one step, for traces and tests.

  Attributes:
    draft, target_log_probs: from its `Round`.
    node_probs: from its `Verification`.
    node: `i32[B]`, the deepest accepted node, drawn from `node_probs`.
    tokens: `i32[B, G + 1]`, the emitted tokens, padded.
    num_emitted: `i32[B]`, how many of them were emitted.
    total_variation: from its `Verification`; if that has none, 0 for lossless
      rules and NaN for others.
  """

  draft: Draft
  target_log_probs: Array
  node_probs: Array
  node: Array
  tokens: Array
  num_emitted: Array
  total_variation: Array
