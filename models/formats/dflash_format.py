"""DFlash's heads as they are published, in two formats.

Its authors': `config.json` is Qwen3's of the head's own layers, with
`block_size` and `dflash_config` beside it; the tensors are those layers', `fc`,
`hidden_norm` and `norm`. Embedding and output projection are the target's.
Layers whose features are read are numbered by their outputs: id i is what layer
i + 1 is given.

The `speculators` library's (`"speculators_model_type": "dflash"`): the layers'
settings are nested in `transformer_layer_config`, layers that are read are
numbered by their inputs, and a head may say fewer tokens than the target
(`draft_vocab_size`): then `lm_head`, of their rows, `d2t` and `t2d` are there.
Its other projectors and blocks that draft at the newest token too are refused.

A layer may have a sliding window of W. Then no token of a block sees a later
one, unless `speculators` says `sliding_window_non_causal`; of the text, a token
sees what is less than W away, and in the library's form every token of the
block the W before it: so the heads were trained.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.formats import json_files
from models.formats.families import llama
from models.head_shapes import HeadShape, Target, head_layers
from models.networks.dflash import ParallelConfig

# What configurations may say: of the layers; of the head; and what changes
# nothing. Anything else might change what it says, and is refused.
_OF_LAYERS = frozenset(
  """
  vocab_size hidden_size intermediate_size num_hidden_layers head_dim
  num_attention_heads num_key_value_heads hidden_act rms_norm_eps
  max_position_embeddings rope_theta rope_scaling rope_parameters
  attention_bias tie_word_embeddings sliding_window use_sliding_window
  max_window_layers layer_types model_type
  """.split()
)
_INERT = frozenset(
  """
  architectures auto_map transformers_version torch_dtype dtype use_cache
  initializer_range attention_dropout bos_token_id eos_token_id pad_token_id
  _name_or_path
  """.split()
)
_NATIVE = frozenset({"block_size", "dflash_config", "num_target_layers"})
_OF_DFLASH = frozenset({"mask_token_id", "target_layer_ids", "block_size"})
_SPECULATORS = frozenset(
  """
  speculators_model_type speculators_version speculators_config
  transformer_layer_config draft_vocab_size target_hidden_size block_size
  aux_hidden_state_layer_ids mask_token_id sliding_window_non_causal
  sample_from_anchor projector_type shift_label

  model_type tie_word_embeddings has_no_defaults_at_init auf
  pure_draft_prefix_len emb_dim gru_hidden_dim lambda_base_start
  lambda_base_decay_ratio
  """.split()
)
# What it must say, if it says anything: other values are other networks.
_ONLY = {
  "sample_from_anchor": False,
  "projector_type": "dflash",
  "shift_label": False,
}


def is_one(config: Mapping[str, Any]) -> bool:
  """True if a configuration is of either format."""
  return (
    "dflash_config" in config
    or config.get("speculators_model_type") == "dflash"
  )


def shape(config: Mapping[str, Any], target: Target) -> HeadShape:
  """Shapes of the head that a configuration describes.

  Args:
    config: what `config.json` holds.
    target: the model that it drafts for.

  Raises:
    ValueError: for switches that are not known, or another target.
  """
  if "speculators_model_type" in config:
    return _speculators(config, target)
  return _native(config, target)


def usual_layers(count: int, num_layers: int) -> list[int]:
  """Layers whose outputs are read where nothing is said: from 1 to N - 3.

  Args:
    count: of the head's own layers; as many are read.
    num_layers: N, of the target.
  """
  if count == 1:
    return [num_layers // 2]
  step = (num_layers - 4) / (count - 1)
  return [round(1 + i * step) for i in range(count)]


def table(shape: HeadShape) -> dict[str, str]:
  """Parameters whose tensors have other names, and these."""
  named = {
    "embed.embedding": "embed_tokens.weight",
    "hidden_norm.scale": "hidden_norm.weight",
    "final_norm.scale": "norm.weight",
  }
  for i in range(shape.config.layers.num_layers):
    named |= llama.layer_tensors(f"layers.{i}.", f"layers.{i}.")
  return named


# ------------------------------------------------------------- the two formats


def _native(config: Mapping[str, Any], target: Target) -> HeadShape:
  of_dflash = config["dflash_config"]
  if not isinstance(of_dflash, Mapping):
    raise ValueError("dflash_config must be an object")
  json_files.refuse_unknown(config, _OF_LAYERS | _NATIVE | _INERT)
  json_files.refuse_unknown(of_dflash, _OF_DFLASH)
  if config.get("num_target_layers", target.num_layers) != target.num_layers:
    raise ValueError(
      f"it was made for {config['num_target_layers']} layers, and the target "
      f"has {target.num_layers}"
    )
  settings = {k: v for k, v in config.items() if k in _OF_LAYERS}
  count = _integer("num_hidden_layers", config.get("num_hidden_layers"))
  ids = of_dflash.get("target_layer_ids")
  if ids is None:
    ids = usual_layers(count, target.num_layers)
  block = "block_size"
  size = json_files.agreed(
    {block: config.get(block), f"dflash_config.{block}": of_dflash.get(block)}
  )
  return _made(
    settings,
    target,
    read=_read_layers("target_layer_ids", ids, target, shift=1),
    block_size=_integer(block, size),
    mask_token=_integer("mask_token_id", of_dflash.get("mask_token_id")),
  )


def _speculators(config: Mapping[str, Any], target: Target) -> HeadShape:
  json_files.refuse_unknown(config, _SPECULATORS | _INERT)
  settings = config.get("transformer_layer_config")
  if not isinstance(settings, Mapping):
    raise ValueError("transformer_layer_config must be an object")
  # Those of other families that say the layers of this one.
  other = {"mlp_bias": False, "pretraining_tp": 1}
  json_files.refuse_unknown(settings, _OF_LAYERS | _INERT | frozenset(other))
  for name, only in (*_ONLY.items(), *other.items()):
    given = {**settings, **config}.get(name)
    if given is not None and given != only:
      raise ValueError(f"{name} must be {only!r}, got {given!r}")
  width = config.get("target_hidden_size")
  if width is not None and width != target.embed_dim:
    raise ValueError(
      f"it reads features of {width!r} channels, the target has "
      f"{target.embed_dim}"
    )
  both_ways = config.get("sliding_window_non_causal", False)
  if not isinstance(both_ways, bool):
    raise ValueError(
      f"sliding_window_non_causal must be true or false, got {both_ways!r}"
    )
  words = _integer("draft_vocab_size", config.get("draft_vocab_size"))
  name = "aux_hidden_state_layer_ids"
  return _made(
    {k: v for k, v in settings.items() if k in _OF_LAYERS},
    target,
    read=_read_layers(name, config.get(name), target, shift=0),
    block_size=_integer("block_size", config.get("block_size")),
    mask_token=_integer("mask_token_id", config.get("mask_token_id")),
    causal_windows=not both_ways,
    windows_before_block=True,
    draft_vocab_size=None if words == target.vocab_size else words,
  )


def _made(
  settings: dict[str, Any], target: Target, *, read: tuple[int, ...], **sizes
) -> HeadShape:
  """The head of the settings of its layers, which are Qwen3's.

  Args:
    settings: of the layers alone.
    target: the model that it drafts for.
    read: layers of the target whose inputs are read.
    **sizes: further fields of `ParallelConfig`.
  """
  if settings.get("model_type") in (None, "llama"):
    settings["model_type"] = "qwen3"  # whatever its target is
    if settings.get("head_dim") is None:  # as a Llama's, not Qwen3's 128
      heads = _integer(
        "num_attention_heads", settings.get("num_attention_heads")
      )
      settings["head_dim"] = settings.get("hidden_size", 0) // max(heads, 1)
  layers = head_layers(settings)
  layers = dataclasses.replace(layers, tied_embeddings=False)
  for name, mine, theirs in (
    ("vocabulary", layers.vocab_size, target.vocab_size),
    ("width", layers.embed_dim, target.embed_dim),
  ):
    if mine != theirs:  # it reads the target's embedding
      raise ValueError(f"its {name} is {mine}, and the target's {theirs}")
  if not any(layers.windows or ()):  # then it does not matter what they mean
    sizes = {k: v for k, v in sizes.items() if "windows" not in k}
  made = ParallelConfig(
    layers=layers, num_features=len(read) * target.embed_dim, **sizes
  )
  return HeadShape(config=made, features=read)


def _read_layers(
  name: str, ids: Any, target: Target, *, shift: int
) -> tuple[int, ...]:
  """Layers whose inputs are read, in our numbers (0 is the embedding)."""
  if (
    not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids)
  ):
    raise ValueError(f"{name} must be layers, got {ids!r:.80}")
  layers = tuple(i + shift for i in ids)
  # What comes after the last layer may be meant with its norm or without;
  # speculators means it without, and norms it itself where it needs that.
  if min(ids) < 0 or max(layers) > target.num_layers - shift:
    raise ValueError(
      f"{name} {ids} are not layers of a target of {target.num_layers}"
      + ", the last one apart" * shift
    )
  return layers


def _integer(name: str, value: Any) -> int:
  if type(value) is not int:
    raise ValueError(f"{name} must be an integer, got {value!r}")
  return value
