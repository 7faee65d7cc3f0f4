"""Settings that the `config.json` files of several head formats share.

Keys not listed here might change what a head predicts, so they are rejected by
name. `head_layers` reads the settings of a head's layers, `layers_json` writes
them; the `speculators` library nests them in `transformer_layer_config`.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from models.formats import json_files
from models.formats.families.reading import FULL, SLIDING, get
from models.formats.huggingface_config import config_from_json, llama_json
from models.head_shapes import Target
from models.networks.description import TransformerConfig, with_windows

NESTED = "transformer_layer_config"
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
  config: Mapping[str, Any],
  known: Collection[str],
  of_layers: Collection[str] | None = OF_LAYERS | INERT,
) -> Mapping[str, Any]:
  """The layers' settings in a configuration in `speculators`' format.

  Args:
    config: the contents of `config.json`.
    known: other top-level keys of this kind of head.
    of_layers: known keys of layers; None for any.

  Raises:
    ValueError: for unknown keys, or if the layers' settings are no object.
  """
  json_files.refuse_unknown(config, {*_SPECULATORS, *INERT, *known})
  nested = config.get(NESTED)
  if not isinstance(nested, Mapping):
    raise ValueError(f"{NESTED} must be an object")
  if of_layers is not None:
    json_files.refuse_unknown(nested, of_layers, f"settings of {NESTED}")
  return nested


def layers_read(
  name: str, ids: Any, target: Target, *, outputs: bool, last: bool
) -> tuple[int, ...]:
  """The target layers whose inputs a head reads; 0 reads the embedding.

  Args:
    name: the setting's name, for messages.
    ids: its value.
    target: the target.
    outputs: whether ids name layers whose outputs are read.
    last: whether the last layer's output may be read, without the final norm;
      some formats are ambiguous about the norm.

  Raises:
    ValueError: for layers that the target does not have.
  """
  if (
    not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids)
  ):
    raise ValueError(f"{name} must be a list of layers, got {ids!r:.80}")
  layers = tuple(i + outputs for i in ids)
  if min(layers) < 0 or max(layers) > target.num_layers - (not last):
    raise ValueError(
      f"{name} {ids} are not all layers of a target with {target.num_layers}"
    )
  return layers


def head_layers(settings: Mapping[str, Any]) -> TransformerConfig:
  """Translates a head's layers; any family may have `layer_types`.

  Args:
    settings: as for `models.formats.huggingface_config.config_from_json`.

  Raises:
    ValueError: like that, or for layers neither sliding nor full.
  """
  kinds = settings.get("layer_types")
  # Files set biases to false even in families that never have them.
  settings = {
    k: v
    for k, v in settings.items()
    if not (k in ("attention_bias", "mlp_bias") and v is False)
  }
  if kinds:
    settings |= {"layer_types": None, "use_sliding_window": False}
  layers = config_from_json(settings)
  layers = dataclasses.replace(layers, tied_embeddings=False)
  if not kinds or {*kinds} == {FULL}:
    return layers
  if len(kinds) != layers.num_layers or {*kinds} - {FULL, SLIDING}:
    raise ValueError(
      f"layer_types must be {FULL} or {SLIDING} for {layers.num_layers} layers,"
      f" got {kinds!r:.80}"
    )
  size = get(settings, "sliding_window", int)
  windows = [size if kind == SLIDING else None for kind in kinds]
  return dataclasses.replace(
    layers, layers=with_windows(layers.layers, windows)
  )


def layers_json(
  layers: TransformerConfig, dtype: str, *, qk_norm: bool = True
) -> dict[str, Any]:
  """Settings for `head_layers`: Llama's, or Qwen3's with `qk_norm`.

  Layers with biases on queries, such as Qwen2's, are written with biases on
  all four projections, like Llama's.

  Args:
    layers: the head's layers.
    dtype: dtype of the file's tensors.
    qk_norm: whether the format allows norms of queries and keys.

  Raises:
    ValueError: for layers that these settings cannot express.
  """
  qwens = qk_norm and layers.attention.qk_norm == "head"
  bare = layers.with_attention(
    lambda a: dataclasses.replace(
      a,
      window=None,
      qk_norm=None if qwens else a.qk_norm,
      out_bias=a.out_bias or a.qkv_bias,
    )
  )
  settings = llama_json(bare, dtype, None)
  if qwens:
    if settings.pop("mlp_bias"):
      raise ValueError("Qwen3's format cannot express mlp_bias")
    del settings["architectures"]
    settings["model_type"] = "qwen3"
  if layers.has_windows:
    (size,) = {w for w in layers.windows if w}
    settings |= {
      "sliding_window": size,
      "use_sliding_window": True,
      "layer_types": [SLIDING if w else FULL for w in layers.windows],
    }
  return settings


def refuse_other_target(
  layers: TransformerConfig, target: Target, *, width: bool = True
) -> None:
  """Raises ValueError if vocabulary or width differ from the target's."""
  for name, mine, theirs in (
    ("vocabulary", layers.vocab_size, target.vocab_size),
    ("width", layers.embed_dim, target.embed_dim),
  ):
    if mine != theirs and (width or name != "width"):
      raise ValueError(f"its {name} is {mine}, but the target's is {theirs}")
