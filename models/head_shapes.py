"""Kinds and shapes of heads, without their weights.

Formats differ in names and conventions (`eagle_format`, `medusa_format`,
`dflash_format`); all become a `HeadShape`, which is enough to make the network,
to cut it over devices, and to plan for it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from models.formats.huggingface_config import config_from_json
from models.networks import dflash, eagle, gemma_assistant, medusa, mtp
from models.networks.gemma_assistant import Assistant
from models.networks.heads import HeadConfig
from models.networks.layers import TransformerConfig
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
_FULL, _SLIDES = "full_attention", "sliding_attention"


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

  def shared(self) -> dict[str, Any]:
    """The target's arrays by the names of tensors that a file may leave out."""
    return {
      "embed_tokens.weight": self.embedding,
      "lm_head.weight": self.output,
    }


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


def head_layers(settings: Mapping[str, Any]) -> TransformerConfig:
  """The layers of a head by their `config.json`, which may leave positions out.

  Whose layers they are does not say which of them slide: `layer_types` does, or
  `use_sliding_window` for those from `max_window_layers` on.

  Args:
    settings: as of `models.formats.huggingface_config.config_from_json`.

  Raises:
    ValueError: as that does.
  """
  size, kinds = settings.get("sliding_window"), settings.get("layer_types")
  first = settings.get("max_window_layers", 28)
  if kinds is None and settings.get("use_sliding_window") and size is not None:
    kinds = [i < first for i in range(settings.get("num_hidden_layers", 1))]
    kinds = [_FULL if full else _SLIDES for full in kinds]
  no_windows = dict.fromkeys(("sliding_window", "layer_types"))
  layers = _head_layers({**settings, **no_windows, "use_sliding_window": False})
  if kinds is None or (isinstance(kinds, list) and {*kinds} <= {_FULL}):
    return layers
  if not isinstance(kinds, list) or {*kinds} - {_FULL, _SLIDES}:
    raise ValueError(
      f"layer_types must be {_FULL} or {_SLIDES}, got {kinds!r:.80}"
    )
  if len(kinds) != layers.num_layers:
    raise ValueError(
      f"layer_types must be of {layers.num_layers} layers, got {len(kinds)}"
    )
  if type(size) is not int or size < 1:
    raise ValueError(f"sliding_window must be an integer >= 1, got {size!r}")
  windows = tuple(size if kind == _SLIDES else None for kind in kinds)
  return dataclasses.replace(layers, windows=windows)


def _head_layers(settings: Mapping[str, Any]) -> TransformerConfig:
  """As `head_layers`, of layers without windows."""
  name = "max_position_embeddings"
  # Biases that are not there are named in families too that never have them.
  biases = ("attention_bias", "mlp_bias")
  settings = {
    k: v for k, v in settings.items() if not (k in biases and v is False)
  }
  if settings.get(name) is not None:
    return config_from_json(settings)
  layers = config_from_json({**settings, name: 1})
  # Two lengths that make a difference: what is rescaled depends on it.
  if layers != dataclasses.replace(
    config_from_json({**settings, name: 2}), max_positions=1
  ):
    raise ValueError(f"this rope_scaling needs {name}")
  return dataclasses.replace(layers, max_positions=None)


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
