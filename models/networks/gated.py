"""A transformer whose sub-layers are switched on and off by traced gates.

One compiled program for every set of sub-layers: all of them are computed, and
what a gate is closed to is not added. That is for finding out what a thinned
model would say; the thinned model itself
(`models.networks.transformer.SkippedLayers`) computes less.
"""

import jax.numpy as jnp
from jax import Array

from models.networks.transformer import Fed, Transformer
from specjax.types import ModelOutput


def gates_of(
  num_layers: int, attention: tuple[int, ...], mlp: tuple[int, ...]
) -> Array:
  """`bool[2 L]`: attention and MLP of each layer in turn, False if skipped."""
  skipped = [*(2 * i for i in attention), *(2 * i + 1 for i in mlp)]
  return jnp.ones(2 * num_layers, bool).at[jnp.array(skipped, int)].set(False)


def sub_layer(
  module: Transformer, block: int, x: Array, fed: Fed, source: Array
) -> Array:
  """Output of a sub-layer, to be added to `x: [B, T, D]`.

  Args:
    module: the network.
    block: in 0..2 L - 1, attention and MLP of each layer in turn.
    x: the residual stream before it.
    fed: from `Transformer.enter`, with a cache, of which it reads its layer.
    source: what the layer was given; an MLP beside its attention reads it.
  """
  index, is_mlp = divmod(block, 2)
  layer = module.layers[index]
  if is_mlp:
    return layer.fed_forward(source if layer.spec.parallel else x)
  assert fed.cache is not None
  out, _ = layer.attended(
    x,
    *fed.of(layer.spec),
    (fed.cache.keys[index], fed.cache.values[index]),
    fed.start,
  )
  return out


def forward(module: Transformer, gates: Array, fed: Fed) -> ModelOutput:
  """The output of the sub-layers whose gates are open.

  Args:
    module: the network.
    gates: `bool[2 L]`, see `gates_of`.
    fed: from `Transformer.enter`, with a cache.

  Raises:
    ValueError: if layers are recurrent, or attend to keys and values of others.
  """
  if module.config.deltas:
    raise ValueError("recurrent layers cannot be switched off")
  if len(module.config.cached) < len(module.layers):
    raise ValueError(
      "layers whose keys and values others attend to cannot be switched off"
    )
  x = fed.x
  for index in range(len(module.layers)):
    source = x
    for block in (2 * index, 2 * index + 1):
      added = sub_layer(module, block, x, fed, source)
      x = jnp.where(gates[block], x + added, x)
    x = module.layers[index].finished(x, fed.per_layer_of(index))
  return module.leave(x)
