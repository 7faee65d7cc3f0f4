"""Prefill: fills the caches with prompts, and appends to a row's text.

`begin` fills the caches of fresh rows, `extend` those of a row that has a text
already. Both feed tokens to the target as a chain, pass them to the drafter
(`Commit`), and leave the newest token to be fed as the next round's root. Long
texts are fed in chunks of one width, by one program.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax import cache as cache_lib
from specjax import recurrent as recurrent_lib
from specjax.state import Counters, DecodeState, Likeliest, Origin, StopReason
from specjax.structs import struct
from specjax.tree import take_node
from specjax.types import Commit, Drafter, LanguageModel, Params, Sampling

# The most tokens of a row per pass: enough to be bound by compute rather than
# by reading weights.
_CHUNK = 256


@struct
class Prompts:
  """Checked prompts of B rows, with their settings (see `Decoder.init`).

  Attributes:
    tokens: `i32[B, P]`, right-padded with any ids.
    lengths: `i32[B]`.
    keys: `key[B]`, a stream per row.
    max_new_tokens: `i32[B]`.
    sampling: the warp.
    ignores_stop: `bool[B]`, rows that ignore stop tokens.
    inputs: the encoders' inputs, or None.
    stop_tokens: `i32[n]`, shared by all rows.
  """

  tokens: Array
  lengths: Array
  keys: Array
  max_new_tokens: Array
  sampling: Sampling
  ignores_stop: Array
  inputs: Any
  stop_tokens: Array


def slots(target: LanguageModel, drafter: Drafter, buffer_length: int) -> int:
  """Slots of a row's caches: for its text and a whole draft beyond it."""
  spare = _spare(target, drafter, buffer_length)
  return buffer_length + drafter.tree.num_fed + spare


def _spare(target: LanguageModel, drafter: Drafter, buffer_length: int) -> int:
  """Extra slots, so that the last chunk may begin at the text's end.

  Only recurrent states need them: otherwise the chunk begins earlier and feeds
  some tokens again.
  """
  has_states = target.has_states or drafter.has_states
  return min(_CHUNK, buffer_length) if has_states else 0


def begin(
  target: LanguageModel,
  drafter: Drafter,
  params: Params,
  prompts: Prompts,
  drafter_state: Any,
  *,
  buffer_length: int,
  vocab_size: int,
  with_log_probs: bool,
  num_likeliest: int,
) -> DecodeState:
  """The state after the prompts, before the first round."""
  count, width = prompts.tokens.shape
  tree = drafter.tree
  lengths = jnp.clip(prompts.lengths, 1, width)
  columns = buffer_length + tree.max_depth + 1
  # Replace the caller's padding, which may be outside the models' range.
  tokens = jnp.where(
    jnp.arange(width) < lengths[:, None], prompts.tokens, prompts.tokens[:, :1]
  ).astype(jnp.int32)
  cache = target.new_cache(
    params.target, count, slots(target, drafter, buffer_length), prompts.inputs
  )
  likeliest = None
  if num_likeliest:
    likeliest = Likeliest.zeros(count, columns, num_likeliest)
  # Copied: the state may be donated, but the arguments are the caller's.
  copied = lambda arrays: jax.tree.map(jnp.copy, arrays)
  state = DecodeState(
    tokens=jnp.pad(tokens, ((0, 0), (0, columns - width))),
    origins=jnp.zeros((count, columns), jnp.int8),
    log_probs=jnp.zeros((count, columns)) if with_log_probs else None,
    likeliest=likeliest,
    prompt_length=copied(lengths),
    length=copied(lengths),
    max_length=copied(lengths),
    max_depth=jnp.full((count,), tree.max_depth, jnp.int32),
    stop_reason=jnp.zeros((count,), jnp.int32),
    stop_tokens=copied(prompts.stop_tokens),
    ignores_stop=copied(prompts.ignores_stop),
    keys=copied(prompts.keys),
    sampling=copied(prompts.sampling),
    target_cache=cache,
    drafter_state=drafter_state,
    counters=Counters.zeros(count, tree),
    num_steps=jnp.zeros((), jnp.int32),
  )
  read = cache_lib.slots_for((cache, drafter_state), width, buffer_length)
  state = _feed(target, drafter, params, state, 0, width, read)
  # Unchecked under jit: a row without a text ends at once.
  budget = jnp.where(prompts.lengths == lengths, prompts.max_new_tokens, 0)
  return _with_budget(state, budget, buffer_length, vocab_size)


