"""Models in plans: sharded shapes, functions, and the work of a pass.

Layers are stacked and scanned over, as on every mesh.
"""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from models import sharding as sharding_lib
from models.networks import attention, lowbits, mixture, stacked, t5_stacked
from models.networks.description import (
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
_NOTHING = SkippedLayers()


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


def place(shapes, sharding: Sharding, mesh: Mesh):
  """Shapes of parameters where they lie."""
  return jax.tree.map(
    lambda x, spec: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    ),
    shapes,
    sharding_lib.param_specs(shapes, sharding),
  )


def count(params) -> int:
  """Numbers in parameters, or in their shapes."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def num_bytes(params) -> int:
  """Bytes that parameters take."""
  return sum(map(lowbits.num_bytes, jax.tree.leaves(params)))


@functools.cache
def num_params(config: Config) -> int:
  """Parameters of a model."""
  return count(shapes(config))


@functools.cache
def _read(config: TransformerConfig, weights: Format | None) -> tuple[int, int]:
  """Numbers that passes read of all parameters, and their bytes.

  Embeddings are left out of which a pass looks up some rows.
  """
  params = shapes(config, weights)
  tables = ["embed"] * (not config.tied_embeddings)
  tables += ["per_layer_embed"] * (config.per_layer_dim > 0)
  apart = [params["frame"][name] for name in tables]
  return count(params) - count(apart), num_bytes(params) - num_bytes(apart)


@functools.cache
def _expert_bytes(config: Config, weights: Format | None) -> float:
  """Mean bytes of a weight of experts that tokens choose from."""
  of_experts = lambda params: [
    leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"])
    if "experts" in sharding_lib.names(path)
  ]
  stored, whole = (of_experts(shapes(config, w)) for w in (weights, None))
  return num_bytes(stored) / count(whole)


def _bytes_per_channel(config: Config, cache: str | None) -> float:
  """Bytes of a number in a cache, its share of a slot's scale included."""
  if cache is None:
    return DTYPE.dtype.itemsize
  layers = [config.attentions[layer] for layer in config.cached]
  scales = sum(2 * layer.num_kv_heads for layer in layers)
  return 1 + 4 * scales / sum(map(_slot_channels, layers))


def _slot_channels(of) -> int:
  """Channels of a slot in one layer's cache, keys and values, of all heads."""
  return of.num_kv_heads * (of.head_dim + getattr(of, "value_dim", of.head_dim))


def _mlp_params(c: TransformerConfig, index: int) -> int:
  """Weights of a layer's feed-forward block, of all its experts."""
  layer = c.layer(index)
  met = mlp_weights(layer, c.embed_dim)
  for block in (layer.feed_forward, layer.beside):
    if isinstance(block, Mixture):
      met += (block.num_experts - block.num_chosen) * block.num_expert_params
  return met


def touched(block: Mixture, tokens: float, size: int = 1) -> float:
  """Experts of a layer that a pass reads, expected of uniform routing.

  Where experts are cut by expert, the device that reads most is waited for: as
  many count as if each read as much.

  Args:
    block: the layer's mixture.
    tokens: that the pass is over, of all rows.
    size: devices that the model is cut over.
  """
  sizes = block.num_experts, block.num_chosen
  distinct = experts.expected_distinct(tokens, *sizes)
  if size > 1 and mixture.cut_by(block, size) == "expert":
    distinct = size * experts.busiest(distinct, block.num_experts, size)
  return float(distinct)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """What decoding passes of a model read and compute, on all devices.

  Attributes:
    blocks: attention and feed-forward blocks.
    sums: sums of partial results over the devices, that of the table apart.
    weights: parameters that are read and multiplied, all experts included.
    weight_bytes: that they take.
    mixtures: with the number of layers that have each.
    expert_bytes: of a weight of an expert.
    inside: numbers that a token makes inside the blocks: two of every channel
      of a head, and of every hidden one.
    cache_bytes: of a row's cache that attentions read.
    products: channels of queries times the slots that they meet.
    state_bytes: of a row's recurrent states.
    pending_bytes: what a token adds to them until it is committed.
  """

  blocks: int
  sums: int
  weights: int
  weight_bytes: float
  mixtures: tuple[tuple[Mixture, int], ...] = ()
  expert_bytes: float = 0.0
  inside: int
  cache_bytes: float
  products: int
  state_bytes: int = 0
  pending_bytes: int = 0


