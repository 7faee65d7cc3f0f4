"""What all draft heads have in common: `HeadConfig`, and an empty cache."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from models.networks.description import mlp_width
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax.cache import Cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
  """Base of heads' configurations.

  Those of heads that attend have `layers`, a
  `models.networks.description.TransformerConfig` of their own layers.
  """

  @property
  def kind(self) -> str:
    """The drafter's name: "eagle", "eagle3", "medusa", "mtp", ..."""
    raise NotImplementedError

  @property
  def shared(self) -> frozenset[str]:
    """Modules whose arrays are the target's; they are not trained."""
    raise NotImplementedError

  @property
  def draft_vocab_size(self) -> int | None:
    """Tokens that it can draft; None for all of the target's."""
    return None

  @property
  def num_predicted(self) -> int | None:
    """Tokens predicted by one pass; None if it drafts on its own outputs."""
    return None

  @property
  def max_positions(self) -> int | None:
    """Positions that it was trained for; None if no file says."""
    layers = getattr(self, "layers", None)
    return layers and layers.max_positions

  def make(self, *, dtype: Any, rngs: nnx.Rngs) -> Any:
    """The network, with random weights."""
    raise NotImplementedError

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
    """The head as so many devices hold it, and its rules on them.

    Args:
      sharding: of a model without experts.
      parts: devices of each copy, which divide `even_sizes`.

    Raises:
      ValueError: for experts that cannot be cut so.
    """
    del parts
    return self, sharding


def init_cache(
  module: Any, sharding: Sharding | None, batch: int, slots: int, **more
) -> Cache:
  """An empty cache of a head's layers; stacked, as the target's, on a mesh."""
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
