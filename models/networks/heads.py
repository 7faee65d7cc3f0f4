"""`HeadConfig`, what the configurations of all draft heads have in common."""

import dataclasses
from typing import Any

from flax import nnx

from models.networks.description import TransformerConfig, mlp_width
from models.sharding import Sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
  """Base of heads' configurations; what it says holds for the simplest."""

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
    return None

  def make(self, *, dtype: Any, rngs: nnx.Rngs) -> Any:
    """The network, with random weights."""
    raise NotImplementedError

  def even_sizes(self) -> tuple[int, ...]:
    """Sizes that must be multiples of the number of devices.

    Raises:
      ValueError: for a head that runs on one device.
    """
    raise NotImplementedError

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


def even_sizes(layer: TransformerConfig, words: int | None) -> tuple[int, ...]:
  """`HeadConfig.even_sizes` of dense layers and a draft vocabulary."""
  a = layer.attention
  return (
    a.num_heads, a.num_kv_heads, mlp_width(layer.layers[0]), layer.embed_dim,
    layer.vocab_size, words or layer.vocab_size,
  )  # fmt: skip
