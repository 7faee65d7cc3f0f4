"""The types everything else is made of.

Letters in shapes: B rows, T fed tokens, S cache slots, L token-buffer length,
N drafted nodes of the tree (N + 1 with the root), G its depth, V vocabulary.
All laws are float32 log-probabilities (float64 when x64 is enabled and the
inputs are), with -inf for zero mass.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from specjax import cache as cache_lib
from specjax.cache import Cache
from specjax.siblings import Siblings
from specjax.tree import Tree

_struct = lambda cls: jax.tree_util.register_dataclass(
  dataclasses.dataclass(frozen=True, kw_only=True)(cls)
)


# ---------------------------------------------------------------- the models


@_struct
class ModelOutput:
  """What a model returns for T fed tokens.

  Attributes:
    logits: `f32[B, T, V]`; entry t is about the token after fed token t. Or
      `f32[B, W, V]`, of those that `logits_at` asks for.
    hidden: `f[B, T, D]`, the states that `logits` were read from, or None.
  """

  logits: Array
  hidden: Array | None = None


class ApplyFn(Protocol):
  """`LanguageModel.apply`."""

  def __call__(
    self,
    params: Any,
    tokens: Array,
    cache: Cache,
    *,
    positions: Array | None = None,
    mask: np.ndarray | None = None,
    logits_at: Array | None = None,
  ) -> tuple[ModelOutput, Cache]:
    """Feeds T tokens into slots `cache.length .. cache.length + T - 1`.

    Args:
      params: the model's parameters, any pytree.
      tokens: `i32[B, T]`.
      cache: from `init_cache`; slots at or beyond its length are stale.
      positions: `i32[B, T]`, by default `cache.length + arange(T)`.
      mask: static `bool[T, M]`, M >= T: which of the last M slots (ending with
        the T-th fed token) each fed token sees; all slots before those are
        visible. None is a causal chain.
      logits_at: `i32[B, W]`, which of the T tokens' logits are wanted; None for
        all. Prompts are fed with W = 0: nobody reads their logits, which may be
        the largest array of all.

    Returns:
      The output and the cache, its length raised by T. A token's logits depend
      on what it sees alone, even if a slot that it does not see holds NaN
      (`specjax.cache.contain`).
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
  """A causal model as two pure functions.

  Attributes:
    vocab_size: V, the last axis of the logits.
    init_cache: `(batch, slots) -> Cache`.
    apply: see `ApplyFn`.
    max_positions: positions the model was made for, or None if unbounded.
      Prompts and completions stay below; drafted nodes may be fed beyond, where
      no token is ever emitted, and whatever the model says there (NaN too)
      changes nothing but the speed.
  """

  vocab_size: int
  init_cache: Callable[[int, int], Cache]
  apply: ApplyFn
  max_positions: int | None = None


@_struct
class Params:
  """Parameters of the pair; what the jitted functions take first.

  Attributes:
    target: the target model's parameters.
    draft: the drafter's own parameters, or None if it has none.
  """

  target: Any
  draft: Any = None


# ------------------------------------------------------------ what is sampled


@_struct
class Sampling:
  """How the next-token law is made from logits, per row; all traced.

  Attributes:
    temperature: `f32[B]`; 0 is greedy.
    top_k: `i32[B]`; 0 keeps all tokens. None: the program truncates nothing
      so, and has no sort of the vocabulary; likewise below.
    top_p: `f32[B]` in (0, 1]; 1 keeps all tokens. Or None.
    min_p: `f32[B]` in [0, 1]; 0 keeps all tokens. Or None.
  """

  temperature: Array
  top_k: Array | None
  top_p: Array | None
  min_p: Array | None


