"""`HeadConfig`, what the configurations of all draft heads have in common."""

import dataclasses
from typing import Any

from flax import nnx

from models.networks.description import mlp_width
from models.sharding import Sharding


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
