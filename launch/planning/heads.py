"""Draft heads in plans: their own arrays, drafters and passes.

Embedding and output projection are the target's unless published heads have
their own. A planned program is given shared arrays only once, so that the
compiler does not count them twice.
"""

import dataclasses
import functools
from typing import Any

from flax import nnx

from launch.planning import networks
from launch.planning.networks import Pass
from models import head_shapes
from models.head_shapes import HeadShape
from models.networks.params import shapes_of
from models.networks.quantized_tensor import is_quantized
from models.sharding import REPLICATED, Sharding
from specjax import drafters
from specjax.types import Drafter, Params

# Tables in which a pass looks up rows.
_TABLES = {
  "embed", "markov_w1", "predecessor_codebook", "successor_codebook",
}  # fmt: skip
_BY_LEVEL = {"markov_head", "confidence_head"}
_NO_LAYERS = dict(blocks=0, summed=0, inside=0, cache_bytes=0, products=0)


@functools.cache
def _module(shape: HeadShape):
  """The network with shapes instead of parameters."""
  return shapes_of(
    lambda rngs: head_shapes.make(shape.config, dtype=networks.DTYPE, rngs=rngs)
  )


def own_params(shape: HeadShape):
  """Shapes of the parameters that are not the target's."""
  flat = nnx.to_flat_state(nnx.state(_module(shape)))
  shared = shape.config.shared
  return nnx.from_flat_state([(k, v) for k, v in flat if k[0] not in shared])


def with_shared(shape: HeadShape, params: Params) -> Params:
  """Adds the target's shared arrays to the head's parameters (`own_params`).

  For a quantized table, only the values, which are what a pass reads.
  """
  flat = dict(nnx.to_flat_state(params.draft))
  frame = params.target["frame"]
  for module in shape.config.shared:
    # A tied embedding is also the output projection.
    table = frame[module if module in frame else "embed"]
    kind = "embedding" if module == "embed" else "weight"
    shared = table[kind if kind in table else "embedding"]
    if is_quantized(weight := shared.get_value()):
      shared = shared.replace(weight.values)
    flat[module, kind] = shared
  return dataclasses.replace(params, draft=nnx.from_flat_state(flat))


def make_drafter(shape: HeadShape, *, sharding: Sharding, **form) -> Drafter:
  """The drafter of a head with `own_params`, for a stacked target.

  `sharding` is the head's, `form` as in `specjax.drafters`.
  """
  functions, _ = head_shapes.functions(_module(shape), sharding=sharding)
  inner = getattr(drafters, shape.config.kind)(functions, **form)
  whole = functools.partial(with_shared, shape)
  return dataclasses.replace(
    inner,
    init=lambda params, *more: inner.init(whole(params), *more),
    prefill=lambda params, *more: inner.prefill(whole(params), *more),
    propose=lambda params, *more: inner.propose(whole(params), *more),
    commit=lambda params, *more: inner.commit(whole(params), *more),
  )


def passes(
  shape: HeadShape, drafter: Drafter, *, size: int, rows: int, slots: int
) -> list[Pass]:
  """The passes of a round, on one device."""
  flat = dict(nnx.to_flat_state(nnx.state(_module(shape))))
  flat = {key: x for key, x in flat.items() if not _TABLES & {*key}}
  read = list(flat.values())
  c: Any = shape.config
  layers = getattr(c, "layers", None)
  if layers is None:
    # Without attention: weights once, and logits of every depth.
    logits = 4 * rows * c.num_heads * c.vocab_size  # float32, whole
    return [
      Pass(
        hbm_bytes=networks.num_bytes(read) / size + 2 * logits,
        flops=2 * rows * networks.count(read) / size,
        ici_bytes=(size - 1) / size * logits,
      )
    ]
  words = c.draft_vocab_size or layers.vocab_size
  layers = dataclasses.replace(layers, vocab_size=words).with_attention(
    lambda a: dataclasses.replace(a, window=None)
  )
  work = networks.work(layers, slots=slots)

  def over(params: dict, tokens: int, **less) -> Pass:
    weights = list(params.values())
    own = dataclasses.replace(
      work,
      weights=networks.count(weights),
      weight_bytes=networks.num_bytes(weights),
      **less,
    )
    one = networks.forward(own, tokens, size=size, rows=rows)
    # Replicated weights, of which `forward` counts 1 / size.
    whole = [x for key, x in params.items() if {*REPLICATED} & {*key}]
    more = networks.num_bytes(whole) * (1 - 1 / size)
    return dataclasses.replace(one, hbm_bytes=one.hbm_bytes + more)

  first, *more = drafter.passes
  # Levels of a block after the first are products with these, not passes.
  by_level = {key: x for key, x in flat.items() if key[0] in _BY_LEVEL}
  if by_level or c.kind == "dflash2":
    every = [over(flat, first)]
    for level in drafter.tree.levels[1:-1]:
      every.append(over(by_level, len(level), **_NO_LAYERS))
    return [networks.total(every)]
  # EAGLE-1 projects in every pass, EAGLE-3 only the target's features.
  fuses_once = c.kind == "eagle3"
  again = {k: x for k, x in flat.items() if k[0] != "fc" or not fuses_once}
  return [over(flat, first), *(over(again, n) for n in more)]
