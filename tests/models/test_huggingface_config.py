"""`config.json` in its spellings, and what is not supported."""

import pytest
import references
from references import GATED, GPT2, LLAMA3

from models import huggingface
from models.layers import RopeScaling

SIZES = {k: v for k, v in GATED.items() if not k.endswith("token_id")}
GPT2_SIZES = {k: v for k, v in GPT2.items() if not k.endswith("token_id")}


@pytest.mark.parametrize(
  ("family", "settings"),
  [
    ("gpt2", GPT2_SIZES),
    ("gpt_neox", SIZES),
    ("llama", SIZES),
    ("mistral", SIZES | dict(num_attention_heads=16)),
    ("qwen2", SIZES | dict(num_attention_heads=32)),
    ("qwen3", SIZES | dict(num_attention_heads=32)),
    ("qwen2", SIZES | dict(num_key_value_heads=None, use_sliding_window=True)),
    ("qwen3", SIZES | dict(num_key_value_heads=2, use_sliding_window=True,
      max_window_layers=1, sliding_window=8)),
    ("gpt_neox", SIZES | dict(rotary_pct=0.5, rotary_emb_base=5000)),
    ("llama", SIZES | dict(rope_theta=5e5, rope_scaling=None, head_dim=None)),
    ("llama", SIZES | dict(rope_theta=5e5, rope_scaling=LLAMA3)),
    ("llama", SIZES | dict(rope_theta=5e5, rope_scaling={
      k if k != "rope_type" else "type": v for k, v in LLAMA3.items()
      if k != "original_max_position_embeddings"})),
    ("mistral", SIZES | dict(num_key_value_heads=2, rope_theta=1e6)),
    ("qwen3", SIZES | dict(num_key_value_heads=4, rope_theta=1e6)),
  ],
)  # fmt: skip
def test_older_and_shorter_configurations_mean_what_transformers_reads(
  family, settings
):
  newest = references.make_config(family, settings).to_dict()
  assert "rope_theta" not in newest
  assert huggingface.config_from_json(
    dict(settings, model_type=family)
  ) == huggingface.config_from_json(newest)


def test_llama3_scaling_is_read_in_both_spellings():
  old = dict(SIZES, model_type="llama", rope_theta=5e5, rope_scaling=LLAMA3)
  new = dict(SIZES, model_type="llama")
  new["rope_parameters"] = LLAMA3 | dict(rope_theta=500000)
  for settings in (old, new):
    config = huggingface.config_from_json(settings)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(
      factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
      original_max_positions=16,
    )  # fmt: skip


@pytest.mark.parametrize(
  ("family", "changes", "message"),
  [
    ("bert", {}, "model_type must be one of .*'llama'.*got 'bert'"),
    (None, {}, "model_type must be one of .* got None"),
    (["llama"], {}, "model_type must be one of"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "must be False in a"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights must be True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be"),
    ("gpt2", {"activation_function": "relu"}, "one of .*'gelu_new'.*'relu'"),
    ("gpt2", {"n_embd": None}, "n_embd must be an integer >= 1, got None"),
    ("gpt2", {"n_head": 5}, "n_head must divide n_embd, got 5 and 32"),
    ("gpt_neox", {"rotary_pct": 2.0}, "at most 1, got 2.0"),
    ("gpt_neox", {"hidden_act": "quick_gelu"}, "got 'quick_gelu'"),
    ("gpt_neox", {"attention_bias": "yes"}, "true or false, got 'yes'"),
    ("llama", {"hidden_act": "relu"}, "hidden_act must be one of .*'relu'"),
    ("llama", {"hidden_size": "32"}, "hidden_size must be an integer >= 1"),
    ("llama", {"vocab_size": True}, "vocab_size must be an integer"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
    ("llama", {"num_key_value_heads": 3}, "num_kv_heads must divide"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved must be False"),
    ("llama", {"sliding_window": 8}, "sliding_window must be None"),
    ("llama", {"partial_rotary_factor": 0.5}, "must be 1 in a llama model"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    ("llama", {"rope_scaling": {"factor": 2.0}}, "factor of 2.0"),
    (
      "llama",
      {"rope_scaling": {"type": "linear", "factor": 2.0}},
      "rope_type must be 'default' or 'llama3', got 'linear'",
    ),
    (
      "llama",
      {"rope_parameters": {"rope_type": "default", "mrope_section": [1]}},
      r"got \['mrope_section'\]",
    ),
    (
      "llama",
      {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e5},
      "rope_theta is both 500000.0 and 10000.0",
    ),
    (
      "llama",
      {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
      "low_freq_factor must be a positive number, got None",
    ),
    (
      "llama",
      {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
      "low_freq_factor must be below high_freq_factor",
    ),
    (
      "qwen3",
      {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
      "rope_type must be 'default' or 'llama3', got 'yarn'",
    ),
    ("qwen2", {"use_mrope": True}, "use_mrope must be False"),
    (
      "qwen2",
      {"layer_types": ["sliding_attention"] * 2},
      "entries, each one of .'full_attention'. .the sliding window is None",
    ),
    ("qwen2", {"layer_types": ["full_attention"]}, "must be 2 entries"),
    ("qwen3", {"layer_types": ["chunked", "chunked"]}, "got .'chunked'"),
    (
      "mistral",
      {"layer_types": ["full_attention", "sliding_attention"]},
      "each one of .'sliding_attention'. ",
    ),
  ],
)
def test_settings_that_are_not_supported_are_errors(family, changes, message):
  sizes = GPT2_SIZES if family == "gpt2" else SIZES
  settings = sizes | dict(num_key_value_heads=4) | changes
  with pytest.raises(ValueError, match=message):
    huggingface.config_from_json(dict(settings, model_type=family))
