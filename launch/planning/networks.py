"""Models in plans: sharded shapes, functions, and bytes that passes read.

Layers are stacked and scanned over, as on every mesh.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from models import sharding as sharding_lib
from models.networks import attention, lowbits, mixture, stacked, t5_stacked
from models.networks.description import TransformerConfig, mlp_weights
from models.networks.lowbits import Format
from models.networks.mixture import Mixture
from models.networks.t5_config import T5Config
from models.networks.transformer import (
  Features,
  SkippedLayers,
  delta_memory,
  mixtures_of,
)
from models.sharding import Sharding
from specjax.theory import experts
from specjax.types import LanguageModel

Config = TransformerConfig | T5Config

DTYPE = jnp.bfloat16


def check_kinds(
  target: Config,
  draft: Config | None,
  skipped: SkippedLayers | None,
  input_length: int,
  low: bool = False,
) -> None:
  """Raises ValueError for models that do not go together."""
  reads = isinstance(target, T5Config)
  if draft is not None and isinstance(draft, T5Config) != reads:
    raise ValueError("target and draft must both be encoder-decoders, or none")
  if reads and low:
    raise ValueError(
      "weights and caches in few bits are of decoder-only models"
    )
  if reads and skipped is not None:
    raise ValueError("an encoder-decoder drafts with no layers left out")
  if reads != bool(input_length):
    raise ValueError(
      "an encoder-decoder needs input_length, the tokens that it reads"
      if reads
      else "input_length is what an encoder reads, and the models have none"
    )


def check_low(
  config: Config | None, weights: Format | None, cache: str | None = None
) -> None:
  """Raises ValueError for a model that is not stored so; see `Question`."""
  if isinstance(config, TransformerConfig):
    lowbits.check_weights(config, weights, on_mesh=True)
    lowbits.check_cache(config, cache)


def cut(config: Config, size: int) -> Config:
  """The config that can be cut in `size` parts; ValueError if there is none."""
  if isinstance(config, T5Config):
    sharding_lib.check_cut(config, size)
    return config
  shared = len(config.cached) < len(config.attentions)
  if config.per_layer_dim or shared or len(stacked.buffers(config)) > 1:
    raise ValueError("of layers that differ in their heads there are no plans")
  return sharding_lib.kv_heads_for(config, size)


def functions(
  config: Config,
  sharding: Sharding,
  skipped: SkippedLayers | None = None,
  features: Features = (),
  weights: Format | None = None,
  cache: str | None = None,
) -> LanguageModel:
  """The model as pure functions."""
  if isinstance(config, T5Config):
    return t5_stacked.as_language_model(config, dtype=DTYPE, sharding=sharding)
  return stacked.as_language_model(
    config, dtype=DTYPE, sharding=sharding, skipped=skipped, features=features,
    weights=weights, stored=cache,
  )  # fmt: skip


@functools.cache
def shapes(config: Config, weights: Format | None = None):
  """Shapes of a model's parameters."""
  if isinstance(config, T5Config):
    return t5_stacked.abstract_params(config, dtype=DTYPE)
  return stacked.abstract_params(config, dtype=DTYPE, weights=weights)


@functools.cache  # asked for every batch size
def num_params(config: Config) -> int:
  """Parameters of a model."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes(config)))


def slot_channels(config: Config, lanes: int = 1) -> int:
  """Channels of a slot in one layer's cache, keys and values, of all heads.

  Args:
    config: the model.
    lanes: what each head's are a multiple of.
  """
  sizes = config.head_dim, getattr(config, "value_dim", config.head_dim)
  return config.num_kv_heads * sum(-(-n // lanes) * lanes for n in sizes)


@functools.cache
def num_bytes(config: Config, weights: Format | None) -> int:
  """Bytes that a model's parameters take."""
  return sum(map(lowbits.num_bytes, jax.tree.leaves(shapes(config, weights))))


@functools.cache
def bytes_per_weight(config: Config, weights: Format | None) -> float:
  """Mean bytes of a parameter that passes read, its share of scales included.

  An embedding that is only looked up is left out, as in `work`.
  """
  if weights is None:
    return DTYPE.dtype.itemsize
  table = looked_up(config)
  rest = num_bytes(config, weights)
  if table:
    rest -= sum(
      map(
        lowbits.num_bytes,
        jax.tree.leaves(shapes(config, weights)["frame"]["embed"]),
      )
    )
  return rest / (num_params(config) - table)


def bytes_per_channel(config: Config, cache: str | None) -> float:
  """Bytes of a number in a cache, its share of a slot's scale included."""
  if cache is None:
    return DTYPE.dtype.itemsize
  return 1 + 4 / config.head_dim


def looked_up(config: TransformerConfig) -> int:
  """Parameters of an embedding that is neither read whole nor multiplied."""
  return 0 if config.tied_embeddings else config.vocab_size * config.embed_dim


def place(shapes, sharding: Sharding, mesh: Mesh):
  """Shapes of parameters where they lie."""
  return jax.tree.map(
    lambda x, spec: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    ),
    shapes,
    sharding_lib.param_specs(shapes, sharding),
  )


