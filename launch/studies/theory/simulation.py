"""Runs Markov chains through the shipped loop, many at a time.

Every round drafts to beyond the horizon, as in the theory: each position is
drafted, and no bonus token is emitted (`specjax.theory.rejections`). A
rejection is an emitted token of origin `RESIDUAL`. Runs are spread over all
devices; `launch.studies.theory` makes every core one.
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

_NODES_AT_ONCE = 1 << 12  # of a device: what a core's caches hold


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
  # Half the hashes a random number; every run has a key of its own, so the mesh
  # does not show in its tokens all the same.
  with jax.threefry_partitionable(False):
    rejected, tokens = run(
      markov.language_models(pair)[1], jax.random.key(seed)
    )
  return np.asarray(rejected)[:runs], np.asarray(tokens)[:runs]


@functools.cache
def _run(horizon, vocab, num_drafts, rule, at_once, parts):
  """The jitted call, for any pair of that size."""
  # A chain is its model's parameters: any pair of that size gives the model.
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
      check_vma=False,  # every device has a loop of its own
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
