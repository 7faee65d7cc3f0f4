"""Kinds and shapes of heads, without their weights.

File formats differ (`models.formats.head_checkpoints`); all become a
`HeadShape`, which is enough to make, shard and plan the network.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from models.networks import (
  dflash,
  dflash2,
  dspark,
  eagle,
  gemma_assistant,
  medusa,
  mtp,
)
from models.networks.description import TransformerConfig
from models.networks.gemma_assistant import Assistant
from models.networks.heads import HeadConfig
from models.networks.transformer import FINAL, Features
from models.sharding import Sharding

HeadModule = eagle.Eagle | medusa.Medusa | dflash.Parallel | mtp.Mtp | Assistant
# The network of each kind, and what turns it into pure functions.
_NETWORKS: dict[str, tuple[Any, Callable[..., tuple[Any, Any]]]] = {
  "eagle": (eagle.Eagle, eagle.as_feature_model),
  "eagle3": (eagle.Eagle, eagle.as_feature_model),
  "p_eagle": (eagle.Eagle, eagle.as_feature_model),
  "medusa": (medusa.Medusa, medusa.as_marginals),
  "dflash": (dflash.Parallel, dflash.as_block_model),
  "dflash2": (dflash2.DFlash2, dspark.as_markov_blocks),
  "dspark": (dspark.DSpark, dspark.as_markov_blocks),
  "mtp": (mtp.Mtp, eagle.as_feature_model),
  "assistant": (
    Assistant,
    lambda module, sharding: gemma_assistant.as_cache_reader(module),
  ),
}
# Kinds that can be planned.
KINDS = tuple(kind for kind in _NETWORKS if kind != "assistant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """Sizes of a head's target, and the arrays that it shares.

  Attributes:
    num_layers: the target's number of layers.
    embed_dim: its width.
    vocab_size: rows of its embedding.
    embedding: `f[V, D]`, or None if a head is only described.
    output: the output projection, `f[V, D]`, or None likewise.
    config: its configuration, for heads that read its cache; or None.
  """

  num_layers: int
  embed_dim: int
  vocab_size: int
  embedding: Any = None
  output: Any = None
  config: TransformerConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadShape:
  """A head without its parameters.

  Attributes:
    config: the network's; its kind is one of `KINDS` or "assistant".
    features: the target's features that it reads
      (`models.networks.transformer.Features`).
  """

  config: HeadConfig
  features: Features


def make(config: HeadConfig, *, dtype=jnp.float32, rngs: nnx.Rngs) -> Any:
  """Makes the network of a configuration, with random weights."""
  return _NETWORKS[config.kind][0](config, dtype=dtype, rngs=rngs)


def mtp_shape(target: TransformerConfig, *, num_depths: int = 1) -> HeadShape:
  """The shape of a target's own MTP head with `num_depths` layers."""
  config = mtp.config_of(target, num_depths=num_depths)
  return HeadShape(config=config, features=(FINAL,))


def is_own(module: HeadModule) -> Callable[[tuple, Any], bool]:
  """An nnx filter for the head's own, trainable parameters."""
  fixed = module.config.shared
  return lambda path, value: (
    isinstance(value, nnx.Param) and path[0] not in fixed
  )


def functions(
  module: HeadModule, *, sharding: Sharding | None = None
) -> tuple[Any, Any]:
  """Splits a head into pure functions and parameters.

  Args:
    module: the network, or its shapes.
    sharding: its sharding rules; None for one device.

  Returns:
    A `FeatureModel` (EAGLE, MTP), a `BlockModel` (DFlash, DSpark, ...), a
    `CacheReader` (Gemma 4's assistant) or else a `MarginalModel`; and the
    parameters.
  """
  return _NETWORKS[module.config.kind][1](module, sharding=sharding)
