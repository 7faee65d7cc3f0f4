"""`config.json` in its spellings, and what is not supported."""

import described
import jax.numpy as jnp
import numpy as np
import pytest
import references
import torch
from flax import nnx
from references import GATED, GPT2, LLAMA3
from transformers.activations import ACT2FN

from models.formats import huggingface
from models.networks import layers

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


def test_activations_are_those_of_transformers():
  x = np.linspace(-4, 4, 41, dtype=np.float32)
  for name in ("relu", "quick_gelu", "gelu", "gelu_new", "silu", "swish"):
    settings = dict(SIZES, model_type="llama", hidden_act=name)
    mlp = layers.Mlp(
      described.alter(
        huggingface.config_from_json(settings), gated=False, embed_dim=1,
        width=1,
      ), jnp.float32, rngs=nnx.Rngs(0),
    )  # fmt: skip
    for part in (mlp.up, mlp.down):
      part.weight[...] = jnp.ones((1, 1))
    wanted = ACT2FN[name](torch.tensor(x))
    np.testing.assert_allclose(mlp(x[:, None])[:, 0], wanted, atol=1e-6)


def test_what_transformers_calls_gpt2s_sizes_is_read_too():
  renamed = dict(GPT2_SIZES, model_type="gpt2")
  names = dict(
    n_embd="hidden_size", n_layer="num_hidden_layers",
    n_head="num_attention_heads", n_positions="max_position_embeddings",
  )  # fmt: skip
  aliases = {names.get(k, k): v for k, v in renamed.items()}
  assert {*names} <= {*renamed}
  assert huggingface.config_from_json(aliases) == (
    huggingface.config_from_json(renamed)
  )


@pytest.mark.parametrize("window", [None, 4096])
def test_a_window_that_no_llama_reads_says_nothing(window):
  plain = dict(SIZES, model_type="llama")
  named = plain | {"sliding_window": window, "use_sliding_window": False}
  named["layer_types"] = None
  assert huggingface.config_from_json(named) == (
    huggingface.config_from_json(plain)
  )


@pytest.mark.parametrize(
  ("family", "changes", "message"),
  [
    ("bert", {}, "model_type must be one of .*'llama'.*got 'bert'"),
    (None, {}, "model_type must be one of .* got None"),
    (["llama"], {}, "model_type must be one of"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be"),
    ("gpt2", {"activation_function": "mish"}, "one of .*'gelu_new'.*'mish'"),
    (
      "gpt2",
      {"hidden_size": 64},
      "n_embd is 32, and hidden_size, its al",
    ),
    ("gpt2", {"n_embd": None}, "n_embd must be an integer >= 1, got None"),
    ("gpt2", {"n_head": 5}, "n_head must divide n_embd, got 5 and 32"),
    ("gpt_neox", {"rotary_pct": 2.0}, "must be in 0.12..1, got 2.0"),
    ("gpt_neox", {"hidden_act": "laplace"}, "got 'laplace'"),
    ("gpt_neox", {"attention_bias": "yes"}, "true or false, got 'yes'"),
    ("llama", {"hidden_act": "relu2"}, "hidden_act must be one of .*'relu2'"),
    ("llama", {"hidden_size": "32"}, "hidden_size must be an integer >= 1"),
    ("llama", {"vocab_size": True}, "vocab_size must be an integer"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
    ("llama", {"num_key_value_heads": 3}, "num_kv_heads must divide"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved must be False"),
    ("llama", {"use_sliding_window": True}, "use_sliding_window must be False"),
    ("llama", {"layer_types": ["sliding_attention"]}, "no layer of a llama"),
    ("llama", {"partial_rotary_factor": 0.5}, "must be 1 in this family"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    ("llama", {"rope_scaling": {"factor": 2.0}}, "factor of 2.0"),
    (
      "llama",
      {"rope_scaling": {"type": "longrope", "factor": 2.0}},
      "short_factor must be 4 numbers, one for each pair .* got None",
    ),
    (
      "llama",
      {"rope_scaling": {"type": "axial", "factor": 2.0}},
      "rope_type must be one of .*'yarn'., got 'axial'",
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
      {"rope_parameters": {"rope_type": "yarn", "factor": -4.0}},
      "factor must be a positive number, got -4.0",
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