@_struct
class Draft:
  """A proposed token tree and the laws it was really sampled from.

  Attributes:
    tokens: `i32[B, N + 1]`; node 0 is the last committed token.
    log_probs: `f32[B, N + 1, V]`; row n is the law that node n's children were
      drawn from, through `specjax.siblings.Siblings.child`. A leaf has no
      children: its row is all -inf (zero mass), so that "target minus draft" is
      the target's own law there. A law that may be NaN is healed before it is
      drawn from (`specjax.laws.heal`); a row with one here ends as NAN_LOGITS.
    noise: `f32[B, K, G + 1, V]`, for siblings `with_noise` only: token t of
      path k is `argmax(log p + noise[:, k, t - 1])`, Gumbel noise that a rule
      may share. Entry G is for the token after the last drafted one.
  """

  tokens: Array
  log_probs: Array
  noise: Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
  """What a rule says about a draft. It flips no coins.

  Attributes:
    node_probs: `f32[B, N + 1]`, the probability that node n is the deepest
      accepted node; rows sum to 1.
    next_log_probs: `i32[B] -> f32[B, V]`, the law of the token after node n,
      given that node n is the deepest accepted one. For a node of probability
      0 any law will do, but no NaN.
    total_variation: `f32[B, N + 1]`, or None for a lossless rule: the exact
      total variation between the law of the token that follows node n, over
      drafts and coins, given that the walk came to n, and the target's law.
  """

  node_probs: Array
  next_log_probs: Callable[[Array], Array]
  total_variation: Array | None = None