@functools.cache
def work(
  config: Config,
  *,
  slots: int,
  skipped: SkippedLayers = _NOTHING,
  input_length: int = 0,
  weights: Format | None = None,
  cache: str | None = None,
) -> Work:
  """The work of passes over full rows.

  Args:
    config: the model.
    slots: cache slots of a row.
    skipped: sub-layers that the pass leaves out.
    input_length: tokens that an encoder read.
    weights, cache: how they are stored; None for bfloat16.
  """
  c, layers = config, config.num_layers
  if isinstance(c, T5Config):
    return _t5_work(c, slots, input_length)
  attentions = [i for i in range(layers) if i not in skipped.attention]
  mlps = [i for i in range(layers) if i not in skipped.mlp]
  beside = [c.layer(i).beside for i in mlps if c.layer(i).beside is not None]
  sums = len(attentions) + len(mlps)
  if c.layer(0).parallel:  # both blocks of a layer are added before it is sent
    sums = len({*attentions, *mlps})
  specs = c.attentions
  inside = sum(2 * mlp_width(c.layer(i)) for i in mlps)
  inside += sum(2 * block.expert_dim for block in beside)
  for i in attentions:
    heads = specs.get(i, c)  # recurrent ones: as others
    inside += 2 * heads.num_heads * heads.head_dim
  met = {
    i: attention.slots_read(slots, slots, specs[i].window)
    for i in attentions
    if i in specs
  }
  channels = sum(n * _slot_channels(specs[i]) for i, n in met.items())
  numbers, _ = _read(c, None)
  per_number = _read(c, weights)[1] / numbers  # its share of scales included
  numbers -= sum(
    attention_weights(c.layer(i), c.embed_dim) for i in skipped.attention
  )
  numbers -= sum(_mlp_params(c, i) for i in skipped.mlp)
  mixtures = collections.Counter(mixtures_of(c, skipped))
  memories = [
    jax.eval_shape(functools.partial(delta_memory, delta, 1, DTYPE))
    for delta in c.deltas.values()
  ]
  return Work(
    blocks=len(attentions) + len(mlps) + len(beside),
    sums=sums + len(beside),
    weights=numbers,
    weight_bytes=per_number * numbers,
    mixtures=tuple(mixtures.items()),
    expert_bytes=_expert_bytes(c, weights) if mixtures else 0.0,
    inside=inside,
    cache_bytes=_bytes_per_channel(c, cache) * channels,
    products=sum(
      n * specs[i].num_heads * specs[i].head_dim for i, n in met.items()
    ),
    state_bytes=sum(num_bytes((m.state, m.window)) for m in memories),
    pending_bytes=sum(num_bytes(m.pending) for m in memories),
  )


def _t5_work(c: T5Config, slots: int, input_length: int) -> Work:
  """The decoder's; encoder, and its keys and values, were computed before."""
  layers, width = c.num_layers, c.num_heads * c.head_dim
  mlp = (3 if c.gated_mlp else 2) * c.embed_dim * c.mlp_dim
  numbers = layers * (6 * c.embed_dim * width + mlp)
  numbers += c.vocab_size * c.embed_dim
  met = layers * (attention.slots_read(slots, slots) + input_length)
  return Work(
    blocks=3 * layers,
    sums=3 * layers,
    weights=numbers,
    weight_bytes=DTYPE.dtype.itemsize * numbers,
    inside=2 * layers * (2 * width + c.mlp_dim),
    cache_bytes=DTYPE.dtype.itemsize * met * _slot_channels(c),
    products=met * width,
  )
