"""Small models of transformers, and the same models here."""

import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 97
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 14))

LLAMA3 = dict(
  rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=16,
)  # fmt: skip
GATED = dict(
  vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
  num_attention_heads=4, max_position_embeddings=64, bos_token_id=None,
  eos_token_id=None,
)  # fmt: skip
GPT2 = dict(
  vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64,
  bos_token_id=None, eos_token_id=None,
)  # fmt: skip

LATENT = dict(
  kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=6, v_head_dim=10
)
# The last layer is full, whatever is said.
GEMMA4 = [f"{x}_attention" for x in ("sliding", "full", "sliding", "sliding")]


class MiMo(transformers.Qwen2Config):
  """Qwen2's by another name, which transformers does not know."""

  model_type = "mimo"


transformers.AutoConfig.register("mimo", MiMo)
for auto, model in (
  (transformers.AutoModel, transformers.Qwen2Model),
  (transformers.AutoModelForCausalLM, transformers.Qwen2ForCausalLM),
):
  auto.register(MiMo, type("MiMo", (model,), {"config_class": MiMo}))

# Each is (family, settings, how many files it is saved in).
MODELS = {
  "gpt2": ("gpt2", GPT2, 1),
  "neox": ("gpt_neox", GATED | dict(
    rope_parameters=dict(partial_rotary_factor=0.5),
  ), 1),
  "neox-serial": ("gpt_neox", GATED | dict(
    use_parallel_residual=False, tie_word_embeddings=True, attention_bias=False,
    hidden_act="gelu_fast",
    rope_parameters=dict(partial_rotary_factor=1.0, rope_theta=100.0),
  ), 3),
  "llama-grouped": ("llama", GATED | dict(num_key_value_heads=2), 3),
  "llama-scaled": ("llama", GATED | dict(
    tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=12,
    rope_parameters=dict(LLAMA3, rope_theta=1000.0),
    hidden_act="gelu_pytorch_tanh",
  ), 1),
  "mistral-window": ("mistral", GATED | dict(
    num_key_value_heads=2, head_dim=16, sliding_window=3,
  ), 1),
  "qwen2": ("qwen2", GATED | dict(
    num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-3,
  ), 1),
  "qwen2-mixed": ("qwen2", GATED | dict(
    num_key_value_heads=4, use_sliding_window=True, sliding_window=4,
    max_window_layers=0, layer_types=["sliding_attention", "full_attention"],
  ), 1),
  "qwen3": ("qwen3", GATED | dict(
    num_key_value_heads=2, head_dim=16, attention_bias=True,
  ), 1),
  "mimo": ("mimo", GATED | dict(
    num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-3, attention_bias=True,
    num_nextn_predict_layers=1,
  ), 1),
  "gemma2": ("gemma2", GATED | dict(
    num_hidden_layers=3, num_key_value_heads=2, head_dim=12,
    attention_bias=True, query_pre_attn_scalar=20, sliding_window=4,
    attn_logit_softcapping=1.5, final_logit_softcapping=3.0,
    hidden_activation="gelu", rms_norm_eps=1e-3,
    rope_parameters=dict(rope_theta=500.0),
  ), 1),
  "gemma3": ("gemma3_text", GATED | dict(
    num_hidden_layers=3, num_key_value_heads=1, head_dim=16,
    query_pre_attn_scalar=9, sliding_window=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters=dict(
      full_attention=dict(rope_type="linear", factor=4.0, rope_theta=3000.0),
      sliding_attention=dict(rope_type="default", rope_theta=80.0),
    ),
    attn_logit_softcapping=2.0, final_logit_softcapping=4.0,
    tie_word_embeddings=False,
  ), 1),
  "gemma4": ("gemma4_text", GATED | dict(
    num_hidden_layers=4, num_key_value_heads=2, head_dim=8, global_head_dim=12,
    layer_types=GEMMA4, sliding_window=4, num_kv_shared_layers=2,
    use_double_wide_mlp=True, hidden_size_per_layer_input=6,
    vocab_size_per_layer_input=VOCAB, final_logit_softcapping=3.0,
    attention_bias=True, pad_token_id=None,
    rope_parameters=dict(
      full_attention=dict(
        rope_type="proportional", partial_rotary_factor=0.5, rope_theta=700.0,
      ),
      sliding_attention=dict(rope_type="default", rope_theta=80.0),
    ),
  ), 1),
  "gemma4-moe": ("gemma4_text", GATED | dict(
    num_hidden_layers=3, num_key_value_heads=4, head_dim=8, global_head_dim=12,
    num_global_key_value_heads=2, attention_k_eq_v=True, layer_types=GEMMA4[:3],
    sliding_window=3, hidden_size_per_layer_input=0, enable_moe_block=True,
    num_experts=6, top_k_experts=2, moe_intermediate_size=20,
    hidden_activation="gelu", rms_norm_eps=1e-3, tie_word_embeddings=False,
    pad_token_id=None,
  ), 1),
  "olmo2": ("olmo2", GATED | dict(
    num_key_value_heads=2, attention_bias=True, tie_word_embeddings=True,
    hidden_act="gelu", rms_norm_eps=1e-3,
    rope_parameters=dict(rope_theta=800.0),
  ), 1),
  "olmo3": ("olmo3", GATED | dict(
    num_hidden_layers=4, num_key_value_heads=2, sliding_window=4,
    rope_parameters=dict(
      full_attention=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16,
        beta_fast=4.0, beta_slow=1.0, attention_factor=1.2, rope_theta=500.0,
      ),
      sliding_attention=dict(rope_type="default", rope_theta=500.0),
    ),
  ), 3),
  "mixtral": ("mixtral", GATED | dict(
    num_key_value_heads=2, head_dim=12, intermediate_size=20,
    num_local_experts=5, num_experts_per_tok=2, sliding_window=5,
    hidden_act="gelu", rope_parameters=dict(rope_theta=700.0),
  ), 1),
  "qwen2-moe": ("qwen2_moe", GATED | dict(
    num_hidden_layers=3, num_key_value_heads=2, moe_intermediate_size=20,
    shared_expert_intermediate_size=28, num_experts=6, num_experts_per_tok=3,
    hidden_act="gelu", rms_norm_eps=1e-3,
  ), 1),
  "qwen3-moe": ("qwen3_moe", GATED | dict(
    num_hidden_layers=3, num_key_value_heads=2, head_dim=16,
    moe_intermediate_size=20, num_experts=6, num_experts_per_tok=3,
    norm_topk_prob=True, attention_bias=True, hidden_act="relu",
  ), 1),
  "glm-moe": ("glm4_moe", GATED | dict(
    num_hidden_layers=3, num_key_value_heads=2, head_dim=12,
    moe_intermediate_size=20, n_routed_experts=8, n_shared_experts=2,
    num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=1.7,
    first_k_dense_replace=2, attention_bias=True, use_qk_norm=True,
    rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.5),
  ), 1),
  "deepseek": ("deepseek_v3", GATED | dict(
    num_hidden_layers=2, num_key_value_heads=4, moe_intermediate_size=20,
    n_routed_experts=6, num_experts_per_tok=2, n_group=3, topk_group=2,
    routed_scaling_factor=1.3, first_k_dense_replace=1, norm_topk_prob=False,
    attention_bias=True, **LATENT, q_lora_rank=14, rms_norm_eps=1e-3,
    rope_parameters=dict(
      rope_type="yarn", factor=4.0, original_max_position_embeddings=16,
      mscale=0.7, mscale_all_dim=0.9, rope_theta=500.0,
    ),
  ), 1),
  "glm-lite": ("glm4_moe_lite", GATED | dict(
    num_key_value_heads=4, moe_intermediate_size=20, n_routed_experts=6,
    num_experts_per_tok=2, mlp_layer_types=["sparse", "dense"],
    rope_interleave=False, tie_word_embeddings=True, **LATENT, q_lora_rank=None,
  ), 1),
  "olmoe": ("olmoe", GATED | dict(
    num_key_value_heads=2, intermediate_size=20, num_experts=6,
    num_experts_per_tok=2, clip_qkv=0.7, attention_bias=True,
    tie_word_embeddings=True,
  ), 3),
  "gpt-oss": ("gpt_oss", GATED | dict(
    num_hidden_layers=3, num_key_value_heads=2, head_dim=16,
    intermediate_size=20, num_local_experts=5, num_experts_per_tok=3,
    sliding_window=4, swiglu_limit=0.3, swiglu_alpha=1.1,
    rope_parameters=dict(
      rope_type="yarn", factor=4.0, original_max_position_embeddings=16,
      beta_fast=4.0, beta_slow=1.0, truncate=False, rope_theta=500.0,
    ),
  ), 1),
  "qwen3-next": ("qwen3_next", GATED | dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_key_value_heads=2, head_dim=16, attention_bias=True,
    rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.5),
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
    linear_value_head_dim=10, linear_conv_kernel_dim=3,
    hidden_act="gelu",  # of the convolution too
    moe_intermediate_size=20, shared_expert_intermediate_size=12, num_experts=5,
    num_experts_per_tok=2,
  ), 3),
  "qwen3-5-moe": ("qwen3_5_moe_text", GATED | dict(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
    num_key_value_heads=2, head_dim=16,
    rope_parameters=dict(rope_theta=500.0, partial_rotary_factor=0.5),
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
    linear_value_head_dim=10, moe_intermediate_size=20,
    shared_expert_intermediate_size=12, num_experts=5, num_experts_per_tok=2,
  ), 1),
  "qwen3-5": ("qwen3_5_text", GATED | dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    rope_parameters=dict(
      rope_theta=500.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 0],
      mrope_interleaved=True,
    ),
    linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8,
    linear_value_head_dim=5,
  ), 1),
}  # fmt: skip


