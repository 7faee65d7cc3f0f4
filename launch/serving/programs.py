"""The device programs of a server: admission, rounds and scoring."""

import dataclasses

import jax
import jax.numpy as jnp

from launch.prompt_lines import MOST_BIASES, MOST_STOP_IDS
from launch.serving.control import MOST_SCORED
from specjax import random, recurrent
from specjax.cache import Cache
from specjax.decode import Decoder
from specjax.penalties import NONE
from specjax.runtime.mesh import MeshDecoder
from specjax.state import DecodeState, StopReason
from specjax.types import LanguageModel, Params, Penalties, Sampling
from specjax.warp import make_sampling


def sampling(rows: int, **settings) -> Sampling:
  """A warp with all there is, so that any row may have any of it."""
  neutral = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
  biases, stops = (rows, MOST_BIASES), (rows, MOST_STOP_IDS)
  warp = make_sampling(rows, **(neutral | settings), repetition_penalty=1.0)
  assert warp.penalties is not None
  penalties = dataclasses.replace(
    warp.penalties,
    bias_tokens=jnp.full(biases, NONE, jnp.int32),
    bias=jnp.zeros(biases, jnp.float32),
    stop_tokens=jnp.full(stops, NONE, jnp.int32),
  )
  return dataclasses.replace(warp, penalties=penalties)


def admit(
  decoder: Decoder | MeshDecoder,
  params: Params,
  state: DecodeState,
  row,
  source,
  keep,
  tokens,
  length,
  seed_and_stream,
  budget,
  top_k,
  ignore_stop,
  warp,
  min_tokens,
  bias_tokens,
  bias,
  own_stops,
) -> DecodeState:
  """`Decoder.admit` behind the first tokens of a row's text, be they none.

  Args:
    decoder: what decodes.
    params: parameters of both models.
    state: before.
    row: `i32[]`, which is given a prompt.
    source: `i32[]`, the row whose text the prompt begins as; it itself where a
      prompt is read on.
    keep: `i32[]`, so many tokens of it.
    tokens, length: `i32[P]`, `i32[]`, what follows them.
    seed_and_stream: `u32[2]`, from which the key follows.
    budget, top_k, ignore_stop: `i32[]`, `i32[]`, `bool[]`.
    warp: `f32[6]`, temperature, top-p, min-p, and penalties for presence,
      frequency and repetition.
    min_tokens: `i32[]`.
    bias_tokens, bias, own_stops: of one row, see `specjax.types.Penalties`.
  """
  seed, stream = seed_and_stream[:1], seed_and_stream[1:]
  temperature, top_p, min_p, *_ = warp
  penalties = Penalties(
    presence=warp[3:4],
    frequency=warp[4:5],
    repetition=warp[5:6],
    bias_tokens=bias_tokens[None],
    bias=bias[None],
    min_tokens=min_tokens[None],
    stop_tokens=own_stops[None],
  )
  return decoder.admit(
    params,
    state,
    row,
    tokens,
    length,
    random.seeded_keys(seed, stream)[0],
    max_new_tokens=budget,
    sampling=dataclasses.replace(
      make_sampling(
        1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
      ),
      penalties=penalties,
    ),
    ignore_stop=ignore_stop,
    source=source,
    keep=keep,
  )


def rounds(
  decoder: Decoder | MeshDecoder,
  window: int,
  params: Params,
  state: DecodeState,
  ended,
  max_depth,
  most,
  wanted,
):
  """Rounds until one more row is done, and what they emitted.

  Args:
    decoder: what decodes.
    window: W, tokens that a row may emit.
    params: parameters of both models.
    state: before.
    ended: `bool[B]`, rows that end before them.
    max_depth: `i32[B]`.
    most: `i32[]`, rounds at most.
    wanted: `bool[B]`, rows whose likeliest tokens are recorded.

  Returns:
    The state, and the arrays of a `Report`; "likeliest" has both of its.
  """
  reason = jnp.where(
    ended & ~state.done, int(StopReason.STOP_STRING), state.stop_reason
  )
  state = dataclasses.replace(
    state,
    stop_reason=reason,
    max_depth=max_depth,
    likeliest=dataclasses.replace(state.likeliest, wanted=wanted),
  )
  start, made = state.length, state.num_steps
  state = decoder.steps(params, state, most, num_idle=jnp.sum(state.done) + 1)
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


def shallow_rounds(decoder, window, params, state, *orders):
  """`rounds` of shallower drafts than the state was made for."""
  tree = getattr(decoder, "decoder", decoder).drafter.tree
  whole = state.counters
  widths = {
    "accept_counts": tree.max_depth + 1,
    "rank_offered": tree.max_children,
    "rank_accepted": tree.max_children,
  }
  counted = lambda state, parts: dataclasses.replace(
    state, counters=dataclasses.replace(state.counters, **parts)
  )
  cut = {n: getattr(whole, n)[:, :width] for n, width in widths.items()}
  state, report = rounds(decoder, window, params, counted(state, cut), *orders)
  parts = {
    n: getattr(whole, n).at[:, :width].set(getattr(state.counters, n))
    for n, width in widths.items()
  }
  report["accept_counts"] = parts["accept_counts"]
  return counted(state, parts), report


def score(
  target: LanguageModel, vocab_size: int, params: Params, cache: Cache, tokens,
  start,
):  # fmt: skip
  """The target's own law, at temperature 1, at tokens of one text.

  Args:
    target: which reads.
    vocab_size: V, of real tokens.
    params: parameters of both models.
    cache: of one row, with the text before.
    tokens: `i32[W + 1]`, those that are fed and the one after them.
    start: `i32[]`, tokens of the text before.

  Returns:
    The cache, and of each token but the first: its log-probability `f32[W]`,
    the likeliest in its place `i32[W, K]`, and those of these.
  """
  cache = cache.replace(
    length=start[None], recurrent=recurrent.emptied(cache.recurrent, start)
  )
  output, cache = target.apply(params.target, tokens[None, :-1], cache)
  logits = output.logits[0, :, :vocab_size]
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  chosen = jnp.take_along_axis(log_probs, tokens[1:, None], axis=1)[:, 0]
  most = min(MOST_SCORED, vocab_size)
  largest, likeliest = jax.lax.top_k(log_probs, most)
  return cache, (chosen, likeliest, largest)
