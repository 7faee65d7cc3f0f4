"""Prefill: reads prompts into the caches, and appends to a row's text.

`begin` fills the caches of fresh rows, `extend` those of a row that has a text
already. Both feed tokens to the target as a chain, tell the drafter of them
(`Commit`), and leave the newest token to be fed as the next round's root. Many
tokens are fed in chunks of one width, by one program: what reading takes of
memory and of compilation does not grow with a prompt, and what is allocated
beyond the longest is not read.
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
from specjax.cache import Cache
from specjax.state import Counters, DecodeState, Likeliest, Origin, StopReason
from specjax.types import Commit, Drafter, LanguageModel, Params, Sampling

# Tokens of a row that are read at once, at most: chunks are of one width, and
# as many as there must be. Wide enough that a pass is bound by
# arithmetic and not by the weights' way from memory.
_CHUNK = 256


def begin(
  target: LanguageModel,
  drafter: Drafter,
  params: Params,
  prompts: Array,
  lengths: Array,
  rng_key: Array,
  *,
  buffer_length: int,
  vocab_size: int,
  max_new_tokens: Array,
  sampling: Sampling,
  stop_tokens: Array,
  inputs: Any,
  drafter_state: Any,
  with_log_probs: bool,
  num_likeliest: int,
) -> DecodeState:
  """The state after the prompts; arguments as `Decoder.init` checked them.

  Args:
    target, drafter: of the decoder.
    params: parameters of both models.
    prompts, lengths, buffer_length, max_new_tokens, sampling, inputs: as
      `Decoder.init`'s.
    vocab_size: V.
    rng_key: `key[B]`.
    stop_tokens: `i32[n]`.
    drafter_state: from `Drafter.init`.
    with_log_probs, num_likeliest: see `Decoder`.
  """
  count, width = prompts.shape
  tree = drafter.tree
  # Under jit nothing was checked: a row without a text ends at once.
  is_text = (lengths >= 1) & (lengths <= width)
  lengths = jnp.clip(lengths, 1, width)
  columns = buffer_length + tree.max_depth + 1
  # Whatever the caller padded with is replaced: models may not know it.
  prompts = jnp.where(
    jnp.arange(width) < lengths[:, None], prompts, prompts[:, :1]
  ).astype(jnp.int32)
  cache = target.new_cache(
    params.target, count, buffer_length + tree.num_fed, inputs
  )
  # Copies: the state is made to be donated, the arguments are the caller's.
  copied = lambda arrays: jax.tree.map(jnp.copy, arrays)
  state = DecodeState(
    tokens=jnp.pad(prompts, ((0, 0), (0, columns - width))),
    origins=jnp.zeros((count, columns), jnp.int8),
    log_probs=jnp.zeros((count, columns)) if with_log_probs else None,
    likeliest=Likeliest.zeros(count, columns, num_likeliest)
    if num_likeliest
    else None,
    prompt_length=copied(lengths),
    length=copied(lengths),
    max_length=copied(lengths),
    max_depth=jnp.full((count,), tree.max_depth, jnp.int32),
    stop_reason=jnp.zeros((count,), jnp.int32),
    stop_tokens=copied(stop_tokens),
    ignores_stop=jnp.zeros((count,), bool),
    keys=copied(rng_key),
    sampling=copied(sampling),
    target_cache=cache,
    drafter_state=drafter_state,
    counters=Counters.zeros(count, tree, target.num_counted),
    num_steps=jnp.zeros((), jnp.int32),
  )
  state = _read(target, drafter, params, state, 0, width)
  budget = jnp.where(is_text, max_new_tokens, 0)
  return _asked(state, budget, buffer_length, vocab_size)


def cut(
  state: DecodeState, keep: Array | int, blank: Any, rng_key: Array
) -> DecodeState:
  """The row cut back to its first tokens, with all else as in a fresh row.

  Args:
    state: of one row.
    keep: `i32[]`, tokens that are kept, at most `state.length`.
    blank: the drafter's state of a fresh row, whose caches are not used.
    rng_key: `key[1]`, stream of the row's next text.
  """
  emptied = functools.partial(recurrent_lib.emptied, keep=jnp.asarray(keep))
  kept = cache_lib.over_caches(
    lambda new, old: old, blank, _with_states(emptied, state.drafter_state)
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
    log_probs=None
    if state.log_probs is None
    else jnp.zeros_like(state.log_probs),
    max_depth=jnp.full_like(state.max_depth, depth),
    keys=rng_key,
    target_cache=_with_states(emptied, state.target_cache),
    drafter_state=kept,
  )


def _is_cache(node: Any) -> bool:
  return isinstance(node, Cache)


def _with_states(function: Callable[..., Any], tree: Any, *more: Any) -> Any:
  """A pytree whose caches have other recurrent states.

  `function` takes those of the caches in one place, of `tree` and of `more`.
  """
  of = lambda *caches: caches[0].replace(
    recurrent=function(*(cache.recurrent for cache in caches))
  )
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
) -> DecodeState:
  """A state of one row with tokens appended; see `Decoder.extend`.

  Args:
    target, drafter: of the decoder.
    params: parameters of both models.
    state: with one row.
    tokens: `i32[P]`, right-padded with anything.
    count: `i32[]`, how many of them count.
    vocab_size: V.
    max_new_tokens: `i32[]`.
    sampling: of one row; None keeps it.
  """
  tree, width = drafter.tree, len(tokens)
  columns = state.tokens.shape[1]
  buffer_length = columns - tree.max_depth - 1
  before = state.length
  # Under jit nothing was checked: what does not fit is not taken in part.
  fits = (count <= width) & (before + count <= buffer_length)
  count = jnp.where(fits, count, 0)  # [1]
  at = jnp.arange(columns) - before[:, None]  # [1, L]
  is_new = (at >= 0) & (at < count[:, None])
  given = tokens[jnp.clip(at, 0, width - 1)]
  written = jnp.where(is_new, given, state.tokens).astype(jnp.int32)
  origins = jnp.where(is_new, Origin.PROMPT, state.origins)
  state = dataclasses.replace(
    state,
    tokens=written,
    origins=origins.astype(jnp.int8),
    prompt_length=before + count,
    length=before + count,
    stop_reason=jnp.zeros_like(state.stop_reason),
    sampling=sampling or state.sampling,
    counters=Counters.zeros(1, tree, target.num_counted),
  )
  state = _read(target, drafter, params, state, before, width)
  budget = jnp.where(count > 0, max_new_tokens, 0)
  return _asked(state, budget, buffer_length, vocab_size)


def _read(
  target: LanguageModel,
  drafter: Drafter,
  params: Params,
  state: DecodeState,
  known: Array | int,
  width: int,
) -> DecodeState:
  """The state whose caches hold all of its text but the newest token.

  Args:
    target, drafter: of the decoder.
    params: parameters of both models.
    state: whose `tokens` and `length` are those of the text.
    known: `i32[B]`, tokens of it that were read before, of which the newest was
      not fed; 0 for fresh rows.
    width: tokens that are new at most.
  """
  rows, columns = state.tokens.shape
  num_refed = min(drafter.num_refed, 2 * drafter.tree.max_depth + 2)
  is_fresh, in_chunks = isinstance(known, int), width > _CHUNK
  # Where a text goes on, its newest tokens are fed again.
  more = 0 if is_fresh and not in_chunks else num_refed
  chunk_width = math.ceil(width / max(math.ceil(width / _CHUNK), 1))
  fed = min(chunk_width + more, columns)
  known = jnp.broadcast_to(jnp.asarray(known, jnp.int32), (rows,))
  caches = (state.target_cache, state.drafter_state)
  if is_fresh:  # a pass leaves what is fed again after it
    room = drafter.tree.num_fed + max(num_refed - 2, 0)
    more_room = functools.partial(recurrent_lib.widened, width=room)
    caches = (_with_states(more_room, caches[0]), caches[1])
  every = jax.tree.leaves(caches, is_leaf=_is_cache)
  has_states = any(_is_cache(x) and x.recurrent is not None for x in every)

  # Windows have one width, and near the buffer's end begin earlier.
  def first(known, fed=fed):
    return jnp.clip(known - num_refed, 0, columns - fed)

  # States do not go back to before a text goes on, only to a window's start: if
  # the first would begin earlier, all are as narrow as fits anywhere.
  narrow = num_refed + drafter.tree.max_depth + 1
  may_be_narrow = has_states and not is_fresh and fed > narrow
  is_narrow = may_be_narrow & jnp.any(known - num_refed + fed > columns)

  def chunk(carry, fed=fed):
    cache, drafter_state, known, start = carry
    # A row that is read to its end does the same again, while others go on.
    start = jnp.where(known < state.length, first(known, fed), start)
    length = jnp.minimum(start + fed, state.length)
    window = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, fed))(
      state.tokens, start
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
        target_output=output,
        num_refed=jnp.maximum(known - 1 - start, 0),
      ),
    )
    return cache.replace(length=length - 1), drafter_state, length, start

  wide = functools.partial(recurrent_lib.widened, width=fed)
  carry = (*_with_states(wide, caches), known, first(known))
  if in_chunks or may_be_narrow:
    kinds = jax.eval_shape(chunk, carry)
    carry = jax.tree.map(lambda x, kind: x.astype(kind.dtype), carry, kinds)
    unread = lambda carry: jnp.any(carry[2] < state.length)
    carry = lax.while_loop(
      lambda carry: unread(carry) & ~is_narrow, chunk, carry
    )
    if may_be_narrow:
      by_few = functools.partial(chunk, fed=narrow)
      carry = lax.while_loop(unread, by_few, carry)
  else:
    carry = chunk(carry)

  def folded(now, before):
    """Room for the newest tokens, which are re-fed where the text goes on."""
    if now is None:
      return None
    return recurrent_lib.folded(now, state.length - num_refed, before.width)

  cache, drafter_state = _with_states(folded, carry[:2], caches)
  return dataclasses.replace(
    state,
    target_cache=cache.replace(length=state.length - 1),
    drafter_state=drafter_state,
  )


def _asked(
  state: DecodeState, max_new_tokens: Array, buffer_length: int, vocab_size: int
) -> DecodeState:
  """The state with a budget for each row; rows without one, or text, end."""
  room = buffer_length - state.length  # no sum of the two may wrap around
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
