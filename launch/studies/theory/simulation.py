"""Runs Markov chains through the shipped loop, many at a time.

Every round drafts beyond the horizon, as in the theory: each position is
drafted, and no bonus token is emitted (`specjax.theory.rejections`). A
rejection is an emitted token with origin `RESIDUAL`. Runs are spread over all
devices; `launch.studies.theory` makes every core a device.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from specjax import drafters, random, tree
from specjax.decode import make_decoder
from specjax.state import Origin
from specjax.theory import markov

_NODES_AT_ONCE = 1 << 12  # per device, to fit a core's caches


def simulate(
  pair: markov.MarkovPair,
  *,
  runs: int,
  num_drafts: int = 1,
  rule: str | None = None,
  seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
  """Decodes a chain's horizon many times, all runs in one jitted call.

  Returns:
    `i32[runs]`, the rejections of each, and `i32[runs, T]`, their tokens.
  """
  rule = rule or ("token" if num_drafts == 1 else "batch")
  devices = jax.device_count()
  most = max(_NODES_AT_ONCE // (1 + pair.horizon * num_drafts), 1)
  parts = math.ceil(runs / (devices * most))
  at_once = math.ceil(runs / (devices * parts))
  run = _run(pair.horizon, pair.vocab_size, num_drafts, rule, at_once, parts)
  # Halves the hashes per random number; tokens still do not depend on the mesh,
  # since every run has its own key.
  with jax.threefry_partitionable(False):
    rejected, tokens = run(
      markov.language_models(pair)[1], jax.random.key(seed)
    )
  return np.asarray(rejected)[:runs], np.asarray(tokens)[:runs]


@functools.cache
def _run(horizon, vocab, num_drafts, rule, at_once, parts):
  """The jitted call for any pair of this size."""
  # A chain is its model's parameters, so any pair of this size gives the model.
  model, _ = markov.language_models(
    markov.random_pair(0, vocab_size=vocab, horizon=1)
  )
  drafter = drafters.model(
    model, tree=tree.paths(horizon, num_drafts), vocab_size=vocab
  )
  decoder = make_decoder(model, drafter=drafter, rule=rule)

  def some(params, key, part):
    rows = part * at_once + jnp.arange(at_once)
    state = decoder.init(
      params,
      jnp.zeros((at_once, 1), jnp.int32),
      jnp.ones((at_once,), jnp.int32),
      random.row_keys(key, rows),
      buffer_length=horizon + 1,
      max_new_tokens=horizon,
    )
    state = decoder.generate(params, state)
    emitted = slice(1, horizon + 1)
    return (
      jnp.sum(state.origins[:, emitted] == Origin.RESIDUAL, axis=1),
      state.tokens[:, emitted],
    )

  mesh = jax.make_mesh((jax.device_count(),), ("device",))

  def of_device(params, key):
    first = jax.lax.axis_index("device") * parts
    rejected, tokens = jax.lax.map(
      functools.partial(some, params, key), first + jnp.arange(parts)
    )
    return rejected.reshape(-1), tokens.reshape(-1, horizon)

  return jax.jit(
    jax.shard_map(
      of_device,
      mesh=mesh,
      in_specs=P(),
      out_specs=P("device"),
      check_vma=False,  # every device runs its own loop
    )
  )


def summary(rejected: np.ndarray) -> dict:
  """Mean, standard error and number of runs."""
  runs = len(rejected)
  return {
    "mean": float(rejected.mean()),
    "standard_error": float(rejected.std(ddof=1) / math.sqrt(runs)),
    "runs": runs,
  }
