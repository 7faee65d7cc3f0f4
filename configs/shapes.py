"""Shapes of published models by name, from their `config.json`.

Only settings that affect shapes and logits are kept; see each model's page on
the Hub for the full file. `python -m launch.plan` takes these names or any
`config.json`.
"""

from typing import Any


def _pythia(hidden: int, layers: int, heads: int) -> dict[str, Any]:
  return dict(
    model_type="gpt_neox", vocab_size=50304, hidden_size=hidden,
    num_hidden_layers=layers, num_attention_heads=heads,
    intermediate_size=4 * hidden, max_position_embeddings=2048,
    rotary_pct=0.25, rotary_emb_base=10000, hidden_act="gelu",
    layer_norm_eps=1e-5, use_parallel_residual=True, tie_word_embeddings=False,
  )  # fmt: skip


def _llama(
  hidden: int, layers: int, heads: int, mlp: int, *, factor: float, **changes
) -> dict[str, Any]:
  return dict(
    model_type="llama", vocab_size=128256, hidden_size=hidden,
    num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
    intermediate_size=mlp, max_position_embeddings=131072, hidden_act="silu",
    rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
    rope_scaling=dict(
      rope_type="llama3", factor=factor, low_freq_factor=1.0,
      high_freq_factor=4.0, original_max_position_embeddings=8192,
    ),
  ) | changes  # fmt: skip


def _qwen3(
  hidden: int, layers: int, heads: int, mlp: int, *, tied: bool
) -> dict[str, Any]:
  return dict(
    model_type="qwen3", vocab_size=151936, hidden_size=hidden,
    num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
    head_dim=128, intermediate_size=mlp, max_position_embeddings=40960,
    hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1000000.0,
    tie_word_embeddings=tied,
  )  # fmt: skip


def _t5(embed: int, layers: int, heads: int, mlp: int) -> dict[str, Any]:
  """T5 1.1, the family of Leviathan et al. (2023)."""
  return dict(
    model_type="t5", vocab_size=32128, d_model=embed, d_kv=64, d_ff=mlp,
    num_layers=layers, num_heads=heads, feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
  )  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
  "pythia-70m": _pythia(512, 6, 8),
  "pythia-2.8b": _pythia(2560, 32, 32),
  "llama-3.2-1b": _llama(
    2048, 16, 32, 8192, factor=32.0, head_dim=64, tie_word_embeddings=True
  ),
  "smollm2-135m": _llama(
    576, 30, 9, 1536, factor=1.0, vocab_size=49152, num_key_value_heads=3,
    max_position_embeddings=8192, rope_theta=100000.0, rope_scaling=None,
    tie_word_embeddings=True,
  ),
  "llama-3.1-8b": _llama(4096, 32, 32, 14336, factor=8.0),
  "llama-3.1-70b": _llama(8192, 80, 64, 28672, factor=8.0),
  "llama-3.1-405b": _llama(16384, 126, 128, 53248, factor=8.0),
  "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
  "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
}  # fmt: skip


def _mixture(model_type: str, hidden: int, layers: int, heads: int, **changes):
  return dict(
    model_type=model_type, hidden_size=hidden, num_hidden_layers=layers,
    num_attention_heads=heads, tie_word_embeddings=False,
  ) | changes  # fmt: skip


SHAPES |= {
  "gemma-3-12b": dict(
    model_type="gemma3_text", vocab_size=262208, hidden_size=3840,
    num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8,
    head_dim=256, intermediate_size=15360, query_pre_attn_scalar=256,
    sliding_window=1024, max_position_embeddings=131072,
    rope_scaling=dict(rope_type="linear", factor=8.0),
  ),
  "deepseek-v3": _mixture(
    "deepseek_v3", 7168, 61, 128, vocab_size=129280, num_key_value_heads=128,
    intermediate_size=18432, max_position_embeddings=163840,
    first_k_dense_replace=3, moe_intermediate_size=2048, n_routed_experts=256,
    n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4,
    routed_scaling_factor=2.5, q_lora_rank=1536, kv_lora_rank=512,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    rope_scaling=dict(
      rope_type="yarn", factor=40.0, original_max_position_embeddings=4096,
      beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    ),
  ),
  "qwen3-30b-a3b": _mixture(
    "qwen3_moe", 2048, 48, 32, vocab_size=151936, num_key_value_heads=4,
    head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
    num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    max_position_embeddings=40960, rope_theta=1000000.0, rms_norm_eps=1e-6,
  ),
  # The defaults of transformers' configuration class.
  "qwen3.5-9b": dict(
    model_type="qwen3_5_text", vocab_size=248320, hidden_size=4096,
    num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4,
    head_dim=256, intermediate_size=12288, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, max_position_embeddings=32768,
  ),
  "qwen3.5-27b": dict(
    model_type="qwen3_5_text", vocab_size=248320, hidden_size=5120,
    num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
    head_dim=256, intermediate_size=17408, linear_num_key_heads=16,
    linear_num_value_heads=48, linear_key_head_dim=128,
    linear_value_head_dim=128, max_position_embeddings=262144,
    rope_parameters=dict(
      rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25
    ),
  ),
  "gpt-oss-20b": _mixture(
    "gpt_oss", 2880, 24, 64, vocab_size=201088, num_key_value_heads=8,
    head_dim=64, intermediate_size=2880, num_local_experts=32,
    num_experts_per_tok=4, sliding_window=128, max_position_embeddings=131072,
    rope_theta=150000.0,
  ),
}  # fmt: skip


def _eagle3(hidden: int, heads: int, mlp: int) -> dict[str, Any]:
  return dict(
    model_type="llama", vocab_size=128256, hidden_size=hidden,
    num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=8,
    intermediate_size=mlp, max_position_embeddings=2048, hidden_act="silu",
    rms_norm_eps=1e-5, tie_word_embeddings=False, draft_vocab_size=32000,
  )  # fmt: skip


# Draft heads: EAGLE-3 for Llama-3.1-8B as published and, for the larger model,
# with one layer like the target's; four Medusa heads with their target's
# sizes; and DFlash for Qwen3-8B as published: five layers like the target's
# that predict fifteen tokens in one pass.
HEADS: dict[str, dict[str, Any]] = {
  "eagle3-llama-3.1-8b": _eagle3(4096, 32, 14336),
  "eagle3-llama-3.1-70b": _eagle3(8192, 64, 28672),
  "medusa-llama-3.1-8b": dict(
    model_type="medusa", medusa_num_heads=4, medusa_num_layers=1
  ),
  "dflash-qwen3-8b": _qwen3(4096, 5, 32, 12288, tied=False) | dict(
    block_size=16, num_target_layers=36,
    dflash_config=dict(
      mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]
    ),
  ),
}  # fmt: skip

# Encoder-decoders.
T5_SHAPES: dict[str, dict[str, Any]] = {
  "t5-1.1-small": _t5(512, 8, 6, 1024),
  "t5-1.1-base": _t5(768, 12, 12, 2048),
  "t5-1.1-large": _t5(1024, 24, 16, 2816),
  "t5-1.1-xxl": _t5(4096, 24, 64, 10240),
}
