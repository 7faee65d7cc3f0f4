"""The transformer with its layers stacked and scanned over.

A program of one layer instead of L: a model of 80 layers compiles in seconds.
The parameters of the layers have a leading axis L, and so has the cache; both
are read, and the cache is written, in place at a traced layer. The numbers are
those of `models.networks.transformer`, whose modules are used.

Layers of one kind, which differ in their windows and rotary frequencies at
most, are one stack of parameters; so many as follow each other are one scan. A
model of a few dense layers and many mixtures is two scans. Where kinds take
turns by a pattern, as Qwen3.5's three of the gated delta rule and one of
attention, its scans are scanned over its repetitions. What a cache holds is
stacked apart: keys and values of all layers of attention with the same heads,
and states of all recurrent ones.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from models.networks import lowbits
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.layers import Layer
from models.networks.lowbits import Format, lower
from models.networks.params import check_params, layerless, of_layer
from models.networks.transformer import (
  FINAL,
  Features,
  SkippedLayers,
  Transformer,
  after_pass,
  check_features,
  delta_memory,
  mixtures_of,
  with_memories,
)
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax import recurrent
from specjax.cache import Cache
from specjax.types import LanguageModel

# {"frame": all but the layers, "layers": parameters with a leading axis L}; of
# several kinds "layers" has those of each, by its name in `kinds`.
StackedParams = dict[str, Any]


def kinds(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
  """Layers of every kind, by its name; "" if all are of one.

  Raises:
    ValueError: for recurrent layers that differ.
  """
  if len({*config.deltas.values()}) > 1:
    raise ValueError("recurrent layers that differ cannot be stacked")

  def kind(layer: LayerSpec):
    spec = layer.attention
    if isinstance(spec, DeltaSpec):
      return layer
    # Layers that read keys and values of others are alike, whosever they are.
    source = None if spec.source is None else 0
    bare = dataclasses.replace(spec, window=None, rope=None, source=source)
    width = None if spec.rope is None else spec.rope.dim
    return dataclasses.replace(layer, attention=bare), width

  counted: dict[Any, list[int]] = {}
  for i in range(config.num_layers):
    counted.setdefault(kind(config.layer(i)), []).append(i)
  if len(counted) == 1:
    return {"": tuple(range(config.num_layers))}
  return {f"kind{n}": tuple(i) for n, i in enumerate(counted.values())}


def buffers(config: TransformerConfig) -> list[tuple[int, ...]]:
  """Layers whose keys and values are one array each, as they are cached.

  These have the same heads and channels.
  """
  of_heads: dict[tuple[int, ...], list[int]] = {}
  for i in config.cached:
    of_heads.setdefault(_heads(config.attentions[i]), []).append(i)
  return [*map(tuple, of_heads.values())]


def _heads(a: AttentionSpec) -> tuple[int, int, int]:
  """Heads and channels of keys, and channels of values."""
  return a.num_kv_heads, a.head_dim, a.value_dim


def turns(names: Sequence[str]) -> tuple[list[tuple[str, int]], int]:
  """A pattern of layers of such kinds, and how often it repeats to the end.

  The pattern is runs of one kind, each with its layers: the shortest there is.
  """
  runs = [(kind, len([*run])) for kind, run in itertools.groupby(names)]
  for size in range(1, len(runs)):
    times, rest = divmod(len(runs), size)
    if not rest and runs == runs[:size] * times:
      return runs[:size], times
  return runs, 1


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
  if config.deltas:
    lowbits.check_weights(config, weights, on_mesh=True)
    if skipped != SkippedLayers():
      raise ValueError("of a model with recurrent layers none can be left out")
  ends = config.per_layer_dim or any(x.scaled for x in config.layers or ())
  if ends and skipped != SkippedLayers():
    raise ValueError("of layers that scale their output none can be left out")
  frame_def = nnx.graphdef(frame)
  layer_defs = {name: nnx.graphdef(layer) for name, layer in layers.items()}
  attentions, deltas = config.attentions, config.deltas
  windows = sorted({a.window for a in attentions.values()}, key=str)
  # Of a kind: these alone have tables of one width.
  ropes = {
    name: list(dict.fromkeys(attentions[i].rope for i in of if i in attentions))
    for name, of in kinds(config).items()
  }
  # A layer whose source is skipped has nothing to attend to.
  attending = [
    i
    for i in range(config.num_layers)
    if not {i, config.source(i)} & {*skipped.attention}
  ]
  kept = [
    i
    for i in range(config.num_layers)
    if i in attending or i not in skipped.mlp
  ]
  # Of each layer its kind, and its place among those of it.
  place = {
    i: (k, at) for k, of in kinds(config).items() for at, i in enumerate(of)
  }
  # And what it reads in the cache: in which keys and values, and where there,
  # or where in the states.
  kv_of = {
    i: (buffer, n)
    for buffer, of in enumerate(buffers(config))
    for n, i in enumerate(of)
  }
  kv_of |= {
    i: kv_of[a.source] for i, a in attentions.items() if a.source is not None
  }
  stored_at = {i: n for i, (_, n) in kv_of.items()}
  stored_at |= {i: n for n, i in enumerate(deltas)}
  numbers = lambda of: np.array([of(i) for i in kept], np.int32)
  # What a scan reads of each layer that is kept, all static. Recurrent ones
  # look at neither windows nor ropes.
  window = lambda i: windows.index(attentions[i].window)
  rope = lambda i: ropes[place[i][0]].index(attentions[i].rope)
  which = {
    "layer": numbers(lambda i: i),
    "stored": numbers(lambda i: stored_at[i]),
    "at": numbers(lambda i: place[i][1]),
    "window": numbers(lambda i: window(i) if i in attentions else 0),
    "rope": numbers(lambda i: rope(i) if i in attentions else 0),
    "attention": np.array([i in attending for i in kept]),
    "mlp": np.array([i not in skipped.mlp for i in kept]),
  }
  # Of each feature: the first layer kept that is given it; x itself after all.
  wanted = [i for i in features if i != FINAL and i <= max(kept, default=-1)]
  first = [min(k for k in kept if k >= i) for i in wanted]
  which["feature"] = np.equal.outer(kept, first)
  put = functools.partial(constrain, sharding=sharding)
  whole = functools.partial(  # what of a cache has heads, which are cut
    jax.tree.map, lambda x: put(x, "cache_lbksc") if x.ndim == 5 else x
  )
  shapes = abstract_params(config, dtype=dtype, weights=weights)

  def init_cache(batch: int, slots: int) -> Cache:
    each = [
      cache_lib.make_cache(
        batch=batch,
        slots=slots,
        num_layers=len(of),
        num_kv_heads=attentions[of[0]].num_kv_heads,
        head_dim=attentions[of[0]].head_dim,
        value_dim=attentions[of[0]].value_dim,
        dtype=dtype,
        with_positions=config.has_windows,
        stacked=True,
        stored=stored,
      )
      for of in buffers(config)
    ]
    cache = each[0].replace(
      keys=tuple(c.keys[0] for c in each),
      values=tuple(c.values[0] for c in each),
    )
    memories = tuple(  # one, if there are any
      delta_memory(delta, batch, dtype, stack=len(deltas))
      for delta in dict.fromkeys(deltas.values())
    )
    return whole(with_memories(cache, memories))

  def apply(
    params, tokens, cache, *, positions=None, mask=None, logits_at=None
  ):
    check_params(shapes, params)
    outer = nnx.merge(frame_def, params["frame"])
    fed = outer.enter(tokens, cache, positions=positions, mask=mask)
    states = recurrent.widened(fed.cache.recurrent, tokens.shape[1])
    sees = [fed.sees[w] for w in windows]
    tables = {
      kind: [fed.rotary[rope] for rope in of] for kind, of in ropes.items()
    }
    # What differs between windows. Without one nothing is ever too far away.
    far = jnp.int32(2**30)
    differs = [
      (
        jnp.broadcast_to(s.fed_mask, (len(tokens), *s.fed_mask.shape[-2:])),
        far if s.window is None else s.window,
        s.first,
      )
      for s in sees
    ]

    def attends(this, kind):
      """The rotary table of a layer of attention, and what its tokens see."""
      visible, rotary = sees[0], tables[kind][0]
      if len(windows) > 1:
        fed_mask, window, first = jax.tree.map(
          lambda *each: jnp.stack(each)[this["window"]], *differs
        )
        visible = dataclasses.replace(
          visible, fed_mask=fed_mask, window=window, first=first
        )
      if len(tables[kind]) > 1:
        rotary = jax.tree.map(
          lambda *each: jnp.stack(each)[this["rope"]], *tables[kind]
        )
      return rotary, visible

    def step(carry, this, *, kind):
      x, kvs, memories, seen = carry
      counts: list[Array] | None = [] if num_counted else None
      seen = jnp.where(this["feature"][:, None, None, None], x, seen)
      layer_params = jax.tree_util.tree_map_with_path(
        functools.partial(of_layer, index=this["at"]),
        params["layers"][kind] if kind else params["layers"],
      )
      module = nnx.merge(layer_defs[kind], layer_params)
      if isinstance(layers[kind].spec.attention, DeltaSpec):
        memory = jax.tree.map(
          lambda x: lax.dynamic_index_in_dim(x, this["stored"], keepdims=False),
          memories,
        )
        x, memory = module(
          x, *fed.of(layers[kind].spec), memory, fed.start, at=this["at"],
          counts=counts,
        )  # fmt: skip
        memories = jax.tree.map(
          lambda x, new: lax.dynamic_update_index_in_dim(
            x, new, this["stored"], 0
          ),
          memories,
          memory,
        )
        carry = put(x, "act_btd"), kvs, whole(memories), seen
        return carry, jnp.stack(counts) if counts else None
      rotary, visible = attends(this, kind)
      buffer, _ = kv_of[kinds(config)[kind][0]]

      def run(x, kv, **parts):
        x, kv = module(
          x, rotary=rotary, sees=visible, kv=kv, start=fed.start,
          layer=this["stored"], at=this["at"], counts=counts,
          per_layer=fed.per_layer_of(this["layer"]), **parts,
        )  # fmt: skip
        return put(x, "act_btd"), whole(kv)

      if which["attention"].all() and which["mlp"].all():
        x, kv = run(x, kvs[buffer])
      else:
        x, kv = lax.switch(
          2 * this["attention"].astype(jnp.int32) + this["mlp"] - 1,
          [
            functools.partial(run, attention=False),
            functools.partial(run, mlp=False),
            run,
          ],
          x,
          kvs[buffer],
        )
      kvs = (*kvs[:buffer], kv, *kvs[buffer + 1 :])
      return (x, kvs, memories, seen), jnp.stack(counts) if counts else None

    def turn(carry, these):
      """The scans of a pattern; of its layers with mixtures the counts."""
      touched, first = [], 0
      for kind, count in pattern:
        run = {k: v[first : first + count] for k, v in these.items()}
        carry, counted = lax.scan(
          functools.partial(step, kind=kind), carry, run
        )
        touched += [x.reshape(-1) for x in jax.tree.leaves(counted)]
        first += count
      return carry, jnp.concatenate(touched) if touched else None

    x = put(fed.x, "act_btd")
    kvs = tuple(zip(fed.cache.keys, fed.cache.values, strict=True))
    seen = jnp.zeros((len(wanted), *x.shape), x.dtype)
    memories = None if states is None else states.layers[0]
    pattern, times = turns([place[i][0] for i in kept])
    of_turns = {
      key: jnp.asarray(of.reshape(times, len(kept) // times, *of.shape[1:]))
      for key, of in which.items()
    }
    carry = (x, kvs, memories, seen)
    if times == 1:
      carry, touched = turn(carry, {k: v[0] for k, v in of_turns.items()})
    else:
      carry, touched = lax.scan(turn, carry, of_turns)
    x, kvs, memories, seen = carry
    given = dict(zip(wanted, seen, strict=True))
    given |= {i: x for i in features if i != FINAL and i not in given}
    output = outer.leave(x, logits_at, given, features)
    # Whole, whoever reads them: a head that is cut along channels would
    # otherwise have the compiler cut what lies between all layers so.
    read = output.features
    output = dataclasses.replace(
      output,
      logits=put(output.logits, "logits_btv"),
      features=None if read is None else put(read, "act_btd"),
      experts=None if touched is None else touched.reshape(-1),
    )
    return output, fed.cache.replace(
      keys=tuple(keys for keys, _ in kvs),
      values=tuple(values for _, values in kvs),
      length=fed.start + tokens.shape[1],
      recurrent=after_pass(fed.cache, (memories,), fed.start, tokens.shape[1]),
    )

  return LanguageModel(
    vocab_size=config.vocab_size,
    max_positions=config.max_positions,
    init_cache=init_cache,
    apply=apply,
    takes_rows=True,
    has_states=bool(deltas),
    num_counted=num_counted,
  )