def cut(
  state: DecodeState, keep: Array | int, blank: Any, given: Prompts
) -> DecodeState:
  """Cuts a row back to its first tokens; the rest is as in a fresh row.

  Args:
    state: of one row.
    keep: `i32[]`, tokens to keep, at most `state.length`.
    blank: the drafter's state of a fresh row, whose caches are not used.
    given: the row's next text, which is not fed yet.
  """
  reset = functools.partial(recurrent_lib.reset, keep=jnp.asarray(keep))
  kept = cache_lib.over_caches(
    lambda new, old: old, blank, _with_states(reset, state.drafter_state)
  )
  depth = state.counters.accept_counts.shape[1] - 1
  likeliest = state.likeliest
  if likeliest is not None:
    likeliest = Likeliest.zeros(*likeliest.tokens.shape)
  return dataclasses.replace(
    state,
    likeliest=likeliest,
    length=jnp.minimum(jnp.asarray(keep, jnp.int32), state.length),
    origins=jnp.zeros_like(state.origins),
    log_probs=jax.tree.map(jnp.zeros_like, state.log_probs),
    max_depth=jnp.full_like(state.max_depth, depth),
    ignores_stop=given.ignores_stop,
    keys=given.keys,
    target_cache=_with_states(reset, state.target_cache),
    drafter_state=kept,
  )


def _with_states(function: Callable[..., Any], tree: Any, *more: Any) -> Any:
  """Maps `function` over the recurrent states of corresponding caches."""

  def of(cache, *others):
    if cache.recurrent is None:
      return cache
    now = function(cache.recurrent, *(other.recurrent for other in others))
    return cache.replace(recurrent=now)

  return cache_lib.over_caches(of, tree, *more)


def extend(
  target: LanguageModel,
  drafter: Drafter,
  params: Params,
  state: DecodeState,
  tokens: Array,
  count: Array,
  *,
  vocab_size: int,
  max_new_tokens: Array,
  sampling: Sampling | None,
  slots: int | None = None,
) -> DecodeState:
  """A state of one row with tokens appended; see `Decoder.extend`."""
  tree, width = drafter.tree, len(tokens)
  columns = state.tokens.shape[1]
  buffer_length = columns - tree.max_depth - 1
  before = state.length
  # Unchecked under jit: tokens that do not fit are dropped as a whole.
  fits = (count <= width) & (before + count <= buffer_length)
  count = jnp.where(fits, count, 0)  # [1]
  at = jnp.arange(columns) - before[:, None]  # [1, L]
  is_new = (at >= 0) & (at < count[:, None])
  given = tokens[jnp.clip(at, 0, width - 1)]
  origins = jnp.where(is_new, Origin.PROMPT, state.origins)
  state = dataclasses.replace(
    state,
    tokens=jnp.where(is_new, given, state.tokens).astype(jnp.int32),
    origins=origins.astype(jnp.int8),
    prompt_length=before + count,
    length=before + count,
    stop_reason=jnp.zeros_like(state.stop_reason),
    sampling=sampling or state.sampling,
    counters=Counters.zeros(1, tree),
  )
  state = _feed(target, drafter, params, state, before, width, slots)
  budget = jnp.where(count > 0, max_new_tokens, 0)
  return _with_budget(state, budget, buffer_length, vocab_size)