# That files hold.
BUFFERS = ("e_score_correction_bias", "layer_scalar")


def make_config(family, settings):
  settings = json.loads(json.dumps(settings))
  return transformers.AutoConfig.for_model(**settings | {"model_type": family})


def make(family, settings, *, seed=0):
  """A model none of whose parameters could be left out unnoticed."""
  model = transformers.AutoModelForCausalLM.from_config(
    make_config(family, settings), attn_implementation="eager"
  )
  return eager(randomized(model, seed=seed))


def randomized(model, *, seed):
  """The model with others, of which none is zero or one: buffers too."""
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      is_scale = parameter.ndim == 1 and name.endswith("weight")
      parameter.copy_(1 + 0.3 * noise if is_scale else 0.2 * noise)
    for name, buffer in model.named_buffers():
      if name.endswith(BUFFERS):
        noise = torch.randn(buffer.shape, generator=generator)
        buffer.copy_(0.5 + 0.3 * noise)
  return model


def eager(model):
  """Eager attention and experts: other implementations lack some types."""
  model.config._experts_implementation = "eager"
  return model.eval()


def read(path, **options):
  loaded = transformers.AutoModelForCausalLM.from_pretrained(
    path, attn_implementation="eager", **options
  )
  return loaded if isinstance(loaded, tuple) else eager(loaded)


