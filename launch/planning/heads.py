"""Draft heads in plans: their own arrays, their drafters, their costs.

Embedding and output projection are the target's own arrays where published
heads have none: a program that is planned is given them once.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from launch.planning import roofline
from launch.planning.roofline import Pass, Placement
from models import head_shapes
from models.head_shapes import HeadShape
from models.networks.dflash import ParallelConfig
from models.networks.eagle import EagleConfig
from models.sharding import Sharding
from specjax import drafters
from specjax.siblings import Siblings
from specjax.tree import Form, Tree
from specjax.types import Drafter, Params

_ITEM = 2  # bytes of a bfloat16
_EMBEDDING, _OUTPUT = ("embed", "embedding"), ("lm_head", "weight")
_OF_TARGET = {
  "eagle": (_EMBEDDING, _OUTPUT),
  "eagle3": (_EMBEDDING,),
  "dflash": (_EMBEDDING, _OUTPUT),
  "blockwise": (_OUTPUT,),
  "medusa": (),
  "mtp": (_EMBEDDING, _OUTPUT),
}


@functools.cache
def _shapes(shape: HeadShape, dtype):
  """The network with shapes for parameters."""
  return nnx.eval_shape(lambda: shape.make(dtype=dtype, rngs=nnx.Rngs(0)))


def own_params(shape: HeadShape, dtype):
  """Shapes of the parameters that are not the target's.

  Args:
    shape: what the head is.
    dtype: of the parameters.
  """
  flat = nnx.to_flat_state(nnx.state(_shapes(shape, dtype)))
  shared = _shared(shape)
  return nnx.from_flat_state([(k, v) for k, v in flat if k not in shared])


def _shared(shape: HeadShape) -> set[tuple[str, str]]:
  shared = {*_OF_TARGET[shape.kind]}
  if shape.draft_vocab_size is not None:
    shared -= {_OUTPUT}  # rows of its own
  return shared


def with_shared(shape: HeadShape, params: Params) -> Params:
  """Parameters of `own_params` with the target's arrays among the head's."""
  flat, frame = dict(nnx.to_flat_state(params.draft)), params.target["frame"]
  for module, kind in _shared(shape):
    tied = module not in frame  # the embedding is the output projection too
    flat[module, kind] = (
      frame["embed"]["embedding"] if tied else frame[module][kind]
    )
  return dataclasses.replace(params, draft=nnx.from_flat_state(flat))


def num_params(shape: HeadShape, dtype) -> int:
  """Parameters that are not the target's."""
  params = own_params(shape, dtype)
  return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def make_drafter(
  shape: HeadShape,
  *,
  tree: Tree,
  siblings: Siblings,
  vocab_size: int,
  dtype,
  sharding: Sharding,
) -> Drafter:
  """The drafter that would run, on `own_params` and a stacked target's.

  Args:
    shape: what the head is.
    tree, siblings, vocab_size: as of `specjax.drafters`.
    dtype: of parameters, activations and cache.
    sharding: the head's rules on the mesh.
  """
  functions, _ = head_shapes.functions(_shapes(shape, dtype), sharding=sharding)
  inner = getattr(drafters, shape.kind)(
    functions, tree=tree, siblings=siblings, vocab_size=vocab_size
  )
  whole = functools.partial(with_shared, shape)
  return dataclasses.replace(
    inner,
    init=lambda params, *more: inner.init(whole(params), *more),
    prefill=lambda params, *more: inner.prefill(whole(params), *more),
    propose=lambda params, *more: inner.propose(whole(params), *more),
    commit=lambda params, *more: inner.commit(whole(params), *more),
  )


def cached(shape: HeadShape):
  """The configuration of the layers that have a cache; None if none has."""
  if isinstance(shape.config, EagleConfig):
    return shape.config.layer
  if isinstance(shape.config, ParallelConfig):
    return shape.config.layers
  return None


def more_slots(shape: HeadShape, tree: Tree) -> int:
  """Slots of a row's cache beyond the target's: of what is never verified."""
  if isinstance(shape.config, ParallelConfig):
    return shape.config.block_size
  if isinstance(shape.config, EagleConfig) and tree.form is Form.FREE:
    return tree.max_children * (tree.max_depth - 1)
  return 0


# ---------------------------------------------------------------------- time


def passes(
  shape: HeadShape,
  drafter: Drafter,
  *,
  size: int,
  rows: int,
  slots: int,
  text: int | None = None,
) -> list[Pass]:
  """The passes of a round, on one device.

  Args:
    shape: what the head is.
    drafter: that of a tree.
    size: devices that it is cut over.
    rows: of the batch that each such group decodes.
    slots, text: see `Placement`.
  """
  count = _counts(shape)
  c = shape.config
  if not isinstance(c, EagleConfig | ParallelConfig):
    return [_of_marginals(sum(count.values()), c, size, rows)]
  layers = c.layer if isinstance(c, EagleConfig) else c.layers
  words = getattr(c, "draft_vocab_size", None) or layers.vocab_size
  layers = dataclasses.replace(
    layers, vocab_size=words, tied_embeddings=False, windows=None
  )

  def over(weights: float, tokens: int) -> Pass:
    placement = Placement(
      config=layers,
      # Of which it takes off an embedding that is looked up.
      num_params=int(weights) + words * layers.embed_dim,
      size=size,
      rows=rows,
      slots=slots,
      text=text,
    )
    return roofline.forward(placement, tokens)

  if isinstance(c, ParallelConfig):
    # Committed tokens are read by keys and values alone, in the pass of the
    # block.
    return [over(count["layers"] + count["fc"], n) for n in drafter.passes]
  # EAGLE-1 projects in every pass, EAGLE-3 the target's features alone.
  later = count["layers"] + (count["fc"] if c.generation == 1 else 0)
  first, *more = drafter.passes
  return [
    over(count["layers"] + count["fc"], first), *(over(later, n) for n in more)
  ]  # fmt: skip


def _counts(shape: HeadShape) -> dict[str, int]:
  """Parameters that are multiplied: of the projection of features, and all."""
  counts = {"fc": 0, "layers": 0}
  flat: Any = nnx.to_flat_state(nnx.state(_shapes(shape, jnp.bfloat16)))
  for key, value in flat:
    if key[0] != "embed":
      counts["fc" if key[0] == "fc" else "layers"] += math.prod(value.shape)
  return counts


def _of_marginals(weights: int, config, size: int, rows: int) -> Pass:
  """Heads without attention: weights once, and logits of every depth."""
  logits = 4 * rows * config.num_heads * config.vocab_size  # float32, whole
  return Pass(
    hbm_bytes=_ITEM * weights / size + 2 * logits,
    flops=2 * rows * weights / size,
    ici_bytes=(size - 1) / size * logits,
  )
