"""KnapSpec's dynamic programme (ICML 2026): a set for every budget.

Sub-layers are items that save a whole number of units when they are skipped:
one for the cheaper kind, and for the dearer the rounded ratio of their costs, 5
at most. A state is a sub-layer i and the units j that were saved before it; of
all ways to come there the one is kept whose residual stream is most like the
whole target's, by the cosine at the judged places of the texts. From the states
after the last sub-layer the best set of every saving is read.

First and last layer always run; ways whose mean cosine falls below a half are
given up. What is kept is the best hidden state of a state, not of a path: an
approximation, as the paper's is.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from launch.searching.costs import Costs
from launch.searching.methods import of_blocks
from launch.searching.scorer import Texts, again, new_cache, two_passes_mask
from models.networks import gated
from models.networks.params import split
from models.networks.transformer import SkippedLayers, Transformer

_LARGEST = 5
_LEAST_COSINE = 0.5


def weights(costs: Costs) -> tuple[int, int]:
  """Units that skipping an attention and an MLP saves."""
  small, large = sorted((costs.attention, costs.mlp))
  ratio = _LARGEST if not small else min(max(round(large / small), 1), _LARGEST)
  return (1, ratio) if costs.mlp >= costs.attention else (ratio, 1)


def sets(
  module: Transformer, texts: Texts, costs: Costs
) -> list[SkippedLayers]:
  """The best set of every saving up to half of all, the smallest first.

  Args:
    module: the target, whose MLPs read what their attentions have added.
    texts: what it emitted.
    costs: of its sub-layers.

  Raises:
    ValueError: for a target whose attention and MLP read the same.
  """
  config = module.config
  if config.layer(0).parallel:
    raise ValueError(
      "the method 'knapsack' is for targets whose MLP reads what the attention "
      "before it has added"
    )
  units = weights(costs)
  most = sum(units) * config.num_layers // 2
  merge, params = split(module)
  rows, width = texts.tokens.shape
  seen = two_passes_mask(width)
  places = np.flatnonzero(texts.judged)

  @jax.jit
  def read(params, tokens):
    module = merge(params)
    cache = new_cache(config, rows, 2 * width, module.dtype)
    _, cache = module(tokens, cache)
    return again(module, tokens, cache, seen).x, cache

  @functools.partial(jax.jit, static_argnums=1)
  def run(params, block, tokens, cache, states):
    module = merge(params)
    fed = again(module, tokens, cache, seen)
    one = lambda x: x + gated.sub_layer(module, block, x, fed, x)
    return jax.lax.map(one, states)

  @jax.jit
  def cosine(states, truth):  # [S, B, T, D], [B, T, D] -> [S]
    flat = lambda x: x.reshape(*x.shape[:-3], -1, x.shape[-1])[..., places, :]
    a, b = flat(states).astype(jnp.float32), flat(truth).astype(jnp.float32)
    dot = jnp.sum(a * b, axis=-1)
    size = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.mean(dot / size, axis=-1)

  x, cache = read(params, texts.tokens)
  truth = x
  # By units saved: the residual stream, and the sub-layers skipped.
  states: dict[int, tuple[jax.Array, tuple[int, ...]]] = {0: (x, ())}
  last = 2 * config.num_layers
  for block in range(last):
    saved = list(states)
    stacked = jnp.stack([states[j][0] for j in saved])
    after = run(params, block, texts.tokens, cache, stacked)
    truth = after[saved.index(0)]
    ways = [(j, after[place], states[j][1]) for place, j in enumerate(saved)]
    if 2 <= block < last - 2:
      gain = units[block % 2]
      ways += [
        (j + gain, x, (*skipped, block))
        for j, (x, skipped) in states.items()
        if j + gain <= most
      ]
    likeness = np.asarray(cosine(jnp.stack([way[1] for way in ways]), truth))
    states = {}
    best: dict[int, float] = {}
    for (j, x, skipped), like in zip(ways, likeness.tolist(), strict=True):
      if j and like < _LEAST_COSINE:
        continue
      if j not in best or like > best[j]:
        best[j], states[j] = like, (x, skipped)
  return [of_blocks(states[j][1]) for j in sorted(states) if j]
