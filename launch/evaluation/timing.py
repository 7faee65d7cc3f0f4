"""Times calls, and makes jitted loops of a round's parts to time."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import random
from specjax.decode import Decoder
from specjax.state import DecodeState
from specjax.types import Commit, LanguageModel, Params

Passes = tuple[tuple[str, int], ...]  # whose pass, over how many tokens
REPEATS = 12  # of a loop in one timing

_T = TypeVar("_T")


def timed(part: Callable[..., _T], *arguments) -> tuple[float, _T]:
  """Times a call until its result is ready; returns seconds and result."""
  start = time.perf_counter()
  result = jax.block_until_ready(part(*arguments))
  return time.perf_counter() - start, result


def per_repeat(
  loop, params, carry, *more, repeats: int = REPEATS
) -> tuple[float, Any]:
  """Seconds per repeat of a loop, without the overhead of the call."""
  call, carry = timed(loop, params, carry, 0, *more)
  total, carry = timed(loop, params, carry, repeats, *more)
  return without_calls(call, total) / repeats, carry


def without_calls(calls: float, total: float) -> float:
  """`total - calls`, or `total` if not positive: an empty call was late."""
  return total - calls if calls < total else total


def passes_loop(models: dict[str, tuple[LanguageModel, str]], order: Passes):
  """Makes a jitted loop of consecutive passes.

  Args:
    models: by name, a model and the name of its cache.
    order: the passes.

  Returns:
    `(params by model, caches by name, repeats) -> caches`. The caches are
    donated and keep their lengths. Every pass depends on all logits of the one
    before, so that none is optimized away; rows get different tokens, for which
    a mixture reads more experts; passes write after the cache's length (to the
    last slots if there is no room).
  """

  @functools.partial(jax.jit, donate_argnums=1)
  def run(params, caches, repeats):
    start = {name: cache.length for name, cache in caches.items()}
    rows = next(iter(start.values())).shape[0]

    def body(_, carry):
      token, caches = carry
      for model_name, fed in order:
        model, name = models[model_name]
        offsets = 997 * jnp.arange(rows * fed).reshape(rows, fed)
        tokens = (token + offsets) % model.vocab_size
        cache = caches[name].replace(length=start[name])
        output, cache = model.apply(params[model_name], tokens, cache)
        caches = caches | {name: cache.replace(length=start[name])}
        some = jnp.any(jnp.max(output.logits, axis=-1) > 0, axis=1)
        token = (token + some[:, None]) % 2
      return token, caches

    token = jnp.zeros((rows, 1), jnp.int32)
    return lax.fori_loop(0, repeats, body, (token, caches))[1]

  return run


def proposals_loop(decoder: Decoder):
  """Makes a jitted loop of proposals that are not scored.

  Each starts from a different last token, which depends on all tokens and
  distributions drafted before. A head gets committed features of 0.

  Returns:
    `(params, (tokens, drafter_state, cache), repeats, state) -> (tokens,
    drafter_state, cache)`, which are donated.
  """

  def one(params: Params, state: DecodeState):
    draft, _, drafter_state, cache = decoder.propose(params, state)

    def seen(params, state):
      now = decoder.score(params, state)
      return now.output, now.target_log_probs

    zeros = lambda x: jnp.zeros(x.shape, x.dtype)
    output, log_probs = jax.tree.map(zeros, jax.eval_shape(seen, params, state))
    path = np.arange(draft.tree.max_depth + 1, dtype=np.int32)
    drafter_state = decoder.drafter.commit(
      params,
      drafter_state,
      Commit(
        tokens=draft.tokens,
        start=state.length - 1,
        path=jnp.broadcast_to(path, (len(draft.tokens), len(path))),
        length=state.length + 1,
        newest=draft.tokens[:, -1],
        target_output=output,
        num_refed=jnp.zeros_like(state.length),
        target_log_probs=log_probs,
      ),
    )
    last = jnp.sum(draft.tokens, axis=1)
    if draft.log_probs is not None:
      some = jnp.max(draft.log_probs[:, 1:], axis=-1) > -1
      last = last + jnp.any(some, axis=1)
    return last, drafter_state, cache

  @functools.partial(jax.jit, donate_argnums=1)
  def run(params: Params, carry, repeats, state: DecodeState):
    root, rows = state.length - 1, jnp.arange(len(state.length))

    def body(index, carry):
      tokens, drafter_state, cache = carry
      now = dataclasses.replace(
        state,
        tokens=tokens,
        drafter_state=drafter_state,
        target_cache=cache,
        keys=random.step_keys(state.keys, root + index),
      )
      last, drafter_state, cache = one(params, now)
      tokens = tokens.at[rows, root].set(last % decoder.vocab_size)
      return tokens, drafter_state, cache

    return lax.fori_loop(0, repeats, body, carry)

  return run
