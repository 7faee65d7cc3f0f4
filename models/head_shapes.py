"""Kinds and shapes of heads, without their weights.

Formats differ in names and conventions (`eagle_format`, `medusa_format`,
`dflash_format`); all become a `HeadShape`, which is enough to make the network,
to cut it over devices, and to plan for it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx

from models.networks import dflash, eagle, gemma_assistant, medusa, mtp
from models.networks.description import TransformerConfig
from models.networks.gemma_assistant import Assistant
from models.networks.heads import HeadConfig
from models.networks.transformer import FINAL, Features
from models.sharding import Sharding

HeadModule = (
  eagle.Eagle
  | eagle.Eagle3
  | medusa.Medusa
  | medusa.Blockwise
  | dflash.Parallel
  | mtp.Mtp
  | Assistant
)
# Those that are planned and trained; an "assistant" is neither.
KINDS = ("eagle", "eagle3", "medusa", "blockwise", "dflash", "mtp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """Sizes of a head's target, and the arrays that it shares.

  Attributes:
    num_layers: of the target.
    embed_dim: its width.
    vocab_size: rows of its embedding.
    embedding: `f[V, D]`, or None where a head is only described.
    output: the output projection, `f[V, D]`, or None likewise.
    config: all of its shapes and switches, for heads that read its cache; None
      where none does.
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
    config: its network's; says its kind, one of `KINDS` or "assistant".
    features: features of the target that it reads
      (`models.networks.transformer.Features`).
  """

  config: HeadConfig
  features: Features


def mtp_shape(target: TransformerConfig, *, num_depths: int = 1) -> HeadShape:
  """The MTP head that a target comes with, of so many layers."""
  config = mtp.config_of(target, num_depths=num_depths)
  return HeadShape(config=config, features=(FINAL,))


def is_own(module: HeadModule) -> Callable[[tuple, Any], bool]:
  """A filter of nnx: the head's own parameters, which learn."""
  fixed = module.config.shared
  return lambda path, value: (
    isinstance(value, nnx.Param) and path[0] not in fixed
  )


def functions(
  module: HeadModule, *, sharding: Sharding | None = None
) -> tuple[Any, Any]:
  """A head as pure functions, and their parameters.

  Args:
    module: the network, or its shapes.
    sharding: its rules on the mesh in use; None for one device.

  Returns:
    A `FeatureModel` (EAGLE, MTP), a `BlockModel` (parallel), a `CacheReader`
    (Gemma 4's assistant), or of the others a `MarginalModel`; and the
    parameters.
  """
  if isinstance(module, Assistant):
    return gemma_assistant.as_cache_reader(module)
  if isinstance(module, dflash.Parallel):
    return dflash.as_block_model(module, sharding=sharding)
  if isinstance(module, medusa.Medusa | medusa.Blockwise):
    return medusa.as_marginals(module, sharding=sharding)
  return eagle.as_feature_model(module, sharding=sharding)
