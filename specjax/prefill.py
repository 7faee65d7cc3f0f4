"""Reading prompts: what a state begins with, and how a row goes on.

`begin` fills the caches of fresh rows, `extend` those of a row that has a text
already. Both feed tokens to the target as a chain, tell the drafter of them
(`Commit`), and leave the newest token to be fed as the next round's root.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.state import Counters, DecodeState, Origin, StopReason
from specjax.types import Commit, Drafter, LanguageModel, Params, Sampling


def begin(
  target: LanguageModel,
  drafter: Drafter,
  params: Params,
  prompts: Array,
  lengths: Array,
  rng_key: Array,
  *,
  buffer_length: int,
  max_new_tokens: Array,
  sampling: Sampling,
  stop_tokens: Array,
  inputs: Any,
  drafter_state: Any,
  with_log_probs: bool,
) -> DecodeState:
  """The state after the prompts; arguments as `Decoder.init` checked them.

  Args:
    target, drafter: of the decoder.
    params: parameters of both models.
    prompts, lengths, buffer_length, max_new_tokens, sampling, inputs: as
      `Decoder.init`'s.
    rng_key: `key[B]`.
    stop_tokens: `i32[n]`.
    drafter_state: from `Drafter.init`.
    with_log_probs: see `Decoder`.
  """
  count, width = prompts.shape
  tree = drafter.tree
  columns = buffer_length + tree.max_depth + 1
  # Whatever the caller padded with is replaced: models may not know it.
  prompts = jnp.where(
    jnp.arange(width) < lengths[:, None], prompts, prompts[:, :1]
  ).astype(jnp.int32)
  cache = target.new_cache(
    params.target, count, buffer_length + tree.num_fed, inputs
  )
  # Copies: the state is made to be donated, the arguments are the caller's.
  own = lambda arrays: jax.tree.map(jnp.copy, arrays)
  state = DecodeState(
    tokens=jnp.pad(prompts, ((0, 0), (0, columns - width))),
    origins=jnp.zeros((count, columns), jnp.int8),
    log_probs=jnp.zeros((count, columns)) if with_log_probs else None,
    prompt_length=own(lengths),
    length=own(lengths),
    max_length=own(lengths),
    max_depth=jnp.full((count,), tree.max_depth, jnp.int32),
    stop_reason=jnp.zeros((count,), jnp.int32),
    stop_tokens=own(stop_tokens),
    ignores_stop=jnp.zeros((count,), bool),
    keys=own(rng_key),
    sampling=own(sampling),
    target_cache=cache,
    drafter_state=drafter_state,
    counters=Counters.zeros(count, tree),
    num_steps=jnp.zeros((), jnp.int32),
  )
  state = _read(
    target, drafter, params, state, prompts,
    start=jnp.zeros_like(lengths), again=jnp.zeros_like(lengths),
  )  # fmt: skip
  return _asked(state, max_new_tokens, buffer_length)


def extend(
  target: LanguageModel,
  drafter: Drafter,
  params: Params,
  state: DecodeState,
  tokens: Array,
  count: Array,
  *,
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
    max_new_tokens: `i32[]`.
    sampling: of one row; None keeps it.
  """
  tree, width = drafter.tree, len(tokens)
  columns = state.tokens.shape[1]
  buffer_length = columns - tree.max_depth - 1
  before = state.length
  # Under jit nobody has looked: what does not fit is not taken in part.
  count = jnp.where(before + count <= buffer_length, count, 0)  # [1]
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
    counters=Counters.zeros(1, tree),
  )
  # A window of fixed width, which near the buffer's end begins earlier.
  again = min(drafter.again, tree.max_depth + 2)
  fed = width + again
  start = jnp.clip(before - again, 0, columns - fed)
  window = lax.dynamic_slice_in_dim(written[0], start[0], fed)[None]
  inside = np.arange(fed) < (state.length - start)[:, None]
  window = jnp.where(inside, window, window[:, :1])
  state = _read(
    target, drafter, params, state, window,
    start=start, again=before - 1 - start,
  )  # fmt: skip
  return _asked(state, jnp.where(count > 0, max_new_tokens, 0), buffer_length)


def _read(
  target: LanguageModel,
  drafter: Drafter,
  params: Params,
  state: DecodeState,
  tokens: Array,
  *,
  start: Array,
  again: Array,
) -> DecodeState:
  """The state whose caches hold all of its text but the newest token.

  Args:
    target, drafter: of the decoder.
    params: parameters of both models.
    state: whose `tokens` and `length` are those of the text.
    tokens: `i32[B, T]`, the text from `start` on, and anything behind it.
    start: `i32[B]`, the slot of the first of them.
    again: `i32[B]`, see `Commit`.
  """
  output, cache = target.apply(
    params.target,
    tokens,
    state.target_cache.replace(length=start),
    logits_at=jnp.zeros((len(tokens), 0), jnp.int32),
  )
  index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  drafter_state = drafter.prefill(
    params,
    state.drafter_state,
    Commit(
      tokens=tokens,
      start=start,
      path=jnp.broadcast_to(index, tokens.shape),
      length=jnp.copy(state.length),
      target_output=output,
      again=again,
    ),
  )
  return dataclasses.replace(
    state,
    target_cache=cache.replace(length=state.length - 1),
    drafter_state=drafter_state,
  )


def _asked(
  state: DecodeState, max_new_tokens: Array, buffer_length: int
) -> DecodeState:
  """The state with a budget for each row, which has none left ends."""
  room = buffer_length - state.length  # no sum of the two may wrap around
  max_length = state.length + jnp.minimum(max_new_tokens, room)
  ended = jnp.where(
    max_length > state.length, StopReason.RUNNING, StopReason.LENGTH
  )
  return dataclasses.replace(
    state, max_length=max_length, stop_reason=ended.astype(jnp.int32)
  )