def read_gguf(path):
  """A GGUF file, as transformers reads it.

  It asks for accelerate, and does without it on one CPU.
  """
  with mock.patch.object(
    transformers.modeling_utils, "is_accelerate_available", return_value=True
  ):
    return read(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def logits(model, tokens):
  with torch.no_grad():
    return model(torch.tensor(tokens), use_cache=False).logits.float().numpy()


def generated(model, prompt, *, count):
  """The prompt `i[T]` and as many tokens, greedily, in NumPy."""
  prompt = torch.tensor(prompt)[None]
  made = model.generate(
    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count,
    do_sample=False, eos_token_id=None, pad_token_id=0,
  )  # fmt: skip
  return made[0].numpy()


def relative_error(actual, expected):
  return np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()


def module_logits(module, tokens=TOKENS):
  """`f32[B, T, V]` of whole sequences, without a cache."""
  graphdef, state = nnx.split(module)
  forward = lambda state, x: nnx.merge(graphdef, state)(x)[0].logits
  return np.asarray(jax.jit(forward)(state, jnp.asarray(tokens)))


def fuse_experts(tensors):
  """Makes one tensor of all experts' gates and values, one of the rest."""
  every = [name for name in tensors if ".experts.0.up_proj" in name]
  for stem in [name.split(".0.up_proj")[0] for name in every]:
    count = len([name for name in tensors if name.startswith(stem)]) // 3
    take = lambda name, stem=stem, count=count: [
      tensors.pop(f"{stem}.{i}.{name}_proj.weight") for i in range(count)
    ]
    gates, ups, downs = take("gate"), take("up"), take("down")
    both = zip(gates, ups, strict=True)
    tensors[f"{stem}.gate_up_proj"] = np.stack(
      [np.concatenate(pair) for pair in both]
    )
    tensors[f"{stem}.down_proj"] = np.stack(downs)


def near(params, *, seed):
  """Parameters of a draft: the target's, a little off."""
  leaves, shape = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  noisy = [
    x * (1 + 0.1 * rng.standard_normal(x.shape)).astype(x.dtype) for x in leaves
  ]
  return jax.tree.unflatten(shape, noisy)


def edit_config(path, **changes):
  file = path / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(path, edit):
  """Changes what a checkpoint of one file holds."""
  file = path / "model.safetensors"
  tensors = load_file(file)
  edit(tensors)
  save_file(tensors, file)
