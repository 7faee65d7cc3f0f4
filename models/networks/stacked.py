"""The same transformer with its layers stacked and scanned over.

A program of one layer instead of L: a model of 80 layers compiles in seconds.
The parameters of the layers have a leading axis L, and so has the cache; both
are read, and the cache is written, in place at a traced layer. The numbers are
those of `models.networks.transformer`, whose modules are used. Layers may
differ in their windows and rotary frequencies; if some are recurrent, by a
pattern that repeats (`models.networks.periods`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from models.networks import periods
from models.networks.description import LayerSpec, TransformerConfig
from models.networks.layers import Layer
from models.networks.params import check_params, layerless, of_layer
from models.networks.transformer import (
  FINAL,
  Features,
  SkippedLayers,
  Transformer,
  check_features,
)
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax.cache import Cache
from specjax.types import LanguageModel

# {"frame": all but the layers, "layers": parameters with a leading axis L}
StackedParams = dict[str, Any]


def _modules(config: TransformerConfig, dtype) -> tuple[Transformer, Layer]:
  """A model without layers, and one layer, with shapes for parameters."""
  _check_alike(config)
  bare = dataclasses.replace(config, num_layers=0, windows=None, layers=None)
  return nnx.eval_shape(
    lambda: (
      Transformer(bare, dtype=dtype, rngs=nnx.Rngs(0)),
      Layer(config, dtype, rngs=nnx.Rngs(0)),
    )
  )


def _check_alike(config: TransformerConfig) -> None:
  """Raises ValueError for layers that one program cannot be made of."""

  def kind(layer: LayerSpec):
    rope = layer.attention.rope
    bare = dataclasses.replace(layer.attention, window=None, rope=None)
    width = None if rope is None else rope.dim
    return dataclasses.replace(layer, attention=bare), width

  if config.per_layer_dim or len(config.cached) < config.num_layers:
    raise ValueError(
      "layers with embeddings of their own, or with keys and values of others, "
      "cannot be stacked"
    )
  first = kind(config.layer(0))
  for i, layer in enumerate(config.layers or ()):
    if kind(layer) != first:
      raise ValueError(
        "layers that differ in more than windows and rotary frequencies cannot "
        f"be stacked: layer {i} is {layer}, and layer 0 {config.layer(0)}"
      )


def abstract_params(config: TransformerConfig, *, dtype) -> StackedParams:
  """Shapes and dtypes of the parameters, `jax.ShapeDtypeStruct` leaves."""
  if config.deltas:
    return periods.abstract_params(config, dtype=dtype)
  frame, layer = map(layerless, _modules(config, dtype))
  layers = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((config.num_layers, *x.shape), x.dtype),
    layer,
  )
  return {"frame": frame, "layers": layers}


def stack(module: Transformer) -> StackedParams:
  """The parameters of a module, stacked; copies the layers'."""
  if module.config.deltas:
    return periods.stack(module)
  layers = map(layerless, module.layers)
  return {
    "frame": layerless(module),
    "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *layers),
  }


def path(config: TransformerConfig, number: int, *names) -> tuple:
  """The path, in a module, of a layer's part of a stacked parameter.

  Args:
    config: of the model.
    number: along the leading axis.
    *names: of the parameter, after "layers".
  """
  if config.deltas:
    first, *names = names
    return ("layers", periods.layer_of(config, number, first), *names)
  return ("layers", number, *names)


def as_language_model(
  config: TransformerConfig,
  *,
  dtype=jnp.float32,
  skipped: SkippedLayers | None = None,
  sharding: Sharding | None = None,
  features: Features = (),
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

  Returns:
    The `LanguageModel`; its parameters are as `abstract_params` says.
  """
  skipped = skipped or SkippedLayers()
  skipped.check(config.num_layers)
  if config.deltas:
    return periods.as_language_model(
      config, dtype=dtype, skipped=skipped, sharding=sharding, features=features
    )
  check_features(features, config.num_layers)
  frame, layer = _modules(config, dtype)
  frame_def, layer_def = nnx.graphdef(frame), nnx.graphdef(layer)
  kinds = [config.layer(i).attention for i in range(config.num_layers)]
  windows = sorted({kind.window for kind in kinds}, key=str)
  ropes = list(dict.fromkeys(kind.rope for kind in kinds))
  kept = [
    i
    for i in range(config.num_layers)
    if i not in skipped.attention or i not in skipped.mlp
  ]
  # What a scan reads of each layer that is kept, all static.
  which = {
    "layer": np.array(kept, np.int32),
    "window": np.array(
      [windows.index(kinds[i].window) for i in kept], np.int32
    ),
    "rope": np.array([ropes.index(kinds[i].rope) for i in kept], np.int32),
    "attention": np.array([i not in skipped.attention for i in kept]),
    "mlp": np.array([i not in skipped.mlp for i in kept]),
  }
  # Of each feature: the first layer kept that is given it; x itself after all.
  wanted = [i for i in features if i != FINAL and i <= max(kept, default=-1)]
  first = [min(k for k in kept if k >= i) for i in wanted]
  which["feature"] = np.equal.outer(kept, first)
  put = functools.partial(constrain, sharding=sharding)
  shapes = abstract_params(config, dtype=dtype)

  def init_cache(batch: int, slots: int) -> Cache:
    cache = cache_lib.make_cache(
      batch=batch,
      slots=slots,
      num_layers=config.num_layers,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
      dtype=dtype,
      with_positions=config.has_windows,
      stacked=True,
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

    def body(carry, this):
      x, kv, seen = carry
      seen = jnp.where(this["feature"][:, None, None, None], x, seen)
      own = jax.tree_util.tree_map_with_path(
        functools.partial(of_layer, index=this["layer"]), params["layers"]
      )
      module = nnx.merge(layer_def, own)
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

      def run(x, kv, **kind):
        x, kv = module(
          x, rotary=rotary, sees=visible, kv=kv, start=fed.start,
          layer=this["layer"], **kind,
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
      return (x, kv, seen), None

    x = put(fed.x, "act_btd")
    kv = (fed.cache.keys[0], fed.cache.values[0])
    seen = jnp.zeros((len(wanted), *x.shape), x.dtype)
    (x, kv, seen), _ = lax.scan(
      body, (x, kv, seen), jax.tree.map(jnp.asarray, which)
    )
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
  )
