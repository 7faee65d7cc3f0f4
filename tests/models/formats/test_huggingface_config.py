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
  for name in ("relu", "gelu", "gelu_new", "silu"):
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


@pytest.mark.parametrize(
  ("family", "changes", "message"),
  [
    ("bert", {}, "model_type must be one of .*'llama'.*got 'bert'"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be"),
    ("gpt2", {"activation_function": "mish"}, "activation must be .*'mish'"),
    ("gpt2", {"hidden_size": 32}, "not known: hidden_size"),
    ("llama", {"hidden_size": "32"}, "hidden_size must be an integer >= 1"),
    ("llama", {"vocab_size": True}, "vocab_size must be an integer"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
    ("llama", {"num_key_value_heads": 3}, "num_kv_heads must divide"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"rope_scaling": {"type": "axial"}}, "rope_type must be one of"),
    ("llama", {"rope_parameters": {"mrope_section": [1]}}, "mrope_section"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "'full_attention'"),
    ("qwen2", {"layer_types": ["full_attention"]}, "must be 2 entries"),
  ],
)
def test_settings_that_are_not_supported_are_errors(family, changes, message):
  sizes = GPT2_SIZES if family == "gpt2" else SIZES
  settings = sizes | dict(num_key_value_heads=4) | changes
  with pytest.raises(ValueError, match=message):
    huggingface.config_from_json(dict(settings, model_type=family))
