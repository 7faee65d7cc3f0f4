"""The transformer with its layers stacked and scanned over.

A program of one layer instead of L: a model of 80 layers compiles in seconds.
The parameters of the layers have a leading axis L, and so has the cache; both
are read, and the cache is written, in place at a traced layer. The numbers are
those of `models.networks.transformer`, whose modules are used.

Layers of one kind, which differ in their windows and rotary frequencies at
most, are one stack of parameters. A cache is stacked apart: keys and values of
all layers of attention with the same heads, and states of all recurrent ones.
`models.networks.scanned` is a pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.networks import quantized
from models.networks.description import TransformerConfig
from models.networks.layers import Layer
from models.networks.params import layerless
from models.networks.quantized import Quantization, lower
from models.networks.scanned import Stack, kinds, new_cache, reads_of
from models.networks.transformer import (
  Features,
  SkippedLayers,
  Transformer,
  check_features,
  mixtures_of,
)
from models.sharding import Sharding
from specjax.types import LanguageModel

# {"frame": all but the layers, "layers": parameters with a leading axis L}; of
# several kinds "layers" has those of each, by its name in `kinds`.
StackedParams = dict[str, Any]


def _modules(
  config: TransformerConfig,
  dtype,
  *,
  expert_axes: tuple[str, ...] = (),
  weights: Quantization | None = None,
) -> tuple[Transformer, dict[str, Layer]]:
  """A model without layers, and a layer of each kind, of shapes alone."""
  first = {name: of_kind[0] for name, of_kind in kinds(config).items()}

  def stored(module):
    if weights is not None:
      lower(module, weights)
    return module

  make = lambda index: stored(
    Layer(config, dtype, index=index, expert_axes=expert_axes, rngs=nnx.Rngs(0))
  )
  frame = lambda: stored(
    Transformer(config, dtype=dtype, rngs=nnx.Rngs(0), with_layers=False)
  )
  return nnx.eval_shape(frame), {
    name: nnx.eval_shape(functools.partial(make, index))
    for name, index in first.items()
  }


def abstract_params(
  config: TransformerConfig, *, dtype, weights: Quantization | None = None
) -> StackedParams:
  """Shapes and dtypes of the parameters, `jax.ShapeDtypeStruct` leaves."""
  frame, layers = _modules(config, dtype, weights=weights)

  def stacked(x, count: int):
    return jax.ShapeDtypeStruct((count, *x.shape), x.dtype)

  of_kind = {
    name: jax.tree.map(
      functools.partial(stacked, count=len(of)), layerless(layers[name])
    )
    for name, of in kinds(config).items()
  }
  return {"frame": layerless(frame), "layers": of_kind.get("", of_kind)}


def stack(module: Transformer) -> StackedParams:
  """The parameters of a module, stacked; copies the layers'."""
  of_kind = {
    name: jax.tree.map(
      lambda *xs: jnp.stack(xs), *(layerless(module.layers[i]) for i in layers)
    )
    for name, layers in kinds(module.config).items()
  }
  return {"frame": layerless(module), "layers": of_kind.get("", of_kind)}


def lowered(
  params: StackedParams, config: TransformerConfig, form: Quantization
) -> StackedParams:
  """Parameters with their weights in few bits, where they lie."""
  expected = abstract_params(config, dtype=jnp.float32, weights=form)
  low = lambda params, expected: quantized.lowered(params, expected, form)
  layers, of = params["layers"], expected["layers"]
  if "" in kinds(config):
    layers = low(layers, of)
  else:
    layers = {name: low(layers[name], of[name]) for name in of}
  return {"frame": low(params["frame"], expected["frame"]), "layers": layers}


def as_language_model(
  config: TransformerConfig,
  *,
  dtype=jnp.float32,
  skipped: SkippedLayers | None = None,
  sharding: Sharding | None = None,
  features: Features = (),
  count_experts: bool = False,
  weights: Quantization | None = None,
  stored: str | None = None,
) -> LanguageModel:
  """The model as pure functions of stacked parameters.

  Args:
    config: shapes and switches.
    dtype: of parameters, activations and cache.
    skipped: sub-layers to leave out; parameters and cache are those of the full
      model, as in `models.networks.transformer.as_language_model`.
    sharding: where activations and cache lie on the mesh in use; None, or no
      mesh, for wherever XLA puts them.
    features: what `ModelOutput.features` holds, as in
      `models.networks.transformer`.
    count_experts: likewise; not with sub-layers left out.
    weights: how weights are stored; None for `dtype`.
    stored: what keys and values are stored as, "int8" or "fp8"; None for
      `dtype`.

  Returns:
    The `LanguageModel`; its parameters are as `abstract_params` says.

  Raises:
    ValueError: for layers that are not there, or cannot be stacked or counted.
  """
  skipped = skipped or SkippedLayers()
  skipped.check(config.num_layers)
  if count_experts and skipped != SkippedLayers():
    raise ValueError("experts are counted in all layers, got some left out")
  quantized.check_cache(config, stored)
  check_features(features, config.num_layers)
  by_expert = sharding is not None and sharding.experts == "expert"
  frame, layers = _modules(
    config,
    dtype,
    expert_axes=sharding.axes if sharding and by_expert else (),
    weights=weights,
  )
  if config.deltas:
    quantized.check_weights(config, weights, on_mesh=True)
    if skipped != SkippedLayers():
      raise ValueError("of a model with recurrent layers none can be left out")
  ends = config.per_layer_dim or any(x.scaled for x in config.layers)
  if ends and skipped != SkippedLayers():
    raise ValueError("of layers that scale their output none can be left out")
  model = Stack(
    config=config,
    frame=nnx.graphdef(frame),
    layers={name: nnx.graphdef(layer) for name, layer in layers.items()},
    shapes=abstract_params(config, dtype=dtype, weights=weights),
    reads=reads_of(config, skipped, features),
    features=features,
    num_counted=len(mixtures_of(config)) if count_experts else 0,
    sharding=sharding,
  )
  return LanguageModel(
    vocab_size=config.vocab_size,
    max_positions=config.max_positions,
    init_cache=functools.partial(new_cache, model, dtype, stored),
    apply=model.apply,
    takes_rows=True,
    has_states=bool(config.deltas),
    num_counted=model.num_counted,
  )
