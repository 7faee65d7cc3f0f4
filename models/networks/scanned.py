"""A pass through stacked layers: scans, and what they read of each layer.

Layers of one kind that follow each other are one scan: a model of a few dense
layers and many mixtures is two. Where kinds take turns by a pattern, as
Qwen3.5's three of the gated delta rule and one of attention, its scans are
scanned over its repetitions.
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

from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.layers import Layer
from models.networks.params import check_params, of_layer
from models.networks.transformer import (
  FINAL,
  Features,
  Fed,
  SkippedLayers,
  after_pass,
  delta_memory,
  with_memories,
)
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax import recurrent
from specjax.cache import Cache


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
  for i, layer in enumerate(config.layers):
    counted.setdefault(kind(layer), []).append(i)
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reads:
  """What the scans of a pass read of each of its K layers; all static.

  Attributes:
    kinds: of each layer its kind; those that are left out whole have none.
    buffers: of each kind of attention, its array of keys and values.
    windows: of all layers.
    ropes: of each kind those of its layers, whose tables are of one width.
    wanted: features that some layer is given; the others are x after them all.
    of_layers: `[K, ...]` by name: the layer's number ("layer"); its place in
      keys and values, or states ("stored"), and among the parameters of its
      kind ("at"); its "window" and its "rope", indices; whether it has its
      "attention" and its "mlp"; and which of `wanted` it is given ("feature").
  """

  kinds: list[str]
  buffers: dict[str, int]
  windows: list[int | None]
  ropes: dict[str, list[Any]]
  wanted: list[Any]
  of_layers: dict[str, np.ndarray]


def reads_of(
  config: TransformerConfig, skipped: SkippedLayers, features: Features
) -> Reads:
  """What scans read of layers, some of which are left out."""
  attentions = config.attentions
  windows = sorted({a.window for a in attentions.values()}, key=str)
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
  stored_at |= {i: n for n, i in enumerate(config.deltas)}
  numbers = lambda of: np.array([of(i) for i in kept], np.int32)
  # Recurrent layers look at neither windows nor ropes.
  window = lambda i: windows.index(attentions[i].window)
  rope = lambda i: ropes[place[i][0]].index(attentions[i].rope)
  # Of each feature: the first layer kept that is given it.
  wanted = [i for i in features if i != FINAL and i <= max(kept, default=-1)]
  first = [min(k for k in kept if k >= i) for i in wanted]
  return Reads(
    kinds=[place[i][0] for i in kept],
    buffers={
      kind: kv_of[of[0]][0]
      for kind, of in kinds(config).items()
      if of[0] in kv_of
    },
    windows=windows,
    ropes=ropes,
    wanted=wanted,
    of_layers={
      "layer": numbers(lambda i: i),
      "stored": numbers(lambda i: stored_at[i]),
      "at": numbers(lambda i: place[i][1]),
      "window": numbers(lambda i: window(i) if i in attentions else 0),
      "rope": numbers(lambda i: rope(i) if i in attentions else 0),
      "attention": np.array([i in attending for i in kept]),
      "mlp": np.array([i not in skipped.mlp for i in kept]),
      "feature": np.equal.outer(kept, first),
    },
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
  """Inputs of all layers in a pass.

  Attributes:
    layers: their parameters, stacked.
    fed: the fed tokens.
    sees: of each of `Reads.windows`, what they see.
    differs: of each what of that differs: mask, window, and first slot.
    tables: of each kind, the rotary tables of `Reads.ropes`.
  """

  layers: Any
  fed: Fed
  sees: list[Any]
  differs: list[tuple[Array, Any, Any]]
  tables: dict[str, list[Any]]

  def attends(self, this: dict[str, Array], kind: str) -> tuple[Any, Any]:
    """The rotary table of a layer of attention, and what its tokens see."""
    visible, rotary = self.sees[0], self.tables[kind][0]
    if len(self.sees) > 1:
      fed_mask, window, first = jax.tree.map(
        lambda *each: jnp.stack(each)[this["window"]], *self.differs
      )
      visible = dataclasses.replace(
        visible, fed_mask=fed_mask, window=window, first=first
      )
    if len(self.tables[kind]) > 1:
      rotary = jax.tree.map(
        lambda *each: jnp.stack(each)[this["rope"]], *self.tables[kind]
      )
    return rotary, visible


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stack:
  """A model of stacked layers, without its parameters.

  Attributes:
    config: shapes and switches.
    frame: graph of all but the layers.
    layers: of each kind, the graph of a layer.
    shapes: of the parameters.
    reads: what scans read of each layer.
    features: what `ModelOutput.features` holds.
    num_counted: mixtures whose experts are counted.
    sharding: where activations and cache lie.
  """

  config: TransformerConfig
  frame: Any
  layers: dict[str, Any]
  shapes: Any
  reads: Reads
  features: Features
  num_counted: int
  sharding: Sharding | None

  def put(self, x: Array, kind: str) -> Array:
    """An array where such ones lie."""
    return constrain(x, kind, sharding=self.sharding)

  def whole(self, cached):
    """Arrays of a cache, of which those that have heads are cut."""
    return jax.tree.map(
      lambda x: self.put(x, "cache_lbksc") if x.ndim == 5 else x, cached
    )

  def apply(
    self, params, tokens, cache, *, positions=None, mask=None, logits_at=None
  ):
    """See `specjax.types.ApplyFn`."""
    check_params(self.shapes, params)
    reads = self.reads
    outer = nnx.merge(self.frame, params["frame"])
    fed = outer.enter(tokens, cache, positions=positions, mask=mask)
    states = recurrent.widened(fed.cache.recurrent, tokens.shape[1])
    given = self.begin(params["layers"], fed, len(tokens))
    x = self.put(fed.x, "act_btd")
    kvs = tuple(zip(fed.cache.keys, fed.cache.values, strict=True))
    seen = jnp.zeros((len(reads.wanted), *x.shape), x.dtype)
    memories = None if states is None else states.layers[0]
    (x, kvs, memories, seen), touched = self.scan(
      given, (x, kvs, memories, seen)
    )
    at_layers = dict(zip(reads.wanted, seen, strict=True))
    at_layers |= {
      i: x for i in self.features if i != FINAL and i not in at_layers
    }
    output = outer.leave(x, logits_at, at_layers, self.features)
    # Whole, whoever reads them: a head that is cut along channels would
    # otherwise have the compiler cut what lies between all layers so.
    read = output.features
    output = dataclasses.replace(
      output,
      logits=self.put(output.logits, "logits_btv"),
      features=None if read is None else self.put(read, "act_btd"),
      experts=None if touched is None else touched.reshape(-1),
    )
    return output, fed.cache.replace(
      keys=tuple(keys for keys, _ in kvs),
      values=tuple(values for _, values in kvs),
      length=fed.start + tokens.shape[1],
      recurrent=after_pass(fed.cache, (memories,), fed.start, tokens.shape[1]),
    )

  def begin(self, layers: Any, fed: Fed, rows: int) -> Pass:
    """Inputs of the layers, with such parameters."""
    sees = [fed.sees[w] for w in self.reads.windows]
    tables = {
      kind: [fed.rotary[rope] for rope in of]
      for kind, of in self.reads.ropes.items()
    }
    far = jnp.int32(2**30)  # without a window nothing is ever too far away
    differs = [
      (
        jnp.broadcast_to(s.fed_mask, (rows, *s.fed_mask.shape[-2:])),
        far if s.window is None else s.window,
        s.first,
      )
      for s in sees
    ]
    return Pass(
      layers=layers, fed=fed, sees=sees, differs=differs, tables=tables
    )

  def scan(self, given: Pass, carry):
    """All layers, by the scans of a pattern, which may be scanned over.

    Args:
      given: inputs of the layers.
      carry: `(x, kvs, memories, seen)`.

    Returns:
      The carry after them, and the counts of experts, if these are counted.
    """
    pattern, times = turns(self.reads.kinds)
    of_turns = {
      key: jnp.asarray(of.reshape(times, len(of) // times, *of.shape[1:]))
      for key, of in self.reads.of_layers.items()
    }

    def iteration(carry, these):
      touched, first = [], 0
      for kind, count in pattern:
        run = {k: v[first : first + count] for k, v in these.items()}
        carry, counted = lax.scan(
          functools.partial(self.step, given, kind=kind), carry, run
        )
        touched += [x.reshape(-1) for x in jax.tree.leaves(counted)]
        first += count
      return carry, jnp.concatenate(touched) if touched else None

    if times == 1:
      return iteration(carry, {k: v[0] for k, v in of_turns.items()})
    return lax.scan(iteration, carry, of_turns)

  def step(self, given: Pass, carry, this: dict[str, Array], *, kind: str):
    """One layer, of which `this` is read."""
    x, kvs, memories, seen = carry
    counts: list[Array] | None = [] if self.num_counted else None
    seen = jnp.where(this["feature"][:, None, None, None], x, seen)
    params = jax.tree_util.tree_map_with_path(
      functools.partial(of_layer, index=this["at"]),
      given.layers[kind] if kind else given.layers,
    )
    module = nnx.merge(self.layers[kind], params)
    if isinstance(module.spec.attention, DeltaSpec):
      x, memories = self.recur(given.fed, module, x, memories, this, counts)
    else:
      x, kvs = self.attend(given, module, x, kvs, this, counts, kind)
    counted = jnp.stack(counts) if counts else None
    return (x, kvs, memories, seen), counted

  def recur(self, fed: Fed, module: Layer, x, memories, this, counts):
    """A recurrent layer."""
    memory = jax.tree.map(
      lambda x: lax.dynamic_index_in_dim(x, this["stored"], keepdims=False),
      memories,
    )
    x, memory = module(
      x, *fed.of(module.spec), memory, fed.start, at=this["at"], counts=counts
    )
    memories = jax.tree.map(
      lambda x, new: lax.dynamic_update_index_in_dim(x, new, this["stored"], 0),
      memories,
      memory,
    )
    return self.put(x, "act_btd"), self.whole(memories)

  def attend(self, given: Pass, module: Layer, x, kvs, this, counts, kind: str):
    """A layer of attention, or what of it is not left out."""
    rotary, visible = given.attends(this, kind)
    buffer, fed = self.reads.buffers[kind], given.fed

    def run(x, kv, **parts):
      x, kv = module(
        x, rotary=rotary, sees=visible, kv=kv, start=fed.start,
        layer=this["stored"], at=this["at"], counts=counts,
        per_layer=fed.per_layer_of(this["layer"]), **parts,
      )  # fmt: skip
      return self.put(x, "act_btd"), self.whole(kv)

    has = self.reads.of_layers
    if has["attention"].all() and has["mlp"].all():
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
    return x, (*kvs[:buffer], kv, *kvs[buffer + 1 :])


def new_cache(
  model: Stack, dtype, stored: str | None, batch: int, slots: int
) -> Cache:
  """An empty cache: keys and values of `buffers`, and states."""
  attentions, deltas = model.config.attentions, model.config.deltas
  each = [
    cache_lib.make_cache(
      batch=batch,
      slots=slots,
      num_layers=len(of),
      num_kv_heads=attentions[of[0]].num_kv_heads,
      head_dim=attentions[of[0]].head_dim,
      value_dim=attentions[of[0]].value_dim,
      dtype=dtype,
      with_positions=model.config.has_windows,
      stacked=True,
      stored=stored,
    )
    for of in buffers(model.config)
  ]
  cache = each[0].replace(
    keys=tuple(c.keys[0] for c in each),
    values=tuple(c.values[0] for c in each),
  )
  memories = tuple(  # one, if there are any
    delta_memory(delta, batch, dtype, stack=len(deltas))
    for delta in dict.fromkeys(deltas.values())
  )
  return model.whole(with_memories(cache, memories))
