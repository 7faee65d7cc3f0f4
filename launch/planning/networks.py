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
from models.networks.description import (
  AttentionSpec,
  TransformerConfig,
  attention_weights,
  mlp_weights,
  mlp_width,
)
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


def cached(config: Config) -> list[AttentionSpec | T5Config]:
  """For every layer with a cache, what has the heads and channels of it."""
  if isinstance(config, T5Config):
    return [config] * config.num_layers
  return [config.attentions[layer] for layer in config.cached]


def slot_channels(of: AttentionSpec | Config, lanes: int = 1) -> int:
  """Channels of a slot in one layer's cache, keys and values, of all heads.

  Args:
    of: the layer's attention, or a model whose layers are alike.
    lanes: what each head's are a multiple of.
  """
  sizes = of.head_dim, getattr(of, "value_dim", of.head_dim)
  return of.num_kv_heads * sum(-(-n // lanes) * lanes for n in sizes)


@functools.cache
def num_bytes(config: Config, weights: Format | None) -> int:
  """Bytes that a model's parameters take."""
  return sum(map(lowbits.num_bytes, jax.tree.leaves(shapes(config, weights))))


@functools.cache
def bytes_per_weight(config: Config, weights: Format | None) -> float:
  """Mean bytes of a parameter that passes read, its share of scales included.

  Embeddings that are only looked up are left out, as in `work`.
  """
  if weights is None:
    return DTYPE.dtype.itemsize
  frame = shapes(config, weights)["frame"]
  tables = ["embed"] * (not config.tied_embeddings)
  tables += ["per_layer_embed"] * (config.per_layer_dim > 0)
  apart = sum(
    lowbits.num_bytes(x)
    for name in tables
    for x in jax.tree.leaves(frame[name])
  )
  rest = num_bytes(config, weights) - apart
  return rest / (num_params(config) - looked_up(config))


@functools.cache
def bytes_per_expert_weight(config: Config, weights: Format | None) -> float:
  """Likewise, of experts that tokens choose from; 0 without any."""
  of_experts = lambda params: [
    leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"])
    if "experts" in sharding_lib.names(path)
  ]
  if not mixtures_of(config):
    return 0.0
  taken = sum(map(lowbits.num_bytes, of_experts(shapes(config, weights))))
  return taken / sum(math.prod(x.shape) for x in of_experts(shapes(config)))


def bytes_per_channel(config: Config, cache: str | None) -> float:
  """Bytes of a number in a cache, its share of a slot's scale included."""
  if cache is None:
    return DTYPE.dtype.itemsize
  layers = cached(config)
  scales = sum(2 * layer.num_kv_heads for layer in layers)
  return 1 + 4 * scales / sum(map(slot_channels, layers))


def looked_up(config: TransformerConfig) -> int:
  """Parameters of embeddings that are neither read whole nor multiplied."""
  c = config
  by_layer = c.per_layer_vocab * c.num_layers * c.per_layer_dim
  return by_layer + (0 if c.tied_embeddings else c.vocab_size * c.embed_dim)


def replicated(config: Config) -> int:
  """Weights of embeddings by layer that every device has whole, and reads."""
  if isinstance(config, T5Config):
    return 0
  return 3 * config.embed_dim * config.num_layers * config.per_layer_dim


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


def expert_copies(
  config: Config, skipped: SkippedLayers, weights: Format | None, idle: float
) -> float:
  """Bytes of experts that a pass moves beside those that it touches.

  With scales of groups all experts of a layer are dequantised to a copy, and
  that is read (`models.networks.expert_forms`); 0 in any other form.

  Args:
    config: the model.
    skipped: sub-layers that the pass leaves out.
    weights: how they are stored.
    idle: weights of experts that no token is given.
  """
  if weights is None or weights.group is None or isinstance(config, T5Config):
    return 0.0
  every = sum(
    block.num_experts * block.num_expert_params
    for block in mixtures_of(config, skipped)
  )
  written_and_read = DTYPE.dtype.itemsize * (2 * every - idle)
  return written_and_read + bytes_per_expert_weight(config, weights) * idle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """Blocks, sums, weights and cache of a decoding pass.

  Attributes:
    attentions: attention blocks.
    mlps: feed-forward blocks.
    sums: sums of partial results over the devices, that of the table apart.
    weights: parameters that are read and multiplied (and skipped biases).
    inside: numbers that a token makes inside the blocks: two of every channel
      of a head, and of every hidden one.
    channels: numbers of a row's cache that attentions read.
    products: channels of queries times the slots that they meet.
  """

  attentions: int
  mlps: int
  sums: int
  weights: int
  inside: int
  channels: int
  products: int


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
    width = c.num_heads * c.head_dim
    read = layers * (attention.slots_read(text, slots) + input_length)
    return Work(
      attentions=2 * layers,
      mlps=layers,
      sums=3 * layers,
      weights=layers * (6 * c.embed_dim * width + mlp)
      + c.vocab_size * c.embed_dim,
      inside=2 * layers * (2 * width + c.mlp_dim),
      channels=read * slot_channels(c),
      products=read * width,
    )
  attentions = layers - len(skipped.attention)
  mlps = layers - len(skipped.mlp)
  sums = attentions + mlps
  if c.layer(0).parallel:  # both blocks of a layer are added before it is sent
    sums = layers - len({*skipped.attention} & {*skipped.mlp})
  specs, inside, beside = c.attentions, 0, 0
  for i in range(layers):
    layer, heads_of = c.layer(i), specs.get(i, c)  # recurrent ones: as others
    if i not in skipped.attention:
      inside += 2 * heads_of.num_heads * heads_of.head_dim
    if i not in skipped.mlp:
      inside += 2 * mlp_width(layer)
      if layer.beside is not None:
        inside += 2 * layer.beside.expert_dim
        beside += 1
  read = {
    i: attention.slots_read(text, slots, specs[i].window)
    for i in specs
    if i not in skipped.attention
  }
  return Work(
    attentions=attentions,
    mlps=mlps + beside,
    sums=sums + beside,
    weights=num_params
    - looked_up(c)
    - sum(attention_weights(c.layer(i), c.embed_dim) for i in skipped.attention)
    - sum(_mlp_params(c, layer) for layer in skipped.mlp),
    inside=inside,
    channels=sum(n * slot_channels(specs[i]) for i, n in read.items()),
    products=sum(
      n * specs[i].num_heads * specs[i].head_dim for i, n in read.items()
    ),
  )
