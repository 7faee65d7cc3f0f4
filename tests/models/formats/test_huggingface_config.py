"""`config.json` in its spellings, and what is not supported."""

import pytest
import references
from references import GATED, GPT2, LLAMA3

from models.formats import huggingface

SIZES = {k: v for k, v in GATED.items() if not k.endswith("token_id")}
GPT2_SIZES = {k: v for k, v in GPT2.items() if not k.endswith("token_id")}


@pytest.mark.parametrize(
  ("family", "settings"),
  [
    ("gpt2", GPT2_SIZES),
    ("gpt_neox", SIZES),
    ("llama", SIZES),
    ("qwen3", SIZES | dict(num_attention_heads=32)),
    ("qwen2", SIZES | dict(num_key_value_heads=None, use_sliding_window=True)),
    ("qwen3", SIZES | dict(num_key_value_heads=2, use_sliding_window=True,
      max_window_layers=1, sliding_window=8)),
    ("gpt_neox", SIZES | dict(rotary_pct=0.5, rotary_emb_base=5000)),
    ("llama", SIZES | dict(rope_theta=5e5, rope_scaling=None, head_dim=None)),
    ("llama", SIZES | dict(rope_theta=5e5, rope_scaling={
      k if k != "rope_type" else "type": v for k, v in LLAMA3.items()
      if k != "original_max_position_embeddings"})),
    ("qwen3", SIZES | dict(num_key_value_heads=4, rope_theta=1e6)),
  ],
)  # fmt: skip
def test_legacy_and_partial_configs_parse_like_transformers(family, settings):
  newest = references.make_config(family, settings).to_dict()
  assert "rope_theta" not in newest
  assert huggingface.config_from_json(
    dict(settings, model_type=family)
  ) == huggingface.config_from_json(newest)


@pytest.mark.parametrize(
  ("family", "changes", "message"),
  [
    ("bert", {}, "model_type must be one of .*'llama'.*got 'bert'"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be"),
    ("gpt2", {"hidden_size": 32}, "model: hidden_size"),
    ("llama", {"hidden_size": "32"}, "hidden_size must be an integer >= 1"),
    ("llama", {"num_key_value_heads": 3}, "num_kv_heads must divide"),
    ("llama", {"rope_scaling": {"type": "axial"}}, "rope_type must be one of"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "'full_attention'"),
  ],
)
def test_unsupported_settings_are_rejected(family, changes, message):
  sizes = GPT2_SIZES if family == "gpt2" else SIZES
  settings = sizes | dict(num_key_value_heads=4) | changes
  with pytest.raises(ValueError, match=message):
    huggingface.config_from_json(dict(settings, model_type=family))
