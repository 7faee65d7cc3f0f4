"""Translates `config.json` into a `TransformerConfig`, and Llama's back.

`models.formats.families` has the translation for each family. An unsupported
setting is an error, as is a key neither read nor known to be harmless.
"""

from collections.abc import Mapping
from typing import Any

from models.formats import json_files, packings
from models.formats.families import FAMILIES, reading
from models.formats.families.family import Settings
from models.networks.description import DenseSpec, TransformerConfig

# Keys that, in any family, must have this value or be missing.
_FIXED = dict(add_cross_attention=False, is_encoder_decoder=False)

# Keys that change no logits: names and versions, training, special tokens,
# output format, and sampling defaults in older files.
_HARMLESS = frozenset(
  """
  model_type architectures auto_map torch_dtype dtype transformers_version
  transformers.js_config tokenizer_class name_or_path is_llama_config
  unsloth_version unsloth_fixed finetuning_task task_specific_params
  use_cache cache_implementation gradient_checkpointing initializer_range
  attention_dropout
  hidden_dropout hidden_dropout_prob attention_probs_dropout_prob
  embedding_dropout weight_decay bos_token_id eos_token_id pad_token_id
  sep_token_id unk_token_id decoder_start_token_id forced_bos_token_id
  forced_eos_token_id
  begin_suppress_tokens suppress_tokens bad_words_ids attn_implementation
  output_attentions output_hidden_states output_scores output_past return_dict
  return_dict_in_generate id2label label2id num_labels problem_type
  chunk_size_feed_forward torchscript use_bfloat16 pruned_heads is_decoder
  cross_attention_hidden_size tie_encoder_decoder prefix tf_legacy_loss
  max_length min_length do_sample early_stopping num_beams num_beam_groups
  diversity_penalty temperature top_k top_p typical_p repetition_penalty
  length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
  num_return_sequences remove_invalid_values exponential_decay_length_penalty
  """.split()
)

# Keys of multimodal models besides their text model's settings.
_OF_OTHERS = frozenset(
  """
  text_config vision_config audio_config mm_tokens_per_image boi_token_index
  eoi_token_index image_token_index boi_token_id eoi_token_id image_token_id
  boa_token_id eoa_token_id eoa_token_index video_token_id audio_token_id
  vision_start_token_id vision_end_token_id tie_word_embeddings
  vision_soft_tokens_per_image language_model_only quantization_config
  """.split()
)

# Keys of a T5: those that are read, redundant ones, and training settings.
_OF_T5 = frozenset(
  """
  vocab_size d_model d_kv d_ff num_layers num_decoder_layers num_heads
  relative_attention_num_buckets relative_attention_max_distance
  layer_norm_epsilon feed_forward_proj tie_word_embeddings is_encoder_decoder
  scale_decoder_outputs quantization_config dense_act_fn is_gated_act
  dropout_rate classifier_dropout initializer_factor n_positions output_past
  """.split()
)


def check_t5(config: Mapping[str, Any]) -> None:
  """Raises ValueError for unknown keys of a T5."""
  json_files.refuse_unknown(
    config, _HARMLESS | _OF_T5, "settings of a t5 model"
  )


def packing_of(config: Mapping[str, Any]) -> packings.Parsed | None:
  """The packing of the weights, or None.

  Multimodal models have `quantization_config` at the top or in `text_config`.
  """
  text, given = of_text(config), config.get("quantization_config")
  given = text.get("quantization_config") if given is None else given
  if given is None:
    return None
  return packings.read(given, FAMILIES[text["model_type"]].quantized)


def of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The settings of a multimodal model's text model, or of any other model.

  Raises:
    ValueError: if there is no text model, or for an unknown setting.
  """
  outer = config.get("model_type")
  inside = [name for name, f in FAMILIES.items() if outer in [*f.multimodal]]
  if not inside:
    return config
  nested = config.get("text_config")
  if not isinstance(nested, Mapping):
    raise ValueError(f"text_config must be an object, got {nested!r:.80}")
  if nested.get("model_type", inside[0]) != inside[0]:
    raise ValueError(
      f"the text model of a {outer} model must be {inside[0]}, got "
      f"{nested['model_type']!r}"
    )
  json_files.refuse_unknown(
    config, _HARMLESS | _OF_OTHERS, f"settings of a {outer} model"
  )
  settings = dict(FAMILIES[inside[0]].multimodal[outer])
  if (tied := config.get("tie_word_embeddings")) is not None:
    settings["tie_word_embeddings"] = tied  # takes precedence
  return {**nested, **settings, "model_type": inside[0]}


def config_from_json(config: Mapping[str, Any]) -> TransformerConfig:
  """Translates a `config.json` written by transformers 4 or 5.

  Missing keys get transformers' defaults, but the model's sizes are required.

  Raises:
    ValueError: for another type of model, or a missing, malformed, unsupported
      or unknown setting.
  """
  whole, config = config, of_text(config)
  name = config.get("model_type")
  if name not in FAMILIES:
    raise ValueError(
      f"model_type must be one of {sorted(FAMILIES)}, got {name!r}"
    )
  family, given = FAMILIES[name], dict(config)
  given.pop("quantization_config", None)
  packing_of(whole)
  fixed = {**family.fixed, **_FIXED}
  for key, value in fixed.items():
    if given.get(key) not in (None, value):
      raise ValueError(
        f"{key} must be {value!r} in a {name} model, got {given[key]!r:.80}"
      )
  settings = Settings(given, family.defaults)
  described = family.read(settings)
  known = _HARMLESS | family.harmless | {*fixed} | settings.used
  json_files.refuse_unknown(given, known, f"settings of a {name} model")
  return described


def llama_json(
  c: TransformerConfig, dtype: str, eos_token_id: int | None
) -> dict[str, Any]:
  """The `config.json` of a Llama checkpoint.

  Raises:
    ValueError: if Llama's format cannot express the configuration.
  """
  a, mlp = c.attention, c.layers[0].feed_forward
  if a.rope is None or not isinstance(mlp, DenseSpec):
    raise ValueError(
      "Llama's format cannot express layers without rotary embeddings or with "
      "mixtures of experts"
    )
  scaling = a.rope.scaling and {
    "rope_type": "llama3",
    **{key: getattr(a.rope.scaling, key) for key in reading.ROPE_FACTORS},
    reading.ROPE_LENGTH: a.rope.scaling.original_max_positions,
  }
  if a.rope.factors and len({*a.rope.factors}) == 1:
    scaling = {"rope_type": "linear", "factor": a.rope.factors[0]}
  settings = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": c.vocab_size,
    "hidden_size": c.embed_dim,
    "intermediate_size": mlp.width,
    "num_hidden_layers": c.num_layers,
    "num_attention_heads": a.num_heads,
    "num_key_value_heads": a.num_kv_heads,
    "head_dim": a.head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": c.max_positions,
    "rms_norm_eps": c.norm_eps,
    "rope_theta": a.rope.theta,
    "rope_scaling": scaling,
    "attention_bias": a.qkv_bias,
    "mlp_bias": mlp.bias,
    "tie_word_embeddings": c.tied_embeddings,
    "bos_token_id": eos_token_id,
    "eos_token_id": eos_token_id,
    "dtype": dtype,
    "torch_dtype": dtype,  # for transformers 4
  }
  # It can be expressed if it survives the round trip. transformers requires
  # heads that divide the width, even with a head_dim.
  if config_from_json(settings) != c or c.embed_dim % a.num_heads:
    raise ValueError(
      "Llama's format cannot express this model: it needs RMS norms, gated "
      "SiLU MLPs, full rotary attention and one switch for biases"
    )
  return settings
