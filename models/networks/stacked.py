"""The same transformer with its layers stacked and scanned over.

A program of one layer instead of L: a model of 80 layers compiles in seconds.
The parameters of the layers have a leading axis L, and so has the cache; both
are read, and the cache is written, in place at a traced layer. The numbers are
those of `models.networks.transformer`, whose modules are used.

Layers of one kind, which differ in their windows and rotary frequencies at
most, are one stack of parameters; so many as follow each other are one scan. A
model of a few dense layers and many mixtures is two scans, one whose kinds take
turns is a scan for each turn. Where one buffer cannot hold what layers cache
their pattern repeats, and what is scanned over is its repetitions
(`models.networks.periods`).
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from models.networks import lowbits, periods
from models.networks.description import LayerSpec, TransformerConfig
from models.networks.layers import Layer
from models.networks.lowbits import Format, lower
from models.networks.params import check_params, layerless, of_layer
from models.networks.transformer import (
  FINAL,
  Features,
  SkippedLayers,
  Transformer,
  check_features,
  mixtures_of,
)
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax.cache import Cache
from specjax.types import LanguageModel

# {"frame": all but the layers, "layers": parameters with a leading axis L}; of
# several kinds "layers" has those of each, by its name in `kinds`.
StackedParams = dict[str, Any]


def kinds(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
  """Layers of every kind, by its name; "" if all are of one."""
  if periods.needed(config):
    return periods.kinds(config)

  def kind(layer: LayerSpec):
    rope = layer.attention.rope
    bare = dataclasses.replace(layer.attention, window=None, rope=None)
    width = None if rope is None else rope.dim
    return dataclasses.replace(layer, attention=bare), width

  found: dict[Any, list[int]] = {}
  for i in range(config.num_layers):
    found.setdefault(kind(config.layer(i)), []).append(i)
  if len(found) == 1:
    return {"": tuple(range(config.num_layers))}
  return {f"kind{n}": tuple(i) for n, i in enumerate(found.values())}


def _modules(
  config: TransformerConfig,
  dtype,
  *,
  expert_axes: tuple[str, ...] = (),
  weights: Format | None = None,
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
  config: TransformerConfig, *, dtype, weights: Format | None = None
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
  params: StackedParams, config: TransformerConfig, form: Format
) -> StackedParams:
  """Parameters with their weights in few bits, where they lie."""
  expected = abstract_params(config, dtype=jnp.float32, weights=form)
  low = lambda params, expected: lowbits.lowered(params, expected, form)
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
  weights: Format | None = None,
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
  num_counted = len(mixtures_of(config)) if count_experts else 0
  lowbits.check_cache(config, stored)
  check_features(features, config.num_layers)
  by_expert = sharding is not None and sharding.experts == "expert"
  frame, layers = _modules(
    config,
    dtype,
    expert_axes=sharding.axes if sharding and by_expert else (),
    weights=weights,
  )
  if periods.needed(config):
    lowbits.check_weights(config, weights, on_mesh=True)
    if weights is not None or stored is not None:
      raise ValueError("layers that differ in their heads are not in few bits")
    return periods.as_language_model(
      config, frame, layers, abstract_params(config, dtype=dtype), dtype=dtype,
      skipped=skipped, sharding=sharding, features=features,
      count_experts=count_experts,
    )  # fmt: skip
  frame_def = nnx.graphdef(frame)
  layer_defs = {name: nnx.graphdef(layer) for name, layer in layers.items()}
  attentions = [config.layer(i).attention for i in range(config.num_layers)]
  windows = sorted({a.window for a in attentions}, key=str)
  ropes = list(dict.fromkeys(a.rope for a in attentions))
  kept = [
    i
    for i in range(config.num_layers)
    if i not in skipped.attention or i not in skipped.mlp
  ]
  # Of each layer its kind, and its place among those of it.
  place = {
    i: (k, at) for k, of in kinds(config).items() for at, i in enumerate(of)
  }
  # What a scan reads of each layer that is kept, all static.
  which = {
    "layer": np.array(kept, np.int32),
    "at": np.array([place[i][1] for i in kept], np.int32),
    "window": np.array(
      [windows.index(attentions[i].window) for i in kept], np.int32
    ),
    "rope": np.array([ropes.index(attentions[i].rope) for i in kept], np.int32),
    "attention": np.array([i not in skipped.attention for i in kept]),
    "mlp": np.array([i not in skipped.mlp for i in kept]),
  }
  # Of each feature: the first layer kept that is given it; x itself after all.
  wanted = [i for i in features if i != FINAL and i <= max(kept, default=-1)]
  first = [min(k for k in kept if k >= i) for i in wanted]
  which["feature"] = np.equal.outer(kept, first)
  put = functools.partial(constrain, sharding=sharding)
  shapes = abstract_params(config, dtype=dtype, weights=weights)

  def init_cache(batch: int, slots: int) -> Cache:
    cache = cache_lib.make_cache(
      batch=batch,
      slots=slots,
      num_layers=config.num_layers,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
      value_dim=attentions[0].value_dim,
      dtype=dtype,
      with_positions=config.has_windows,
      stacked=True,
      stored=stored,
    )
    return jax.tree.map(
      lambda x: put(x, "cache_lbksc") if x.ndim == 5 else x, cache
    )

  def apply(
    params, tokens, cache, *, positions=None, mask=None, logits_at=None
  ):
    check_params(shapes, params)
    outer = nnx.merge(frame_def, params["frame"])
    outer.config = config
    fed = outer.enter(tokens, cache, positions=positions, mask=mask)
    sees = [fed.sees[w] for w in windows]
    tables = [fed.rotary[rope] for rope in ropes]
    # What differs between windows. Without one nothing is ever too far away.
    far = jnp.int32(2**30)
    differs = [
      (
        jnp.broadcast_to(s.own, (len(tokens), *s.own.shape[-2:])),
        far if s.window is None else s.window,
        s.first,
      )
      for s in sees
    ]

    def body(carry, this, *, kind):
      x, kv, seen = carry
      seen = jnp.where(this["feature"][:, None, None, None], x, seen)
      own = jax.tree_util.tree_map_with_path(
        functools.partial(of_layer, index=this["at"]),
        params["layers"][kind] if kind else params["layers"],
      )
      module = nnx.merge(layer_defs[kind], own)
      visible = sees[0]
      if len(windows) > 1:
        own, window, first = jax.tree.map(
          lambda *each: jnp.stack(each)[this["window"]], *differs
        )
        visible = dataclasses.replace(
          visible, own=own, window=window, first=first
        )

      rotary = tables[0]
      if len(tables) > 1:
        rotary = jax.tree.map(
          lambda *each: jnp.stack(each)[this["rope"]], *tables
        )

      counts: list[Array] | None = [] if num_counted else None

      def run(x, kv, **parts):
        x, kv = module(
          x, rotary=rotary, sees=visible, kv=kv, start=fed.start,
          layer=this["layer"], at=this["at"], counts=counts, **parts,
        )  # fmt: skip
        whole = lambda b: put(b, "cache_lbksc") if b.ndim == 5 else b
        return put(x, "act_btd"), jax.tree.map(whole, kv)

      if which["attention"].all() and which["mlp"].all():
        x, kv = run(x, kv)
      else:
        x, kv = lax.switch(
          2 * this["attention"].astype(jnp.int32) + this["mlp"] - 1,
          [
            functools.partial(run, attention=False),
            functools.partial(run, mlp=False),
            run,
          ],
          x,
          kv,
        )
      return (x, kv, seen), counts and counts[0]

    x = put(fed.x, "act_btd")
    kv = (fed.cache.keys[0], fed.cache.values[0])
    seen = jnp.zeros((len(wanted), *x.shape), x.dtype)
    carry, touched = (x, kv, seen), []
    for kind, run in itertools.groupby(
      range(len(kept)), lambda n: place[kept[n]][0]
    ):
      these = [*run]
      of_run = {key: jnp.asarray(all_[these]) for key, all_ in which.items()}
      carry, found = lax.scan(functools.partial(body, kind=kind), carry, of_run)
      touched += jax.tree.leaves(found)
    x, kv, seen = carry
    given = dict(zip(wanted, seen, strict=True))
    given |= {i: x for i in features if i != FINAL and i not in given}
    output = outer.leave(x, logits_at, given, features)
    # Whole, whoever reads them: a head that is cut along channels would
    # otherwise have the compiler cut what lies between all layers so.
    whole = output.features
    output = dataclasses.replace(
      output,
      logits=put(output.logits, "logits_btv"),
      features=None if whole is None else put(whole, "act_btd"),
      experts=jnp.concatenate(touched) if touched else None,
    )
    return output, fed.cache.replace(
      keys=(kv[0],), values=(kv[1],), length=fed.start + tokens.shape[1]
    )

  return LanguageModel(
    vocab_size=config.vocab_size,
    max_positions=config.max_positions,
    init_cache=init_cache,
    apply=apply,
    takes_rows=True,
    num_counted=num_counted,
  )
