"""What `config.json` of several heads' formats have in common.

Keys that are read, or change nothing; anything else might change what a head
predicts, and is refused by name. The `speculators` library nests the settings
of the layers in `transformer_layer_config`.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from models.formats import json_files
from models.formats.families.reading import FULL, SLIDES, get
from models.formats.huggingface_config import config_from_json
from models.head_shapes import Target
from models.networks.description import TransformerConfig, with_windows

OF_LAYERS = frozenset(
  """
  vocab_size hidden_size intermediate_size num_hidden_layers head_dim
  num_attention_heads num_key_value_heads hidden_act rms_norm_eps
  max_position_embeddings rope_theta rope_scaling rope_parameters
  attention_bias mlp_bias qkv_bias tie_word_embeddings sliding_window
  use_sliding_window max_window_layers layer_types model_type rope_interleaved
  """.split()
)
INERT = frozenset(
  """
  architectures auto_map transformers_version torch_dtype dtype use_cache
  initializer_range pretraining_tp attention_dropout bos_token_id eos_token_id
  pad_token_id _name_or_path target_model_type num_local_experts
  num_experts_per_tok experts_per_token output_router_logits
  router_aux_loss_coef has_no_defaults_at_init enable_sp_ulysses
  """.split()
)
_SPECULATORS = frozenset(
  """
  speculators_model_type speculators_version speculators_config
  transformer_layer_config model_type tie_word_embeddings
  """.split()
)


def speculators_layers(
  config: Mapping[str, Any], known: Collection[str]
) -> Mapping[str, Any]:
  """The settings of the layers in a configuration of `speculators`' form.

  Args:
    config: what `config.json` holds.
    known: keys at its top that a kind of head has besides.

  Raises:
    ValueError: for keys at its top that are not known, or layers that are none.
  """
  json_files.refuse_unknown(config, {*_SPECULATORS, *INERT, *known})
  nested = config.get("transformer_layer_config")
  if not isinstance(nested, Mapping):
    raise ValueError("transformer_layer_config must be an object")
  return nested


def refuse_unknown_of_layers(nested: Mapping[str, Any]) -> None:
  """Raises ValueError for settings of nested layers that are not known."""
  json_files.refuse_unknown(
    nested, OF_LAYERS | INERT, "settings of transformer_layer_config"
  )


def layers_read(
  name: str, ids: Any, target: Target, *, outputs: bool, last: bool
) -> tuple[int, ...]:
  """The layers of a target whose inputs are read; 0 reads the embedding.

  Args:
    name: of the setting, for messages.
    ids: its value.
    target: whose layers they are.
    outputs: whether ids are of layers whose outputs are read.
    last: whether what comes after the last layer may be read, without its norm;
      in other forms it may be meant with it.

  Raises:
    ValueError: for other layers than the target's.
  """
  if (
    not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids)
  ):
    raise ValueError(f"{name} must be layers, got {ids!r:.80}")
  layers = tuple(i + outputs for i in ids)
  if min(layers) < 0 or max(layers) > target.num_layers - (not last):
    raise ValueError(
      f"{name} {ids} are not layers of a target of {target.num_layers}"
    )
  return layers


def head_layers(settings: Mapping[str, Any]) -> TransformerConfig:
  """The layers of a head by their settings, which may leave positions out.

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
    kinds = [
      FULL if i < first else SLIDES
      for i in range(settings.get("num_hidden_layers", 1))
    ]
  no_windows = dict.fromkeys(("sliding_window", "layer_types"))
  layers = _without_windows(
    {**settings, **no_windows, "use_sliding_window": False}
  )
  layers = dataclasses.replace(layers, tied_embeddings=False)
  if not kinds or {*kinds} == {FULL}:
    return layers
  if len(kinds) != layers.num_layers or {*kinds} - {FULL, SLIDES}:
    raise ValueError(
      f"layer_types must be {FULL} or {SLIDES} of {layers.num_layers} layers, "
      f"got {kinds!r:.80}"
    )
  size = get(settings, "sliding_window", int)
  windows = [size if kind == SLIDES else None for kind in kinds]
  return dataclasses.replace(
    layers, layers=with_windows(layers.layers, windows)
  )


def _without_windows(settings: Mapping[str, Any]) -> TransformerConfig:
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


def refuse_other_target(layers: TransformerConfig, target: Target) -> None:
  """Raises ValueError for layers of another vocabulary or width."""
  for name, mine, theirs in (
    ("vocabulary", layers.vocab_size, target.vocab_size),
    ("width", layers.embed_dim, target.embed_dim),
  ):
    if mine != theirs:
      raise ValueError(f"its {name} is {mine}, and the target's {theirs}")
