"""Published DSpark heads, in three formats.

All have DFlash's layers and tensors (`models.formats.dflash_format`) plus
`markov_head` and `confidence_head`. DeepSpec, the authors', has its settings
at the top of a Qwen3 `config.json`; SpecForge has them in `dflash_config`; the
`speculators` library nests the layers' settings and numbers feature layers by
their inputs. DeepSeek-V4's DSpark is a different network and is rejected.
"""

from collections.abc import Mapping
from typing import Any

from models.formats import dflash_format, head_settings, json_files
from models.formats.families.reading import get
from models.formats.head_settings import INERT, OF_LAYERS, layers_read
from models.head_shapes import HeadShape, Target
from models.networks.dspark import KINDS, DSparkConfig
from models.networks.transformer import Features

_MARKOV = frozenset(
  """
  markov_rank markov_head_type enable_confidence_head
  confidence_head_with_markov
  """.split()
)
_OF_BLOCK = frozenset({"block_size", "mask_token_id", "target_layer_ids"})
# Training settings.
_INERT = INERT | {"num_anchors", "confidence_head_alpha"}
_SPECULATORS = _MARKOV | frozenset(
  """
  draft_vocab_size target_hidden_size block_size aux_hidden_state_layer_ids
  mask_token_id sliding_window_non_causal sample_from_anchor
  """.split()
)
# Other values in SpecForge's settings mean other networks.
_ONLY = {
  "projector_type": ("dspark",),
  "attention_mode": ("gqa", "mha"),
  "dspark_backbone_conv_enabled": (False,),
}


def matches(config: Mapping[str, Any]) -> bool:
  """True if a configuration is in one of these formats or DeepSeek-V4's."""
  nested = config.get("dflash_config")
  return (
    config.get("speculators_model_type") == "dspark"
    or "markov_rank" in config
    or (isinstance(nested, Mapping) and "markov_rank" in nested)
    or any(name.startswith("dspark_") for name in config)
  )


def shape(config: Mapping[str, Any], target: Target) -> HeadShape:
  """The shape of the head that a configuration describes.

  Args:
    config: the contents of `config.json`.
    target: the model that it drafts for.

  Raises:
    ValueError: for unknown switches, or a head for another target.
  """
  if any(name.startswith("dspark_") for name in config):
    raise ValueError("DeepSeek-V4's DSpark, another network, is not supported")
  if "speculators_model_type" in config:
    return _speculators(config, target)
  return _native(config, target)


def names(config: DSparkConfig) -> dict[str, str]:
  """Tensor names of the parameters that are named differently."""
  return dflash_format.names(config) | {
    "markov_head.markov_w1.embedding": "markov_head.markov_w1.weight",
    "confidence_head.weight": "confidence_head.proj.weight",
    "confidence_head.bias": "confidence_head.proj.bias",
  }


def settings(
  config: DSparkConfig, features: Features, dtype: str
) -> dict[str, Any]:
  """The `config.json` of a head.

  In DeepSpec's format, or in `speculators`' if the head has a draft vocabulary
  or does not draft at the newest token.

  Raises:
    ValueError: if neither can express the head.
  """
  if config.layers.has_windows or config.causal:
    raise ValueError("DSpark's formats have no windows or causal blocks")
  dflash = dflash_format.settings(config, features, dtype)
  ours = {
    "markov_rank": config.rank,
    "markov_head_type": config.markov,
    "enable_confidence_head": config.confidence,
    "confidence_head_with_markov": config.confidence_reads_code,
  }
  nested = dflash.pop("dflash_config", None)
  if nested is None or not config.from_newest:
    if nested is not None:
      dflash = dflash_format.speculators_json(config, features, dtype)
    return (
      dflash
      | ours
      | {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "sample_from_anchor": config.from_newest,
      }
    )
  return dflash | nested | ours | {"architectures": ["Qwen3DSparkModel"]}


def _native(config: Mapping[str, Any], target: Target) -> HeadShape:
  """DeepSpec's, or SpecForge's with its settings in `dflash_config`."""
  of_head = config.get("dflash_config", config)
  known = OF_LAYERS | _OF_BLOCK | _INERT | {"num_target_layers"}
  if of_head is config:
    known |= _MARKOV
  else:
    known |= {"dflash_config"}
    json_files.refuse_unknown(of_head, _OF_BLOCK | _MARKOV | _INERT | {*_ONLY})
  json_files.refuse_unknown(config, known)
  for name, only in _ONLY.items():
    if of_head.get(name, only[0]) not in only:
      raise ValueError(f"{name} must be {only[0]!r}, got {of_head[name]!r}")
  dflash_format.check_target(config, target)
  name = "target_layer_ids"
  confidence = (of_head.get("confidence_head_alpha") or 0) > 0
  return _without_windows(
    config,
    target,
    features=layers_read(
      name, of_head.get(name), target, outputs=True, last=False
    ),
    block_size=dflash_format.block_size(config, of_head),
    mask_token=get(of_head, "mask_token_id", int, least=0),
    **_markov(of_head, confidence),
  )


def _speculators(config: Mapping[str, Any], target: Target) -> HeadShape:
  settings = head_settings.speculators_layers(config, _SPECULATORS)
  if "sample_from_anchor" not in config:
    raise ValueError(
      "sample_from_anchor is missing: readers disagree on its default"
    )
  return _without_windows(
    settings,
    target,
    **dflash_format.of_speculators(config, target),
    from_newest=get(config, "sample_from_anchor", bool),
    **_markov(config, False),
  )


def _without_windows(config, target: Target, **sizes: Any) -> HeadShape:
  made = dflash_format.make_shape(config, target, kind=DSparkConfig, **sizes)
  if made.config.layers.has_windows:  # type: ignore[attr-defined]
    raise ValueError("a DSpark head cannot have sliding windows")
  return made


def _markov(settings: Mapping[str, Any], confidence: bool) -> dict[str, Any]:
  kind = settings.get("markov_head_type", "vanilla")
  if kind not in KINDS:
    raise ValueError(f"markov_head_type must be one of {KINDS}, got {kind!r}")
  return {
    "markov": kind,
    "rank": get(settings, "markov_rank", int),
    "confidence": get(settings, "enable_confidence_head", bool, confidence),
    "confidence_reads_code": get(
      settings, "confidence_head_with_markov", bool, True
    ),
  }
