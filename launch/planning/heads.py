"""Draft heads in plans: their own arrays, their drafters, their costs.

Embedding and output projection are the target's own arrays where published
heads have none: a program that is planned is given them once.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from launch.planning import borrowing, networks, roofline
from launch.planning.roofline import Pass, Placement
from models import head_shapes
from models.head_shapes import HeadShape
from models.networks import lowbits
from models.networks.dflash import ParallelConfig
from models.networks.eagle import EagleConfig
from models.networks.lowbits import Format
from models.networks.mtp import MtpConfig
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
  """Embedding and output projection of a target.

  Attributes:
    config: the target.
    weights: how its weights are stored; None for bfloat16.
  """

  config: networks.Config
  weights: Format | None


@functools.cache
def _low(shape: HeadShape, tables: Tables | None) -> dict[str, Any]:
  """A head's tables that are in few bits: their parameters' shapes, by name."""
  if tables is None or tables.weights is None:
    return {}
  frame = networks.shapes(tables.config, tables.weights)["frame"]
  of_head = {name: _table(frame, name) for name, _ in _shared(shape)}
  return {name: x for name, x in of_head.items() if "scales" in x}


@functools.cache
def _shapes(shape: HeadShape, dtype, tables: Tables | None = None):
  """The network with shapes for parameters, tables as its target has them."""
  module = nnx.eval_shape(lambda: shape.make(dtype=dtype, rngs=nnx.Rngs(0)))
  for name, params in _low(shape, tables).items():
    lowbits.borrow(module, name, params)
  return module


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


def _table(frame, module: str):
  """Parameters of a table; a tied embedding is the output projection too."""
  return frame[module if module in frame else "embed"]


def with_shared(shape: HeadShape, params: Params) -> Params:
  """Parameters of `own_params` with the target's arrays among the head's."""
  flat = dict(nnx.to_flat_state(params.draft))
  for module, kind in _shared(shape):
    table = _table(params.target["frame"], module)
    flat[module, kind] = table[kind if kind in table else "embedding"]
    if "scales" in table:
      flat[module, "scales"] = table["scales"]
  return dataclasses.replace(params, draft=nnx.from_flat_state(flat))


def saved_bytes(shape: HeadShape, tables: Tables) -> int:
  """Bytes less that a pass reads of an output projection in few bits."""
  stored = jax.tree.leaves(_low(shape, tables).get("lm_head", {}))
  count = max((math.prod(x.shape) for x in stored), default=0)
  return _ITEM * count - sum(map(lowbits.num_bytes, stored))


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
  tables: Tables | None = None,
) -> Drafter:
  """The drafter that would run, on `own_params` and a stacked target's.

  Args:
    shape: what the head is.
    tree, siblings, vocab_size: as of `specjax.drafters`.
    dtype: of parameters, activations and cache.
    sharding: the head's rules on the mesh.
    tables: of the target; None if they are not in few bits.
  """
  functions, _ = head_shapes.functions(
    _shapes(shape, dtype, tables), sharding=sharding
  )
  inner = getattr(drafters, shape.kind)(
    functions, tree=tree, siblings=siblings, vocab_size=vocab_size
  )
  return borrowing.reading(inner, functools.partial(with_shared, shape))


def cached(shape: HeadShape):
  """The configuration of the layers that have a cache; None if none has."""
  if isinstance(shape.config, EagleConfig):
    return shape.config.layer
  if isinstance(shape.config, ParallelConfig):
    return shape.config.layers
  return None


def num_depths(shape: HeadShape, tree: Tree) -> int:
  """Layers that draft a tree, each with a cache of its own."""
  if not isinstance(shape.config, MtpConfig):
    return 1
  return min(shape.config.num_depths, tree.max_depth)


def more_slots(shape: HeadShape, tree: Tree) -> int:
  """Slots of a row's cache beyond the target's: of what is never verified."""
  if isinstance(shape.config, ParallelConfig):
    return shape.config.block_size
  if (depths := num_depths(shape, tree)) > 1:
    widths = [len(level) for level in tree.levels[1:-1]]
    if tree.form is Form.FREE:
      widths = [tree.max_children] * (tree.max_depth - 1)
    return depths + max((k * n for k, n in enumerate(widths, 1)), default=0)
  if isinstance(shape.config, EagleConfig) and tree.form is Form.FREE:
    return tree.max_children * (tree.max_depth - 1)
  return 0


def more_pending(shape: HeadShape, tree: Tree) -> int:
  """Tokens beside a pass's that a target with states keeps for its head.

  Where a text goes on, they are fed again (`specjax.types.Drafter.num_refed`).
  """
  if not isinstance(shape.config, EagleConfig):
    return 0
  return tree.max_depth + num_depths(shape, tree) - 1


# ---------------------------------------------------------------------- time


def passes(
  shape: HeadShape,
  drafter: Drafter,
  *,
  size: int,
  rows: int,
  slots: int,
  text: int | None = None,
  saved: int = 0,
) -> list[Pass]:
  """The passes of a round, on one device.

  Of layers that draft in turn each pass is of two: of committed
  tokens, and of the draft.

  Args:
    shape: what the head is.
    drafter: that of a tree.
    size: devices that it is cut over.
    rows: of the batch that each such group decodes.
    slots, text: see `Placement`.
    saved: see `saved_bytes`.
  """
  count = _counts(shape)
  c = shape.config
  if not isinstance(c, EagleConfig | ParallelConfig):
    return [
      _less(_of_marginals(sum(count.values()), c, size, rows), saved / size)
    ]
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
    return _less(roofline.forward(placement, tokens), saved / size)

  if isinstance(c, ParallelConfig):
    # Committed tokens are read by keys and values alone, in the pass of the
    # block.
    return [over(count["layers"] + count["fc"], n) for n in drafter.passes]
  depths = num_depths(shape, drafter.tree)
  if isinstance(c, MtpConfig) and c.num_depths > 1:
    out = words * layers.embed_dim
    each = (sum(count.values()) - out) / c.num_depths
    read, more = drafter.passes[:depths], drafter.passes[depths:]
    drafted = [over(each + out, n) for n in (read[0], *more)]
    again: list[Pass | None] = [None]  # whose logits are not asked for
    again += [over(each, n) for n in read[1:]]
    pairs = itertools.zip_longest(drafted, again)
    return [x if y is None else x.beside(y) for x, y in pairs]
  # EAGLE-1 projects in every pass, EAGLE-3 the target's features alone.
  later = count["layers"] + (count["fc"] if c.generation == 1 else 0)
  first, *more = drafter.passes
  return [
    over(count["layers"] + count["fc"], first), *(over(later, n) for n in more)
  ]  # fmt: skip


def _less(one: Pass, num_bytes: float) -> Pass:
  """A pass that reads so many bytes less."""
  return dataclasses.replace(one, hbm_bytes=one.hbm_bytes - num_bytes)


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
