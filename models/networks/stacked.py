"""The transformer with stacked layers, which are scanned over.

The program has one period of layers instead of all, so a model of 80 layers
compiles in seconds. A period is, for example, Gemma 3's five layers with a
window and one without; `periods` finds it, and the rest is unrolled. Each layer
of a period keeps its own window and rotary embeddings. Results are those of
`models.networks.transformer`, whose modules are used.

Parameters of layers that differ at most in windows and rotary frequencies have
a leading axis, as do the caches of all layers with the same heads. Both are
read, and the cache is written, in place at a traced index.

With `Sharding.unrolled` each layer has its own parameters and cache, and there
is no scan: GPUs would copy every weight before its product.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from models.networks import quantized
from models.networks.description import (
  DeltaSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.layers import Layer
from models.networks.params import check_params, layerless, shapes_of
from models.networks.quantized import Quantization, quantize_module
from models.networks.transformer import (
  FINAL,
  Features,
  Fed,
  SkippedLayers,
  Transformer,
  after_pass,
  check_features,
  delta_memory,
  with_memories,
)
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax import recurrent
from specjax.cache import Cache
from specjax.types import LanguageModel

# {"frame": all but the layers, "layers": those of each kind by its name in
# `kinds`, with a leading axis}.
StackedParams = dict[str, Any]


def kinds(
  config: TransformerConfig, *, unrolled: bool = False
) -> dict[str, tuple[int, ...]]:
  """Layers whose parameters are stacked together, by name."""
  if unrolled:
    return {f"kind{i}": (i,) for i in range(config.num_layers)}

  def kind(layer: LayerSpec):
    spec = layer.attention
    if isinstance(spec, DeltaSpec):
      return layer
    # Layers that share another's KV cache are alike whichever it is.
    source = None if spec.source is None else 0
    bare = dataclasses.replace(spec, window=None, rope=None, source=source)
    return dataclasses.replace(layer, attention=bare)

  of_kind: dict[LayerSpec, list[int]] = {}
  for i, layer in enumerate(config.layers):
    of_kind.setdefault(kind(layer), []).append(i)
  return {f"kind{n}": tuple(of) for n, of in enumerate(of_kind.values())}


def buffers(
  config: TransformerConfig, *, unrolled: bool = False
) -> list[tuple[int, ...]]:
  """Layers whose KV caches are one array because they have the same heads."""
  if unrolled:
    return [(i,) for i in config.cached]
  of_heads: dict[tuple[int, ...], list[int]] = {}
  for i in config.cached:
    a = config.attentions[i]
    heads = a.num_kv_heads, a.head_dim, a.value_dim
    of_heads.setdefault(heads, []).append(i)
  return [*map(tuple, of_heads.values())]


def places(
  config: TransformerConfig, *, unrolled: bool = False
) -> list[tuple[str, int, int | None, int]]:
  """Each layer's kind and index in it, and its buffer and index in that.

  The buffer is one of `buffers`, None for a recurrent layer, or the source's if
  the layer shares another's KV cache.
  """
  at = {
    i: (kind, n)
    for kind, of in kinds(config, unrolled=unrolled).items()
    for n, i in enumerate(of)
  }
  cached: dict[int, tuple[int | None, int]] = {
    i: (b, n)
    for b, of in enumerate(buffers(config, unrolled=unrolled))
    for n, i in enumerate(of)
  }
  for i, a in config.attentions.items():
    if a.source is not None:
      cached[i] = cached[a.source]
  cached |= {i: (None, n) for n, i in enumerate(config.deltas)}
  return [(*at[i], *cached[i]) for i in range(config.num_layers)]


def periods(layers: Sequence[Any]) -> list[tuple[int, int, int]]:
  """Splits a list of layers into maximal periodic parts.

  Returns:
    For each part, in order, its first layer, its period, and the number of
    repetitions.
  """
  parts, first, layers = [], 0, [*layers]
  while first < len(layers):
    best = 1, 1
    for size in range(1, (len(layers) - first) // 2 + 1):
      period, times = layers[first : first + size], 1
      while layers[first + size * times :][:size] == period:
        times += 1
      if times > 1 and size * times > best[0] * best[1]:
        best = size, times
    parts.append((first, *best))
    first += best[0] * best[1]
  return parts


def module_at(graph, params, index) -> Any:
  """The module at an index of stacked parameters.

  Experts of all layers are kept together until they are used: slicing out a
  layer would copy all its experts in every pass.
  """

  def of_layer(path, x):
    if any(getattr(key, "key", None) == "experts" for key in path):
      return x
    if len(x) == 1:
      return x[0]
    return lax.dynamic_index_in_dim(x, index, keepdims=False)

  return nnx.merge(graph, jax.tree_util.tree_map_with_path(of_layer, params))


def _modules(
  config: TransformerConfig,
  dtype,
  *,
  expert_axes: tuple[str, ...] = (),
  weights: Quantization | None = None,
  unrolled: bool = False,
) -> tuple[Transformer, dict[str, Layer]]:
  """A model without layers, and a layer of each kind, as shapes."""

  def shapes(make, **more):
    def stored(rngs):
      module = make(config, dtype=dtype, rngs=rngs, **more)
      if weights is not None:
        quantize_module(module, weights)
      return module

    return shapes_of(stored)

  return shapes(Transformer, with_layers=False), {
    name: shapes(Layer, index=of[0], expert_axes=expert_axes)
    for name, of in kinds(config, unrolled=unrolled).items()
  }


def abstract_params(
  config: TransformerConfig,
  *,
  dtype,
  weights: Quantization | None = None,
  unrolled: bool = False,
) -> StackedParams:
  """Shapes and dtypes of the parameters, `jax.ShapeDtypeStruct` leaves."""
  frame, layers = _modules(config, dtype, weights=weights, unrolled=unrolled)

  def stack(module: Layer, count: int):
    shape = lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype)
    return jax.tree.map(shape, nnx.state(module))

  of_kind = {
    name: stack(layers[name], len(of))
    for name, of in kinds(config, unrolled=unrolled).items()
  }
  return {"frame": layerless(frame), "layers": of_kind}


def stack(module: Transformer, *, unrolled: bool = False) -> StackedParams:
  """Stacks the parameters of a module; copies those of layers."""
  of_kind = {
    name: jax.tree.map(
      lambda *xs: jnp.stack(xs), *(nnx.state(module.layers[i]) for i in of)
    )
    for name, of in kinds(module.config, unrolled=unrolled).items()
  }
  return {"frame": layerless(module), "layers": of_kind}


def quantize(
  params: StackedParams, config: TransformerConfig, how: Quantization
) -> StackedParams:
  """Quantizes the weights in parameters, which keep their shardings."""
  unrolled = params["layers"].keys() == kinds(config, unrolled=True).keys()
  expected = abstract_params(
    config, dtype=jnp.float32, weights=how, unrolled=unrolled
  )
  return quantized.quantize_params(params, expected, how)


def as_language_model(
  config: TransformerConfig,
  *,
  dtype=jnp.float32,
  skipped: SkippedLayers | None = None,
  sharding: Sharding | None = None,
  features: Features = (),
  weights: Quantization | None = None,
  params: StackedParams | None = None,
  stored: str | None = None,
) -> LanguageModel:
  """The model as pure functions of stacked parameters.

  Args:
    config: shapes and switches.
    dtype: dtype of parameters, activations and cache.
    sharding: rules for activations and cache on the mesh in use; None, or no
      mesh, leaves them to XLA.
    weights: how weights are stored; None for `dtype`.
    params: parameters, or their shapes, that others must match in shape; by
      default those for `weights`.
    skipped, features, stored: as for
      `models.networks.transformer.as_language_model`.

  Returns:
    The `LanguageModel`, with parameters like `abstract_params`.

  Raises:
    ValueError: for layers that do not exist, or recurrent layers that differ or
      are skipped.
  """
  skipped = skipped or SkippedLayers()
  skipped.check(config.num_layers)
  quantized.check_cache(config, stored)
  check_features(features, config.num_layers)
  if config.deltas:
    if len({*config.deltas.values()}) > 1:
      raise ValueError("recurrent layers that differ cannot be stacked")
    quantized.check_weights(config, weights, on_mesh=True)
    if skipped != SkippedLayers():
      raise ValueError("a model with recurrent layers cannot skip layers")
  by_expert = sharding is not None and sharding.experts == "expert"
  axes = sharding.axes if sharding and by_expert else ()
  unrolled = sharding is not None and sharding.unrolled
  frame, layers = _modules(
    config, dtype, expert_axes=axes, weights=weights, unrolled=unrolled
  )
  if params is None:
    params = abstract_params(
      config, dtype=dtype, weights=weights, unrolled=unrolled
    )
  model = _Stack(
    config=config,
    frame=nnx.graphdef(frame),
    layers={name: nnx.graphdef(layer) for name, layer in layers.items()},
    shapes=jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
    ),
    places=places(config, unrolled=unrolled),
    skipped=skipped,
    features=features,
    sharding=sharding,
  )
  return LanguageModel(
    vocab_size=config.vocab_size,
    max_positions=config.max_positions,
    init_cache=functools.partial(model.init_cache, dtype, stored),
    apply=model.apply,
    takes_rows=True,
    has_states=bool(config.deltas),
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Stack:
  """A model of stacked layers: its graphs and shapes, without parameters."""

  config: TransformerConfig
  frame: Any
  layers: dict[str, Any]
  shapes: Any
  places: list[tuple[str, int, int | None, int]]
  skipped: SkippedLayers
  features: Features
  sharding: Sharding | None

  @property
  def unrolled(self) -> bool:
    """Whether layers are not stacked."""
    return self.sharding is not None and self.sharding.unrolled

  def put(self, x: Array, kind: str) -> Array:
    """Constrains an array's layout by its kind."""
    return constrain(x, kind, sharding=self.sharding)

  def constrained(self, cached):
    """Constrains a cache's arrays, sharding those with heads."""
    return jax.tree.map(
      lambda x: self.put(x, "cache_lbksc") if x.ndim == 5 else x, cached
    )

  def init_cache(
    self, dtype, stored: str | None, batch: int, slots: int
  ) -> Cache:
    """An empty cache: keys and values of `buffers`, and states."""
    c = self.config
    each = [
      cache_lib.make_cache(
        batch=batch,
        slots=slots,
        num_layers=len(of),
        num_kv_heads=c.attentions[of[0]].num_kv_heads,
        head_dim=c.attentions[of[0]].head_dim,
        value_dim=c.attentions[of[0]].value_dim,
        dtype=dtype,
        with_positions=c.has_windows,
        stacked=True,
        stored=stored,
      )
      for of in buffers(c, unrolled=self.unrolled)
    ]
    cache = each[0].replace(
      keys=tuple(x.keys[0] for x in each),
      values=tuple(x.values[0] for x in each),
    )
    memories = tuple(  # one, if there are any
      delta_memory(delta, batch, dtype, stack=len(c.deltas))
      for delta in dict.fromkeys(c.deltas.values())
    )
    return self.constrained(with_memories(cache, memories))

  def apply(
    self, params, tokens, cache, *, positions=None, mask=None, logits_at=None
  ):
    """See `specjax.types.ApplyFn`."""
    check_params(self.shapes, params)
    outer = nnx.merge(self.frame, params["frame"])
    fed = outer.enter(tokens, cache, positions=positions, mask=mask)
    states = recurrent.widen(fed.cache.recurrent, tokens.shape[1])
    x = self.put(fed.x, "act_btd")
    kvs = tuple(zip(fed.cache.keys, fed.cache.values, strict=True))
    memories = None if states is None else states.layers[0]
    last = self.config.num_layers
    wanted = np.array([i for i in self.features if i not in (FINAL, last)], int)
    seen = jnp.zeros((len(wanted), *x.shape), x.dtype)
    carry = x, kvs, memories, seen
    numbers = np.array([(at, stored) for _, at, _, stored in self.places])
    numbers = np.c_[np.arange(last), numbers].astype(np.int32)
    parts = [(0, last, 1)]
    if not self.unrolled:
      parts = periods([*map(self.layer_at, range(last))])
    for first, size, times in parts:
      body = functools.partial(
        self.period, params["layers"], fed, wanted, first
      )
      of = numbers[first : first + size * times].reshape(times, size, 3)
      carry, _ = body(carry, of[0]) if times == 1 else lax.scan(body, carry, of)
    x, kvs, memories, seen = carry
    inputs = dict(zip(wanted.tolist(), seen, strict=True)) | {last: x}
    output = outer.leave(x, logits_at, inputs, self.features)
    # Replicated: otherwise a head sharded by channels would make the compiler
    # shard the activations between all layers like that.
    read = output.features
    output = dataclasses.replace(
      output,
      logits=self.put(output.logits, "logits_btv"),
      features=None if read is None else self.put(read, "act_btd"),
    )
    return output, fed.cache.replace(
      keys=tuple(keys for keys, _ in kvs),
      values=tuple(values for _, values in kvs),
      length=fed.start + tokens.shape[1],
      recurrent=after_pass(fed.cache, (memories,), fed.start, tokens.shape[1]),
    )

  def layer_at(self, index: int) -> tuple[LayerSpec, bool, bool]:
    """A layer, and whether its attention and its MLP are used."""
    # A layer whose source is skipped cannot attend either.
    read = {index, self.config.source(index)}
    return (
      self.config.layers[index],
      not read & {*self.skipped.attention},
      index not in self.skipped.mlp,
    )

  def period(self, layers, fed: Fed, wanted, first: int, carry, numbers):
    """A period of layers, described by those from `first` on.

    The carry is the residual stream, the cache's arrays, and the inputs of the
    layers in `wanted`; `numbers`, `i32[P, 3]`, are each layer's number, its
    index in its kind, and its index in the cache.
    """
    x, kvs, memories, seen = carry
    for i, (number, at, stored) in enumerate(numbers, first):
      if len(wanted):
        seen = jnp.where((wanted == number)[:, None, None, None], x, seen)
      spec, attends, has_mlp = self.layer_at(i)
      kind, _, buffer, _ = self.places[i]
      layer = functools.partial(
        module_at(self.layers[kind], layers[kind], at),
        at=at, per_layer=fed.per_layer_of(number),
        attention=attends, mlp=has_mlp,
      )  # fmt: skip
      if buffer is not None:
        kv = kvs[buffer]
        if self.unrolled:  # a cache of one layer
          stored = None
          kv = jax.tree.map(lambda x: x[0] if x.ndim == 5 else x, kv)
        x, kv = layer(x, *fed.of(spec), kv, fed.start, layer=stored)
        if self.unrolled:
          kv = jax.tree.map(lambda x: x[None] if x.ndim == 4 else x, kv)
        kvs = (*kvs[:buffer], self.constrained(kv), *kvs[buffer + 1 :])
      else:
        memory = jax.tree.map(
          lambda x, n=stored: lax.dynamic_index_in_dim(x, n, keepdims=False),
          memories,
        )
        x, memory = layer(x, *fed.of(spec), memory, fed.start)
        put = functools.partial(
          lax.dynamic_update_index_in_dim, index=stored, axis=0
        )
        memories = self.constrained(jax.tree.map(put, memories, memory))
      x = self.put(x, "act_btd")
    return (x, kvs, memories, seen), None
