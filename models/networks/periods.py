"""Models whose layers differ by a pattern, scanned over its repetitions.

Qwen3.5's layers are three of the gated delta rule and one of attention, again
and again; of Gemma 4's the last of six has other key/value heads. A program of
one period is compiled, and the layers that stand at one place of all periods
are stacked: parameters, keys and values, and recurrent states have a leading
axis P, the periods. Where layers attend to what others have cached there is one
period, of all layers. `models.networks.stacked` takes such models here; the
numbers are those of `models.networks.transformer`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from models.networks.description import AttentionSpec, TransformerConfig
from models.networks.layers import Layer
from models.networks.params import check_params, of_layer
from models.networks.transformer import (
  FINAL,
  Features,
  SkippedLayers,
  Transformer,
  after_pass,
  delta_memory,
  mixtures_of,
  with_memories,
)
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax.cache import Cache
from specjax.types import LanguageModel


def needed(config: TransformerConfig) -> bool:
  """Whether layers differ in what they cache or are given beside x."""
  cached = {
    (a.num_kv_heads, a.head_dim, a.value_dim, a.source)
    for a in config.attentions.values()
  }
  return bool(config.deltas or config.per_layer_dim) or len(cached) > 1


def period(config: TransformerConfig) -> int:
  """Layers after which a model's descriptions repeat, to its end."""
  kinds = [config.layer(i) for i in range(config.num_layers)]
  count = len(kinds)
  if len(config.cached) < len(config.attentions):
    return count
  return next(
    size
    for size in range(1, count + 1)
    if count % size == 0 and kinds == kinds[:size] * (count // size)
  )


def kinds(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
  """The layers at each place of all periods, by its name."""
  every, size = range(config.num_layers), period(config)
  return {f"place{i}": tuple(every[i::size]) for i in range(size)}


def as_language_model(
  config: TransformerConfig,
  frame: Transformer,
  layers: Mapping[str, Layer],
  shapes: Any,
  *,
  dtype,
  skipped: SkippedLayers,
  sharding: Sharding | None,
  features: Features,
  count_experts: bool = False,
) -> LanguageModel:
  """As `models.networks.stacked.as_language_model`.

  Args:
    config, dtype, skipped, sharding, features, count_experts: as there.
    frame: the model without layers, of shapes alone.
    layers: one at each place of a period, by the names of `kinds`, likewise.
    shapes: of the parameters.

  Raises:
    ValueError: also for sub-layers left out.
  """
  if skipped != SkippedLayers():
    what = "recurrent layers" if config.deltas else "layers of several heads"
    raise ValueError(f"of a model with {what} none can be left out")
  frame_def = nnx.graphdef(frame)
  layer_defs = {name: nnx.graphdef(layer) for name, layer in layers.items()}
  specs, size = [layer.spec for layer in layers.values()], len(layers)
  count = config.num_layers // size
  num_counted = len(mixtures_of(config)) if count_experts else 0
  attentions = {
    i: spec.attention
    for i, spec in enumerate(specs)
    if isinstance(spec.attention, AttentionSpec)
  }
  own = [i for i, a in attentions.items() if a.source is None]
  # Of each place that attends, which buffer it attends to.
  buffer = {
    i: own.index(i if a.source is None else a.source)
    for i, a in attentions.items()
  }
  wanted = [i for i in features if i != FINAL and i < config.num_layers]
  put = functools.partial(constrain, sharding=sharding)

  def init_cache(batch: int, slots: int) -> Cache:
    buffers = [
      cache_lib.make_cache(
        batch=batch,
        slots=slots,
        num_layers=count,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        dtype=dtype,
        with_positions=config.has_windows,
        stacked=True,
      )
      for a in (attentions[i] for i in own)
    ]
    cache = buffers[0].replace(
      keys=tuple(b.keys[0] for b in buffers),
      values=tuple(b.values[0] for b in buffers),
    )
    memories = tuple(
      delta_memory(spec.attention, batch, dtype, stack=count)
      for spec in specs
      if not isinstance(spec.attention, AttentionSpec)
    )
    return _laid_out(with_memories(cache, memories), put)

  def apply(
    params, tokens, cache, *, positions=None, mask=None, logits_at=None
  ):
    check_params(shapes, params)
    outer = nnx.merge(frame_def, params["frame"])
    outer.config = config
    fed = outer.enter(tokens, cache, positions=positions, mask=mask)

    def body(carry, this):
      (x, kvs, seen), (repetition, memories) = carry, this
      kvs, memories, left = [*kvs], iter(memories), []
      counts: list[Array] | None = [] if num_counted else None
      for i, (name, graphdef) in enumerate(layer_defs.items()):
        number = repetition * size + i
        here = number == np.array(wanted, np.int32)
        seen = jnp.where(here[:, None, None, None], x, seen)
        own = jax.tree_util.tree_map_with_path(
          functools.partial(of_layer, index=repetition),
          params["layers"][name],
        )
        module = nnx.merge(graphdef, own)
        at = buffer.get(i)
        kv = next(memories) if at is None else kvs[at]
        x, kv = module(
          x, *fed.of(specs[i]), kv, fed.start, layer=repetition, counts=counts,
          per_layer=fed.per_layer_of(number),
        )  # fmt: skip
        x = put(x, "act_btd")
        if at is None:
          left.append(kv)
        else:
          kvs[at] = jax.tree.map(lambda b: _whole(b, put), kv)
      touched = jnp.stack(counts) if counts else None
      return (x, tuple(kvs), seen), (tuple(left), touched)

    x = put(fed.x, "act_btd")
    kvs = tuple(zip(fed.cache.keys, fed.cache.values, strict=True))
    seen = jnp.zeros((len(wanted), *x.shape), x.dtype)
    states = fed.cache.recurrent
    given = (jnp.arange(count), () if states is None else states.layers)
    (x, kvs, seen), (left, touched) = lax.scan(body, (x, kvs, seen), given)
    chosen = dict(zip(wanted, seen, strict=True)) | {config.num_layers: x}
    output = outer.leave(x, logits_at, chosen, features)
    whole = output.features
    output = dataclasses.replace(
      output,
      logits=put(output.logits, "logits_btv"),
      features=None if whole is None else put(whole, "act_btd"),
      experts=None if touched is None else touched.reshape(-1),
    )
    cache = fed.cache.replace(
      keys=tuple(k for k, _ in kvs),
      values=tuple(v for _, v in kvs),
      length=fed.start + tokens.shape[1],
      recurrent=after_pass(fed.cache, left, fed.start, tokens.shape[1]),
    )
    return output, _laid_out(cache, put)

  return LanguageModel(
    vocab_size=config.vocab_size,
    max_positions=config.max_positions,
    init_cache=init_cache,
    apply=apply,
    takes_rows=True,
    has_states=bool(config.deltas),
    num_counted=num_counted,
  )


def _whole(buffer, put):
  """Keys or values of all periods, where they lie; a row of them as it is."""
  return put(buffer, "cache_lbksc") if buffer.ndim == 5 else buffer


def _laid_out(cache: Cache, put) -> Cache:
  """A cache whose arrays are cut by their heads."""
  return jax.tree.map(lambda x: _whole(x, put), cache)