def _feed(
  target: LanguageModel,
  drafter: Drafter,
  params: Params,
  state: DecodeState,
  known: Array | int,
  width: int,
  read_slots: int | None,
) -> DecodeState:
  """Feeds all tokens of the text but the newest to the caches.

  `known: i32[B]` tokens were there before, all fed but the newest (0: the rows
  are fresh); at most `width` are new. Passes read `read_slots` slots.
  """
  rows, columns = state.tokens.shape
  num_refed = min(drafter.num_refed, 2 * drafter.tree.max_depth + 2)
  is_fresh, in_chunks = isinstance(known, int), width > _CHUNK
  # If a text continues, its newest tokens are fed again.
  more = 0 if is_fresh and not in_chunks else num_refed
  spare = _spare(target, drafter, columns - drafter.tree.max_depth - 1)
  text = jnp.pad(state.tokens, ((0, 0), (0, spare)))
  chunk_width = math.ceil(width / max(math.ceil(width / _CHUNK), 1))
  fed = min(chunk_width + more, columns + spare)
  known = jnp.broadcast_to(jnp.asarray(known, jnp.int32), (rows,))
  caches = state.target_cache, state.drafter_state
  caches = cache_lib.with_read_slots(caches, read_slots)
  if is_fresh:  # recurrent states keep the tokens to be fed again pending
    room = drafter.tree.num_fed + max(num_refed - 2, 0)
    more_room = functools.partial(recurrent_lib.widen, width=room)
    caches = (_with_states(more_room, caches[0]), caches[1])
  first = lambda known: jnp.clip(known - num_refed, 0, text.shape[1] - fed)

  def chunk(carry):
    cache, drafter_state, known, start = carry
    # A finished row repeats its last chunk while others continue.
    start = jnp.where(known < state.length, first(known), start)
    length = jnp.minimum(start + fed, state.length)
    window = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, fed))(
      text, start
    )
    inside = np.arange(fed) < (length - start)[:, None]
    window = jnp.where(inside, window, window[:, :1])
    output, cache = target.apply(
      params.target,
      window,
      cache.replace(length=start),
      logits_at=jnp.zeros((rows, 0), jnp.int32),
    )
    drafter_state = drafter.prefill(
      params,
      drafter_state,
      Commit(
        tokens=window,
        start=start,
        path=jnp.broadcast_to(jnp.arange(fed, dtype=jnp.int32), window.shape),
        length=length,
        newest=take_node(window, length - 1 - start),
        target_output=output,
        num_refed=jnp.maximum(known - 1 - start, 0),
      ),
    )
    return cache.replace(length=length - 1), drafter_state, length, start

  wide = functools.partial(recurrent_lib.widen, width=fed)
  carry = (*_with_states(wide, caches), known, first(known))
  if in_chunks:
    kinds = jax.eval_shape(chunk, carry)
    carry = jax.tree.map(lambda x, kind: x.astype(kind.dtype), carry, kinds)
    unfinished = lambda carry: jnp.any(carry[2] < state.length)
    carry = lax.while_loop(unfinished, chunk, carry)
  else:
    carry = chunk(carry)

  # Room for the newest tokens, which are fed again if the text continues.
  folded = lambda now, before: recurrent_lib.fold(
    now, state.length - num_refed, before.width
  )
  cache, drafter_state = cache_lib.with_read_slots(
    _with_states(folded, carry[:2], caches), None
  )
  return dataclasses.replace(
    state,
    target_cache=cache.replace(length=state.length - 1),
    drafter_state=drafter_state,
  )


def _with_budget(
  state: DecodeState, max_new_tokens: Array, buffer_length: int, vocab_size: int
) -> DecodeState:
  """Sets each row's budget; rows without a budget or a text end at once."""
  room = buffer_length - state.length  # subtracted, as a sum could wrap around
  max_length = state.length + jnp.minimum(max_new_tokens, room)
  ended = jnp.where(
    max_length > state.length, StopReason.RUNNING, StopReason.LENGTH
  )
  # Under jit the tokens were not checked.
  unknown = (state.tokens < 0) | (state.tokens >= vocab_size)
  unknown &= np.arange(state.tokens.shape[1]) < state.length[:, None]
  ended = jnp.where(unknown.any(axis=1), StopReason.UNKNOWN_TOKEN, ended)
  return dataclasses.replace(
    state, max_length=max_length, stop_reason=ended.astype(jnp.int32)
  )
