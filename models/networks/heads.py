"""`HeadConfig`, the base of draft heads' configurations, and their caches."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.networks.description import mlp_width
from models.networks.linear import Embed
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax.cache import Cache

Put = Callable[[Array, str], Array]  # sets a layout (`sharding.constrain`)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(abc.ABC):
  """Base of heads' configurations.

  Heads with attention have `layers`, a
  `models.networks.description.TransformerConfig` of their own layers.
  """

  num_fused = 1  # layers of the target whose features are read

  @property
  @abc.abstractmethod
  def kind(self) -> str:
    """The drafter's name: "eagle", "eagle3", "medusa", "mtp", ..."""

  @property
  @abc.abstractmethod
  def shared(self) -> frozenset[str]:
    """Modules that share the target's arrays; they are not trained."""

  @property
  def num_features(self: Any) -> int:
    """F, width of the target's features that it reads."""
    return self.num_fused * self.layers.embed_dim

  @property
  def draft_vocab_size(self) -> int | None:
    """Size of the draft vocabulary; None for the target's."""
    return None

  @property
  def num_predicted(self) -> int | None:
    """Tokens predicted by one pass; None if it is autoregressive."""
    return None

  @property
  def max_positions(self) -> int | None:
    """Positions that it was trained for; None if unknown."""
    layers = getattr(self, "layers", None)
    return layers and layers.max_positions

  def even_sizes(self: Any) -> tuple[int, ...]:
    """Sizes that must be multiples of the number of devices.

    Raises:
      ValueError: for a head that runs on one device.
    """
    layers = self.layers
    a, words = layers.attention, layers.vocab_size
    return (
      a.num_heads, a.num_kv_heads, mlp_width(layers.layers[0]),
      layers.embed_dim, words, self.draft_vocab_size or words,
    )  # fmt: skip

  def cut(self, sharding: Sharding, parts: int) -> tuple[Any, Sharding]:
    """The configuration for one of `parts` devices, and its sharding rules.

    Args:
      sharding: the sharding rules of a model without experts.
      parts: devices of each copy, which divide `even_sizes`.

    Raises:
      ValueError: for experts that cannot be split like this.
    """
    del parts
    return self, sharding


def embedding(vocab_size: int, width: int, dtype, rngs: nnx.Rngs) -> Embed:
  """A placeholder for the target's embedding."""
  return Embed(vocab_size, width, dtype=dtype, param_dtype=dtype, rngs=rngs)


def first_ids(count: int) -> nnx.Variable:
  """The initial ids of a draft vocabulary: the first tokens."""
  return nnx.Variable(jnp.arange(count, dtype=jnp.int32))


# --------------------------------------------------------------------- caches


def init_cache(
  module: Any, sharding: Sharding | None, batch: int, slots: int, **more
) -> Cache:
  """An empty cache for a head's layers; stacked on a mesh like the target's."""
  layers, stacked = module.config.layers, sharding is not None
  cache = cache_lib.make_cache(
    batch=batch,
    slots=slots,
    num_layers=layers.num_layers,
    num_kv_heads=layers.attention.num_kv_heads,
    head_dim=layers.attention.head_dim,
    value_dim=layers.attention.value_dim,
    dtype=module.dtype,
    stacked=stacked,
    **more,
  )
  if not stacked:
    return cache
  put = lambda x: constrain(x, "cache_lbksc", sharding=sharding)
  keys, values = jax.tree.map(put, (cache.keys, cache.values))
  return cache.replace(keys=keys, values=values)


def is_stacked(cache: Cache) -> bool:
  """True if the keys of all layers are one array."""
  return cache.keys[0].ndim == 5


def place(layer: int, stacked: bool) -> tuple[int, Array | None]:
  """Index of a layer's keys and values in `pairs`, and its index in these."""
  return (0, jnp.int32(layer)) if stacked else (layer, None)


def pairs(cache: Cache) -> tuple[tuple[Array, Array], ...]:
  """The keys and values of each layer; one pair for all if stacked."""
  return tuple(zip(cache.keys, cache.values, strict=True))


def with_pairs(cache: Cache, kvs, put: Put) -> Cache:
  """Replaces a cache's keys and values; constrains layouts if stacked."""
  if is_stacked(cache):
    kvs = jax.tree.map(lambda x: put(x, "cache_lbksc"), kvs)
  keys, values = zip(*kvs, strict=True)
  return cache.replace(keys=keys, values=values)
