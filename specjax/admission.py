"""Texts of rows: prompts of a batch, of one row, and tokens appended to one.

The methods `init`, `admit` and `extend` of `specjax.decode.Decoder`, with their
checks. The passes themselves are in `prefill`.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from specjax import arguments, prefill, random, rows
from specjax import warp as warp_lib
from specjax.state import DecodeState
from specjax.types import Params, Sampling

if TYPE_CHECKING:
  from specjax.decode import Decoder


def init(
  decoder: "Decoder",
  params: Params,
  prompts: Array,
  lengths: Array,
  rng_key: Array,
  *,
  buffer_length: int,
  max_new_tokens: Array | int,
  sampling: Sampling | None = None,
  stop_tokens: Sequence[int] | Array = (),
  ignore_stop: Array | None = None,
  inputs: Any = None,
) -> DecodeState:
  """Runs the prompts through the models (prefill).

  Args:
    params: parameters of both models.
    prompts: `i32[B, P]`, each row right-padded with anything.
    lengths: `i32[B]` in 1..P.
    rng_key: a typed key; row b gets the stream `fold_in(rng_key, b)`. Or
      `key[B]`, one per row, for seeds that follow a prompt wherever it is
      batched (`specjax.random.row_keys`).
    buffer_length: static; prompt and completion of a row must fit into it.
    max_new_tokens: tokens to emit at most, for all rows or `i32[B]`.
    sampling: the warp; by default temperature 1 and no truncation.
    stop_tokens: ids that end a row once emitted.
    ignore_stop: `bool[B]`, rows that they do not end; None: they end all.
    inputs: what encoders read, any pytree with rows first (`encode` of
      `LanguageModel`).

  Returns:
    The state before the first step.

  Raises:
    ValueError: for sizes that do not fit; lengths, budgets and tokens are
      checked when they are concrete (under `jit`, rows end at the buffer's
      end, and at once where a token is none: UNKNOWN_TOKEN).
  """
  try:
    prompts = jnp.asarray(prompts)
  except ValueError as error:
    raise ValueError(
      f"prompts must be i32[B, P], right-padded where lengths differ: {error}"
    ) from error
  lengths = jnp.asarray(lengths, jnp.int32)
  max_new_tokens = jnp.asarray(max_new_tokens, jnp.int32)
  check(
    decoder, params, prompts, lengths, rng_key, buffer_length=buffer_length,
    max_new_tokens=max_new_tokens, sampling=sampling,
  )  # fmt: skip
  count = len(prompts)
  if rng_key.ndim == 0:
    rng_key = random.row_keys(rng_key, jnp.arange(count))
  inputs = decoder.encode_inputs(params, inputs)
  # Every row may write a whole draft beyond its last committed token.
  slots = buffer_length + decoder.drafter.tree.num_fed
  state = prefill.begin(
    decoder.target, decoder.drafter, params, prompts, lengths, rng_key,
    buffer_length=buffer_length,
    vocab_size=decoder.vocab_size,
    max_new_tokens=max_new_tokens,
    sampling=sampling or warp_lib.make_sampling(count),
    stop_tokens=jnp.asarray(stop_tokens, jnp.int32).reshape(-1),
    inputs=inputs,
    drafter_state=decoder.drafter.init(params, count, slots, inputs),
    with_log_probs=decoder.with_log_probs,
    num_likeliest=decoder.num_likeliest,
  )  # fmt: skip
  if ignore_stop is not None:
    ignored = jnp.copy(jnp.asarray(ignore_stop, bool))
    state = dataclasses.replace(state, ignores_stop=ignored)
  return state


def admit(
  decoder: "Decoder",
  params: Params,
  state: DecodeState,
  row: Array | int,
  prompt: Array,
  length: Array | int,
  rng_key: Array,
  *,
  max_new_tokens: Array | int,
  sampling: Sampling | None = None,
  ignore_stop: Array | bool = False,
  inputs: Any = None,
  source: Array | int | None = None,
  keep: Array | int = 0,
) -> DecodeState:
  """Replaces a finished row of a running state by another prompt.

  The row emits exactly what it would in a state of its own, and the other
  rows what they would have emitted. One program for prompts of one width:
  `row`, `length`, `rng_key`, the budget and the warp are traced.

  A prompt that shares a prefix with a row's text need not be read from its
  start: the first `keep` tokens of row `source` are reused from its caches,
  and `prompt` holds the tokens after them. The row then draws what it would
  draw if all were read, up to the rounding of passes of other widths. The
  drafter's caches are reused; whatever else it has learned of the text is
  not. The target's part of the cost does not grow with the buffer if it takes
  rows (`LanguageModel.takes_rows`). A target with recurrent states can reuse
  all of a text but its newest tokens, or nothing: a row that keeps less ends
  with NAN_LOGITS.

  Args:
    params: parameters of both models.
    state: from `init` or later; donate it.
    row: index of one of its B rows, which is done.
    prompt: `i32[P]`, right-padded with anything.
    length: tokens of it, in 1..P.
    rng_key: the row's stream, used as it is: the request's, not the slot's.
    max_new_tokens: tokens to emit at most.
    sampling: the warp of one row, with the same truncations as the state's;
      by default temperature 1 and no truncation.
    ignore_stop: whether the row goes on after a stop token, to its budget.
    inputs: as `init`'s, of one row.
    source: `i32[]`, row whose text and inputs are reused; None to read all.
    keep: `i32[]`, tokens of its text to reuse, at most its length.

  Returns:
    The state with the row in it. Where the reused tokens, the prompt and the
    budget do not fit into the buffer, the row ends early (LENGTH).

  Raises:
    ValueError: as `init`.
  """
  request = check_request(
    decoder, params, state, prompt, length, rng_key,
    max_new_tokens=max_new_tokens, sampling=sampling,
  )  # fmt: skip
  inputs = decoder.encode_inputs(params, inputs)
  slots = request["buffer_length"] + decoder.drafter.tree.num_fed
  blank = decoder.drafter.init(params, 1, slots, inputs)
  # What all rows share goes on from where it is.
  blank = rows.over_leaves(
    lambda axis, new, now: now if axis is None else new,
    decoder.drafter.row_axes(state.drafter_state), blank, state.drafter_state,
  )  # fmt: skip
  axes = decoder.row_axes(state)
  if source is None:
    fresh = prefill.begin(
      decoder.target, decoder.drafter, params,
      **request,
      vocab_size=decoder.vocab_size,
      stop_tokens=state.stop_tokens,
      inputs=inputs,
      drafter_state=blank,
      with_log_probs=decoder.with_log_probs,
      num_likeliest=decoder.num_likeliest,
    )  # fmt: skip
  else:
    fresh = prefill.extend(
      decoder.target, decoder.drafter, params,
      prefill.cut(
        rows.take(
          axes, state, row, source, keep, in_place=decoder.target.takes_rows
        ),
        keep, blank, request["rng_key"],
      ),
      jnp.asarray(prompt), jnp.asarray(length, jnp.int32),
      vocab_size=decoder.vocab_size,
      max_new_tokens=request["max_new_tokens"], sampling=request["sampling"],
    )  # fmt: skip
  fresh = dataclasses.replace(
    fresh,
    ignores_stop=jnp.asarray(ignore_stop, bool).reshape(1),
    num_steps=state.num_steps,
  )
  return rows.give(axes, state, row, fresh)


def extend(
  decoder: "Decoder",
  params: Params,
  state: DecodeState,
  row: Array | int,
  tokens: Array,
  count: Array | int,
  *,
  max_new_tokens: Array | int,
  sampling: Sampling | None = None,
) -> DecodeState:
  """Appends tokens to the text of a row, which then goes on.

  For the next turn of a conversation: the caches keep the row's text, and
  only the new tokens are read (and the two newest before them, one of which
  was not read yet). The row then emits what one with all of that text as its
  prompt would; if its drafter keeps what it learned of the row, as lookahead
  and online drafts do, it emits by the same law. The text so far counts as
  prompt, and counters start anew. One program for tokens of one width: `row`,
  `count`, the budget and the warp are traced.

  Args:
    params: parameters of both models.
    state: from `init` or later; donate it.
    row: index of one of its B rows, done or not.
    tokens: `i32[P]`, right-padded with anything.
    count: tokens of it, in 1..P.
    max_new_tokens: tokens to emit at most.
    sampling: the warp of one row, as `admit`'s; by default the row keeps its
      own.

  Returns:
    The state. Where text and tokens do not fit into the buffer (under `jit`
    this cannot be raised), the row is as it was and ended (LENGTH).

  Raises:
    ValueError: as `init`.
  """
  tokens, row = jnp.asarray(tokens), jnp.asarray(row, jnp.int32)
  count = jnp.asarray(count, jnp.int32)
  max_new_tokens = jnp.asarray(max_new_tokens, jnp.int32)
  check_extension(
    decoder, params, state, row, tokens, count, max_new_tokens=max_new_tokens
  )
  if sampling is not None:
    sampling = warp_lib.as_in(state.sampling, sampling)
  axes = decoder.row_axes(state)
  alone = rows.take(
    axes, state, row, row, 0, in_place=decoder.target.takes_rows
  )
  longer = prefill.extend(
    decoder.target, decoder.drafter, params, alone, tokens, count,
    vocab_size=decoder.vocab_size, max_new_tokens=max_new_tokens,
    sampling=sampling,
  )  # fmt: skip
  return rows.give(axes, state, row, longer)


def check(
  decoder: "Decoder",
  params: Params,
  prompts: Array,
  lengths: Array,
  rng_key: Array,
  *,
  buffer_length: int,
  max_new_tokens: Array,
  sampling: Sampling | None,
) -> None:
  """Raises ValueError for arguments of `init` that cannot work.

  Lengths, budgets and tokens are looked at when they are concrete.
  """
  arguments.check_params(params)
  arguments.check_rows(prompts, lengths, rng_key, max_new_tokens, sampling)
  arguments.check_sizes(
    prompts,
    lengths,
    max_new_tokens,
    buffer_length=buffer_length,
    vocab_size=decoder.vocab_size,
    max_positions={
      "target": decoder.target.max_positions,
      "draft": decoder.drafter.max_positions,
    },
  )


def check_request(
  decoder: "Decoder",
  params,
  state,
  prompt,
  length,
  rng_key,
  *,
  max_new_tokens,
  sampling,
) -> dict[str, Any]:
  """Arguments of `admit` as those of `init` for one row; raises as `init`."""
  request = dict(
    prompts=jnp.asarray(prompt)[None],
    lengths=jnp.asarray(length, jnp.int32).reshape(1),
    rng_key=rng_key[None],
    max_new_tokens=jnp.asarray(max_new_tokens, jnp.int32).reshape(1),
    sampling=warp_lib.as_in(state.sampling, sampling),
    buffer_length=decoder.buffer_length(state),
  )
  check(decoder, params, **request)
  return request


def check_extension(
  decoder: "Decoder", params, state, row, tokens, count, *, max_new_tokens
) -> None:
  """Raises ValueError for arguments of `extend` that cannot work."""
  arguments.check_params(params)
  arguments.check_extension(
    state, row, tokens, count, max_new_tokens,
    buffer_length=decoder.buffer_length(state), vocab_size=decoder.vocab_size,
  )  # fmt: skip