def _mlp_params(c: TransformerConfig, index: int) -> int:
  """Weights of a layer's feed-forward block, of all its experts."""
  layer = c.layer(index)
  met = mlp_weights(layer, c.embed_dim)
  for block in (layer.feed_forward, layer.beside):
    if isinstance(block, Mixture):
      met += (block.num_experts - block.num_chosen) * block.num_expert_params
  return met


# `tokens of a pass -> different experts of a layer that it touches`.
Distinct = Callable[[float], float | np.ndarray]


def idle(
  config: Config,
  skipped: SkippedLayers,
  tokens: int,
  *,
  size: int = 1,
  distinct: Distinct | None = None,
) -> float:
  """Weights of experts that no token of a pass is given, all else as `work`.

  Expected of a uniform choice (`specjax.theory.experts`); 0 without mixtures.
  Where experts are cut by expert, the device that reads most is waited for: as
  many weights are idle as if each read as much.

  Args:
    config: the model.
    skipped: sub-layers that the pass leaves out.
    tokens: that it is over, of all rows.
    size: devices that the model is cut over.
    distinct: experts of a layer that a pass touches, as measured.
  """
  if isinstance(config, T5Config):
    return 0.0
  idle_weights = 0.0
  blocks = collections.Counter(mixtures_of(config, skipped))
  for block, layers in blocks.items():
    count = block.num_experts
    if distinct is None:
      touched = experts.expected_distinct(tokens, count, block.num_chosen)
    else:
      touched = np.asarray(distinct(tokens))
    if size > 1 and mixture.cut_by(block, size) == "expert":
      touched = size * experts.busiest(touched, count, size)
    idle_weights += layers * (count - float(touched)) * block.num_expert_params
  return idle_weights


def state_bytes(config: Config) -> tuple[int, int]:
  """Bytes of a row's recurrent states, and of a pending token's entries.

  A pass is counted as reading and writing all states once, and the entries of
  the tokens that it is over and of those that the pass before it was
  (`specjax.recurrent`).
  """
  if isinstance(config, T5Config):
    return 0, 0
  memories = [
    jax.eval_shape(functools.partial(delta_memory, delta, 1, DTYPE))
    for delta in config.deltas.values()
  ]
  size = lambda *xs: sum(math.prod(x.shape) * x.dtype.itemsize for x in xs)
  return (
    sum(size(m.state, m.window) for m in memories),
    sum(size(*m.pending) for m in memories),
  )


def round_bytes(config: Config, nodes: int) -> tuple[int, int]:
  """Bytes of recurrent states that a round reads and writes for a row.

  Args:
    config: the model.
    nodes: of the tree, root included.

  Returns:
    Here; and with a state for every node, of which each is written once, and
    that before the tree is read.
  """
  states, pending = state_bytes(config)
  return 2 * (states + nodes * pending), (nodes + 1) * states


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """Blocks, sums, weights and slots of a decoding pass.

  Attributes:
    attentions: attention blocks.
    mlps: feed-forward blocks.
    sums: sums of partial results over the devices, that of the table apart.
    weights: parameters that are read and multiplied (and skipped biases).
    slots: cache slots of a row that attentions read, added up over layers.
  """

  attentions: int
  mlps: int
  sums: int
  weights: int
  slots: int


def work(
  config: Config,
  *,
  num_params: int,
  skipped: SkippedLayers,
  slots: int,
  text: int,
  input_length: int,
) -> Work:
  """The work of a pass over a few tokens.

  Args:
    config: the model.
    num_params: of it.
    skipped: sub-layers that the pass leaves out.
    slots: cache slots of a row.
    text: tokens of the longest row's text, as far as which they are read.
    input_length: tokens that an encoder read.
  """
  c, layers = config, config.num_layers
  if isinstance(c, T5Config):
    mlp = (3 if c.gated_mlp else 2) * c.embed_dim * c.mlp_dim
    # The encoder, and keys and values of what it read, were computed before.
    width = c.embed_dim * c.num_heads * c.head_dim
    return Work(
      attentions=2 * layers,
      mlps=layers,
      sums=3 * layers,
      weights=layers * (6 * width + mlp) + c.vocab_size * c.embed_dim,
      slots=layers * (attention.slots_read(text, slots) + input_length),
    )
  attentions = layers - len(skipped.attention)
  mlps = layers - len(skipped.mlp)
  heads = 2 * c.embed_dim * c.head_dim * (c.num_heads + c.num_kv_heads)
  sums = attentions + mlps
  if c.layer(0).parallel:  # both blocks of a layer are added before it is sent
    sums = layers - len({*skipped.attention} & {*skipped.mlp})
  return Work(
    attentions=attentions,
    mlps=mlps,
    sums=sums,
    weights=num_params
    - looked_up(c)
    - len(skipped.attention) * heads
    - sum(_mlp_params(c, layer) for layer in skipped.mlp),
    slots=sum(
      attention.slots_read(text, slots, c.window(layer))
      for layer in c.attentions
      if layer not in skipped.attention
    ),
  )
