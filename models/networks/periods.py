"""Scan over repeating patterns of layers, as of recurrent ones and attention.

Qwen3.5's layers are three of the gated delta rule and one of attention, again
and again. A program of one period is compiled, and the layers that stand at one
place of all periods are stacked: parameters, keys and values, and recurrent
states have a leading axis P, the periods. `models.networks.stacked` takes such
models here; the numbers are those of `models.networks.transformer`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

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
  with_memories,
)
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax.cache import Cache
from specjax.types import LanguageModel


def period(config: TransformerConfig) -> int:
  """Layers after which a model's descriptions repeat, to its end."""
  kinds = [config.layer(i) for i in range(config.num_layers)]
  count = len(kinds)
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
) -> LanguageModel:
  """As `models.networks.stacked.as_language_model`.

  Args:
    config, dtype, skipped, sharding, features: as there.
    frame: the model without layers, of shapes alone.
    layers: one at each place of a period, by the names of `kinds`, likewise.
    shapes: of the parameters.

  Raises:
    ValueError: also for sub-layers left out.
  """
  if skipped != SkippedLayers():
    raise ValueError("of a model with recurrent layers none can be left out")
  frame_def = nnx.graphdef(frame)
  layer_defs = {name: nnx.graphdef(layer) for name, layer in layers.items()}
  specs, size = [layer.spec for layer in layers.values()], len(layers)
  count = config.num_layers // size
  attending = [isinstance(spec.attention, AttentionSpec) for spec in specs]
  wanted = [i for i in features if i != FINAL and i < config.num_layers]
  put = functools.partial(constrain, sharding=sharding)

  def init_cache(batch: int, slots: int) -> Cache:
    kinds = [spec.attention for spec in specs]
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
      for a in kinds
      if isinstance(a, AttentionSpec)
    ]
    cache = buffers[0].replace(
      keys=tuple(b.keys[0] for b in buffers),
      values=tuple(b.values[0] for b in buffers),
    )
    memories = tuple(
      delta_memory(a, batch, dtype, stack=count)
      for a in kinds
      if not isinstance(a, AttentionSpec)
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
      buffers = iter(range(len(kvs)))
      for i, (name, graphdef) in enumerate(layer_defs.items()):
        here = (repetition * size + i) == np.array(wanted, np.int32)
        seen = jnp.where(here[:, None, None, None], x, seen)
        own = jax.tree_util.tree_map_with_path(
          functools.partial(of_layer, index=repetition),
          params["layers"][name],
        )
        module = nnx.merge(graphdef, own)
        at = next(buffers) if attending[i] else None
        kv = next(memories) if at is None else kvs[at]
        x, kv = module(
          x, *fed.of(specs[i]), kv, fed.start, layer=repetition
        )  # fmt: skip
        x = put(x, "act_btd")
        if at is None:
          left.append(kv)
        else:
          kvs[at] = jax.tree.map(lambda b: _whole(b, put), kv)
      return (x, tuple(kvs), seen), tuple(left)

    x = put(fed.x, "act_btd")
    kvs = tuple(zip(fed.cache.keys, fed.cache.values, strict=True))
    seen = jnp.zeros((len(wanted), *x.shape), x.dtype)
    states = fed.cache.recurrent
    given = (jnp.arange(count), () if states is None else states.layers)
    (x, kvs, seen), left = lax.scan(body, (x, kvs, seen), given)
    chosen = dict(zip(wanted, seen, strict=True)) | {config.num_layers: x}
    output = outer.leave(x, logits_at, chosen, features)
    whole = output.features
    output = dataclasses.replace(
      output,
      logits=put(output.logits, "logits_btv"),
      features=None if whole is None else put(whole, "act_btd"),
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
  )


def _whole(buffer, put):
  """Keys or values of all periods, where they lie; a row of them as it is."""
  return put(buffer, "cache_lbksc") if buffer.ndim == 5 else buffer


def _laid_out(cache: Cache, put) -> Cache:
  """A cache whose arrays are cut by their heads."""
  return jax.tree.map(lambda x: _whole(x, put), cache)
