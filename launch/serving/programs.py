"""The device programs of a server: admission, rounds, scoring of prompts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.prompts import MOST_BIASES, MOST_STOP_IDS
from launch.serving.control import MAX_TOP_SCORED, Request, Scores
from specjax import random, recurrent, rows
from specjax.cache import Cache
from specjax.decode import Decoder
from specjax.penalties import NONE
from specjax.state import DecodeState, StopReason
from specjax.types import LanguageModel, Params, Penalties, Sampling


def sampling(requests: Sequence[Request]) -> Sampling:
  """Sampling settings of rows, of all kinds, since any row may use any kind."""
  count = len(requests)
  tokens = np.full((count, MOST_BIASES), NONE, np.int32)
  bias = np.zeros((count, MOST_BIASES), np.float32)
  stops = np.full((count, MOST_STOP_IDS), NONE, np.int32)
  for row, request in enumerate(requests):
    for place, (token, value) in enumerate(request.logit_bias):
      tokens[row, place], bias[row, place] = token, value
    stops[row, : len(request.stop_token_ids)] = request.stop_token_ids
  of = lambda name, dtype: np.array(
    [getattr(one, name) for one in requests], dtype
  )
  return Sampling(
    temperature=of("temperature", np.float32),
    top_k=of("top_k", np.int32),
    top_p=of("top_p", np.float32),
    min_p=of("min_p", np.float32),
    penalties=Penalties(
      presence=of("presence_penalty", np.float32),
      frequency=of("frequency_penalty", np.float32),
      repetition=of("repetition_penalty", np.float32),
      min_tokens=of("min_tokens", np.int32),
      bias_tokens=tokens,
      bias=bias,
      stop_tokens=stops,
    ),
  )


def admit(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  request: Mapping[str, Any],
  *,
  slots: int | None = None,
) -> DecodeState:
  """`Decoder.admit` after a (possibly empty) cached prefix.

  Args:
    decoder, params, state: the decoder, its parameters and its state.
    request: row `i32[]`; source `i32[]`, the row with the prefix (the row
      itself to continue a prompt), and keep `i32[]`, the prefix's length;
      tokens `i32[P]`, the next ones, and length `i32[]`; seed and stream
      `u32[1]`; budget `i32[]`; ignore_stop `bool[]`; sampling, of one row.
    slots: as for `Decoder.admit`.
  """
  return decoder.admit(
    params,
    state,
    request["row"],
    request["tokens"],
    request["length"],
    random.seeded_keys(request["seed"], request["stream"])[0],
    max_new_tokens=request["budget"],
    sampling=request["sampling"],
    ignore_stop=request["ignore_stop"],
    source=request["source"],
    keep=request["keep"],
    slots=slots,
  )


def rounds(
  decoder: Decoder, window: int, params: Params,
  state: DecodeState, ended, most, wanted, running=None,
  *, slots: int | None = None,
):  # fmt: skip
  """Runs rounds until another row is done; returns state and outputs.

  Args:
    decoder, params, state: the decoder, its parameters and its state.
    window: W, maximum tokens that a row can emit.
    ended: `bool[B]`, rows to end first.
    most: `i32[]`, maximum number of rounds.
    wanted: `bool[B]`, rows whose top log-probabilities are recorded.
    running: `i32[R]`, distinct rows, all that run among them; None for all. A
      pass computes no others.
    slots: as for `Decoder.steps`.
  """
  reason = jnp.where(
    ended & ~state.done, int(StopReason.STOP_STRING), state.stop_reason
  )
  state = dataclasses.replace(
    state,
    stop_reason=reason,
    likeliest=dataclasses.replace(state.likeliest, wanted=wanted),
  )
  start, made = state.length, state.num_steps
  some, axes = state, decoder.row_axes(state)
  if running is not None:
    in_place = decoder.target.takes_rows
    running = tuple(running)
    some = rows.select(axes, state, running, in_place=in_place)
  idle = jnp.sum(some.done) + 1
  some = decoder.steps(params, some, most, num_idle=idle, slots=slots)
  state = some if running is None else rows.merge(axes, state, running, some)
  last = state.tokens.shape[1] - 1
  place = jnp.clip(start[:, None] + jnp.arange(window), 0, last)
  at = lambda array: jnp.take_along_axis(
    array, place.reshape(*place.shape, *[1] * (array.ndim - 2)), axis=1
  )
  return state, {
    "start": start,
    "length": state.length,
    "tokens": at(state.tokens),
    "origins": at(state.origins).astype(jnp.int32),
    "log_probs": at(state.log_probs),
    "likeliest": (at(state.likeliest.tokens), at(state.likeliest.log_probs)),
    "reason": state.stop_reason,
    "num_drafts": state.counters.num_drafts,
    "num_drafted": state.counters.num_drafted,
    "accept_counts": state.counters.accept_counts,
    "rounds": state.num_steps - made,
  }


class Scorer:
  """Scores the tokens of prompts, in a cache of its own.

  This needs the distribution at every token, which rounds do not keep. The
  first prompt triggers compilation.
  """

  def __init__(
    self,
    target: LanguageModel,
    params: Params,
    *,
    vocab_size: int,
    longest: int,
    width: int,
  ):
    """Compiles nothing yet."""
    self._target, self._params, self._vocab_size = target, params, vocab_size
    self._longest, self.width = longest, width
    self._cache: Any = None
    self._pass: Any = None

  def __call__(self, token_ids: Sequence[int]) -> Scores:
    """Scores a prompt, in as many passes as needed."""
    if self._pass is None:
      cache = self._target.new_cache(
        self._params.target, 1, self._longest + self.width
      )
      states = recurrent.widen(cache.recurrent, self.width)
      self._cache = cache.replace(recurrent=states)
      self._pass = jax.jit(self._read, donate_argnums=1)
    most = min(MAX_TOP_SCORED, self._vocab_size)
    none = np.zeros((0, most), np.float32)
    parts: list[tuple] = [(none[:, 0], none.astype(np.int32), none)]
    for start in range(0, len(token_ids) - 1, self.width):
      new = token_ids[start : start + self.width + 1]
      tokens = np.zeros(self.width + 1, np.int32)
      tokens[: len(new)] = new
      self._cache, scores = self._pass(
        self._params, self._cache, tokens, np.int32(start)
      )
      parts.append(tuple(x[: len(new) - 1] for x in jax.device_get(scores)))
    return Scores(*map(np.concatenate, zip(*parts, strict=True)))

  def _read(self, params: Params, cache: Cache, tokens, start):
    """Feeds `tokens[:-1]` after `start` others; scores `tokens[1:]`."""
    cache = cache.replace(
      length=start[None], recurrent=recurrent.reset(cache.recurrent, start)
    )
    output, cache = self._target.apply(params.target, tokens[None, :-1], cache)
    logits = output.logits[0, :, : self._vocab_size]
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    chosen = jnp.take_along_axis(log_probs, tokens[1:, None], axis=1)[:, 0]
    most = min(MAX_TOP_SCORED, self._vocab_size)
    largest, likeliest = jax.lax.top_k(log_probs, most)
    return cache, (chosen, likeliest, largest)