class VerifyFn(Protocol):
  """`Rule.verify`."""

  def __call__(
    self, tree: Tree, siblings: Siblings, draft: Draft, target_log_probs: Array
  ) -> Verification:
    """Maps laws to a law.

    Args:
      tree: the static tree.
      siblings: how the children of a node were drawn (static).
      draft: tokens and the draft's laws.
      target_log_probs: `f32[B, N + 1, V]`, the warped target's law of the token
        after each node.

    Returns:
      The `Verification`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """A verification rule.

  Attributes:
    name: as in `specjax.rules.get`, with its parameters if it has any.
    verify: the deterministic map from laws to a law.
    lossless: whether the output law is exactly the warped target's.
    check: `(tree, siblings) -> None`; raises ValueError, saying what it
      expects, for trees or sibling laws that the rule is not valid for.
    with_noise: whether it verifies drafts that carry noise. The noise of a
      position is the same in every round, so a rule may see it only if where
      a round ends does not depend on what was drafted beyond.
  """

  name: str
  verify: VerifyFn
  lossless: bool
  check: Callable[[Tree, Siblings], None]
  with_noise: bool = False


# ---------------------------------------------------------------- the drafter


@_struct
class Context:
  """What a drafter may look at when it proposes.

  Attributes:
    tokens: `i32[B, L]`, committed tokens, prompt included; stale from `length`.
    length: `i32[B]`, at least 1.
    sampling: the warp; the draft must be sampled from the warped law.
    keys: `key[B]`, fresh for this round; derive one per node with
      `specjax.sampling.drafted_node_keys`.
    row_keys: `key[B]`, the same in every round: for noise that belongs to a
      position of the text, whatever round it is drafted in.
  """

  tokens: Array
  length: Array
  sampling: Sampling
  keys: Array
  row_keys: Array


@_struct
class Commit:
  """What became of a draft.

  Attributes:
    start: `i32[B]`, the root's slot (committed length before the step, less 1).
    path: `i32[B, G + 1]`, nodes from the root to the deepest accepted one; the
      tail repeats the last.
    num_accepted: `i32[B]`, depth of the deepest accepted node.
    length: `i32[B]`, committed length after the step.
    target_output: the target's output at all N + 1 nodes.
  """

  start: Array
  path: Array
  num_accepted: Array
  length: Array
  target_output: ModelOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafter:
  """A way to propose; four pure functions and what is static about them.

  Attributes:
    name: for messages and reports.
    tree: the token tree that every proposal fills.
    siblings: how children of one node are drawn.
    init: `(params, batch, slots) -> state`.
    prefill: `(params, state, tokens i32[B, P], lengths i32[B]) -> state`.
    propose: `(params, state, target_cache, context) -> (Draft, state,
      target_cache)`. A drafter that runs on the target's own cache may write
      to slots at or beyond `context.length - 1`; all others pass it through.
    commit: `(params, state, Commit) -> state`, after verification.
    max_positions: positions the draft was made for, or None if unbounded.
    row_axes: `state -> pytree of int | None`: which axis of each array of the
      state is rows, so that it can be cut over a mesh; None for an array that
      all rows share, which no round may change. By default the state is made of
      `Cache`s alone.
  """

  name: str
  tree: Tree
  siblings: Siblings
  init: Callable[[Params, int, int], Any]
  prefill: Callable[[Params, Any, Array, Array], Any]
  propose: Callable[[Params, Any, Cache, Context], tuple[Draft, Any, Cache]]
  commit: Callable[[Params, Any, Commit], Any]
  max_positions: int | None = None
  row_axes: Callable[[Any], Any] = cache_lib.row_axes


# -------------------------------------------------------------- the decoder


class StopReason(enum.IntEnum):
  """Why a row ended.

  NAN_LOGITS: the target's logits for the next token were not numbers, or the
  drafter returned a law that was none (`Draft.log_probs`).
  """

  RUNNING = 0
  STOP_TOKEN = 1
  LENGTH = 2
  NAN_LOGITS = 3


class Origin(enum.IntEnum):
  """Where a committed token came from."""

  PROMPT = 0
  ACCEPTED = 1
  RESIDUAL = 2
  BONUS = 3


@_struct
class Counters:
  """Per-row sums over the steps a row took part in.

  Attributes:
    num_target_calls: `i32[B]`, verification passes (the prompt pass excluded).
    num_drafted: `i32[B]`, drafted tokens, N per step.
    num_accepted: `i32[B]`, drafted tokens that were emitted: those beyond a
      stop token or the length limit do not count, nor does the residual or
      bonus.
    expected_accepted: `f32[B]`, its expectation given the drafts: the
      Rao-Blackwellised `num_accepted`.
    accept_counts: `i32[B, G + 1]`, how many steps emitted 0, 1, .., G drafted
      tokens.
    total_variation: `f32[B]`, summed over emitted tokens: the distance of each
      token's law from the target's (`Verification.total_variation`); 0 for
      lossless rules.
    rank_offered: `f32[B, C]`, expected number of nodes the walk came to that
      have a child of rank 0, .., C - 1 (the order siblings were drawn in).
    rank_accepted: `f32[B, C]`, expected number of times it went on to that
      child. Their ratio is what `specjax.tree_search` builds trees from; for
      independent siblings a merged path counts for the sibling that goes on.
  """

  num_target_calls: Array
  num_drafted: Array
  num_accepted: Array
  expected_accepted: Array
  accept_counts: Array
  total_variation: Array
  rank_offered: Array
  rank_accepted: Array


@_struct
class DecodeState:
  """Everything the `while_loop` carries.

  Attributes:
    tokens: `i32[B, L]`, prompt and completion; stale from `length` on.
    origins: `i8[B, L]`, an `Origin` for each token.
    log_probs: `f32[B, L]`, the target's own log-probability (temperature 1, no
      truncation) of each emitted token, or None if not asked for.
    prompt_length: `i32[B]`.
    length: `i32[B]`, committed tokens.
    max_length: `i32[B]`, where the row must end.
    stop_reason: `i32[B]`, a `StopReason`.
    stop_tokens: `i32[n]`, token ids that end a row.
    keys: `key[B]`, one stream per row.
    sampling: the warp.
    target_cache: holds all committed tokens but the newest.
    drafter_state: the drafter's own.
    counters: sums for the report.
    num_steps: `i32[]`, rounds so far.
  """

  tokens: Array
  origins: Array
  log_probs: Array | None
  prompt_length: Array
  length: Array
  max_length: Array
  stop_reason: Array
  stop_tokens: Array
  keys: Array
  sampling: Sampling
  target_cache: Cache
  drafter_state: Any
  counters: Counters
  num_steps: Array

  @property
  def done(self) -> Array:
    """`bool[B]`."""
    return self.stop_reason != StopReason.RUNNING


@_struct
class StepInfo:
  """What one step did, for people and tests.

  Attributes:
    draft: the proposal.
    target_log_probs: `f32[B, N + 1, V]`, the warped target's laws.
    node_probs: `f32[B, N + 1]`, the rule's law of the deepest accepted node.
    node: `i32[B]`, the node drawn from it.
    tokens: `i32[B, G + 1]`, the emitted tokens.
    num_emitted: `i32[B]`, how many of them count.
    total_variation: `f32[B, N + 1]`, see `Verification`; 0 for lossless rules.
  """

  draft: Draft
  target_log_probs: Array
  node_probs: Array
  node: Array
  tokens: Array
  num_emitted: Array
  total_variation: Array
