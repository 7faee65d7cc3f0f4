"""GGUF files that tests write, as llama.cpp's converter writes them."""

import json

import gguf
import numpy as np
import transformers
from gguf import GGMLQuantizationType as Kind

from models import tokenizers

ARCHITECTURES = {
  "mistral": "llama",
  "mixtral": "llama",
  "gemma3_text": "gemma3",
  "gemma4_text": "gemma4",
  "gpt_oss": "gpt-oss",
  "qwen2_moe": "qwen2moe",
  "qwen3_moe": "qwen3moe",
}


def write(
  path,
  model,
  *,
  kinds=lambda name, shape: Kind.F32,
  metadata=(),
  edit=None,
  **options,
):
  """Writes a model of transformers.

  Args:
    path: of the file.
    model: of the library, with float32 parameters.
    kinds: the type of each tensor, given its name and shape.
    metadata: more of it, as `(method, *arguments)` of the writer each.
    edit: changes the tensors, a dict by llama.cpp's names.
    options: of the writer.
  """
  arch = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
  writer = gguf.GGUFWriter(str(path), arch, **options)
  for method, *arguments in [*_settings(model.config), *metadata]:
    getattr(writer, method)(*arguments)
  tensors = _tensors(model, arch)
  if edit:
    edit(tensors)
  for name, array in tensors.items():
    kind = kinds(name, array.shape)
    array = np.ascontiguousarray(array)
    if kind == Kind.F32:
      writer.add_tensor(name, array)
    else:
      writer.add_tensor(name, quantized(array, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def write_directory(path, directory, **options):
  """Writes a directory's model and tokenizer; `options` of `write`."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype="float32"
  )
  tokenizer = tokenizers.load(directory)
  vocab = tokenizer.vocabulary()
  tokens = sorted(vocab, key=vocab.get)
  merges = json.loads(tokenizer.backend.to_str())["model"]["merges"]
  special = tokenizer.special_tokens()
  metadata = [
    ("add_tokenizer_model", "gpt2"),
    ("add_tokenizer_pre", "gpt-2"),
    ("add_token_list", tokens),
    ("add_token_merges", [" ".join(merge) for merge in merges]),
    ("add_token_types", [3 if t in special else 1 for t in tokens]),
    ("add_eos_token_id", tokenizer.eos_token_id),
    ("add_unk_token_id", tokenizer.eos_token_id),
  ]
  return write(path, model, metadata=metadata, **options)


def quantized(array, kind):
  """Blocks of a type; of what the package cannot quantize, random ones."""
  try:
    return gguf.quants.quantize(array.astype(np.float32), kind)
  except NotImplementedError:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(array.shape[0])
    shape = (*array.shape[:-1], array.shape[-1] // block, size)
    blocks = generator.integers(0, 256, shape, np.uint8)
    for start in SCALES.get(kind, ()):  # halves, that are to be small numbers
      scale = generator.uniform(0.001, 0.01, shape[:-1]).astype(np.float16)
      blocks[..., start : start + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-2], -1)


# Where the float16 scales of a block begin.
SCALES = {
  Kind.Q2_K: (80, 82),
  Kind.Q3_K: (108,),
  Kind.Q4_K: (0, 2),
  Kind.Q5_K: (0, 2),
  Kind.Q6_K: (208,),
}


def names(count):
  """A vocabulary of so many tokens: what transformers takes its size from."""
  return [
    ("add_tokenizer_model", "gpt2"),
    ("add_token_list", [f"t{i}" for i in range(count)]),
  ]


def _settings(c):
  """The metadata of a model, as calls of the writer."""
  if c.model_type == "gemma4_text":
    yield from _gemma4(c)
    return
  heads = c.num_attention_heads
  yield "add_context_length", c.max_position_embeddings
  yield "add_embedding_length", c.hidden_size
  yield "add_block_count", c.num_hidden_layers
  yield "add_feed_forward_length", c.intermediate_size
  yield "add_head_count", heads
  arch = ARCHITECTURES.get(c.model_type, c.model_type)
  gemma = c.model_type.startswith("gemma")
  rope = c.rope_parameters
  rope = rope.get("full_attention", rope)
  yield "add_head_count_kv", c.num_key_value_heads
  if c.model_type == "gpt_oss":
    yield "add_expert_count", c.num_local_experts
    yield "add_expert_used_count", c.num_experts_per_tok
    yield "add_expert_feed_forward_length", c.intermediate_size
    yield "add_sliding_window", c.sliding_window
    yield "add_rope_scaling_type", gguf.RopeScalingType.YARN
    yield "add_rope_scaling_factor", rope["factor"]
    yield (
      "add_rope_scaling_orig_ctx_len",
      rope["original_max_position_embeddings"],
    )
  if hasattr(c, "num_experts") and c.model_type != "gpt_oss":
    yield "add_expert_count", c.num_experts
    yield "add_expert_used_count", c.num_experts_per_tok
  if c.model_type in ("qwen2_moe", "qwen3_moe"):
    yield "add_expert_feed_forward_length", c.moe_intermediate_size
  if c.model_type == "qwen2_moe":
    shared = c.shared_expert_intermediate_size
    yield "add_expert_shared_feed_forward_length", shared
  if c.model_type != "gemma2":
    yield "add_rope_freq_base", rope["rope_theta"]
  if gemma:
    yield "add_sliding_window", c.sliding_window
    if c.model_type == "gemma2":
      yield "add_attn_logit_softcapping", c.attn_logit_softcapping
    yield "add_final_logit_softcapping", c.final_logit_softcapping
    if c.model_type == "gemma3_text":
      local = c.rope_parameters["sliding_attention"]["rope_theta"]
      yield "add_float32", "gemma3.rope.freq_base_swa", local
    if rope["rope_type"] == "linear":
      yield "add_rope_scaling_type", gguf.RopeScalingType.LINEAR
      yield "add_rope_scaling_factor", rope["factor"]
  yield "add_layer_norm_rms_eps", c.rms_norm_eps
  size = getattr(c, "head_dim", None) or c.hidden_size // heads
  wider = size * heads != c.hidden_size or c.model_type == "qwen3" or gemma
  if wider:
    yield "add_key_length", size
    yield "add_value_length", size
  if arch == "llama":
    yield "add_vocab_size", c.vocab_size
    yield "add_rope_dimension_count", size
  if c.model_type in ("mistral", "mixtral") and c.sliding_window:
    yield "add_sliding_window", c.sliding_window


def _gemma4(c):
  """Gemma 4's, of which some are said of every layer."""
  slides = [kind == "sliding_attention" for kind in c.layer_types]
  gguf_name = c.num_hidden_layers - c.num_kv_shared_layers
  every = c.to_dict()  # where layers differ, attributes are refused
  heads, size = every["num_key_value_heads"], every["head_dim"]
  full, wide = _full_heads(c), c.use_double_wide_mlp
  few, width = full.get("num_key_value_heads"), c.intermediate_size
  yield "add_context_length", c.max_position_embeddings
  yield "add_embedding_length", c.hidden_size
  yield "add_block_count", c.num_hidden_layers
  yield (
    "add_feed_forward_length",
    [width * (1 if i < gguf_name else 2) for i in range(len(slides))]
    if wide
    else width,
  )
  yield "add_head_count", c.num_attention_heads
  yield (
    "add_head_count_kv",
    [heads if x else few for x in slides] if few else heads,
  )
  yield "add_layer_norm_rms_eps", c.rms_norm_eps
  yield "add_sliding_window", c.sliding_window
  yield "add_sliding_window_pattern", slides
  yield "add_shared_kv_layers", c.num_kv_shared_layers
  yield "add_embedding_length_per_layer_input", c.hidden_size_per_layer_input
  if c.final_logit_softcapping:
    yield "add_final_logit_softcapping", c.final_logit_softcapping
  if c.enable_moe_block:
    yield "add_expert_count", c.num_experts
    yield "add_expert_used_count", c.top_k_experts
    yield "add_expert_feed_forward_length", c.moe_intermediate_size
  for suffix, channels in (("", full["head_dim"]), ("_swa", size)):
    yield f"add_key_length{suffix}", channels
    yield f"add_value_length{suffix}", channels
    yield f"add_rope_dimension_count{suffix}", channels
  for suffix, kind in (("", "full"), ("_swa", "sliding")):
    theta = c.rope_parameters[f"{kind}_attention"]["rope_theta"]
    yield f"add_rope_freq_base{suffix}", theta


def _full_heads(c):
  """Settings of a Gemma 4's full layers that its sliding ones have not."""
  return next(iter(c.to_dict()["per_layer_config"].values()))


def _tensors(model, arch):
  """The tensors by llama.cpp's names, changed as its converter changes them."""
  c = model.config
  numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
  table = gguf.get_tensor_name_map(numbers[arch], c.num_hidden_layers)
  tensors = {}
  for name, tensor in model.state_dict().items():
    if name == "lm_head.weight" and c.tie_word_embeddings:
      continue
    array = tensor.numpy()
    if arch == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
      heads = c.num_attention_heads
      if name.split(".")[-2] == "k_proj":
        heads = c.num_key_value_heads
      array = array.reshape(heads, 2, -1, *array.shape[1:])
      array = array.swapaxes(1, 2).reshape(-1, *array.shape[3:])
    if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
      array = array + 1
    if arch == "gpt-oss" and ".experts." in name:
      stem, _, last = name.replace("_proj_bias", "_proj.bias").rpartition(".")
      suffix = "bias" if last == "bias" else "weight"
      stem = stem if last == "bias" else f"{stem}.{last}"
      if suffix == "weight":
        array = array.swapaxes(1, 2)
      each = {"down_proj": array}
      if stem.endswith("gate_up_proj"):
        axis = 1
        each = {
          part: array.take(range(at, array.shape[axis], 2), axis)
          for at, part in enumerate(("gate_proj", "up_proj"))
        }
      stem = stem.rpartition(".")[0]
      for part, half in each.items():
        gguf_name = table.get_name(f"{stem}.{part}")
        tensors[f"{gguf_name}.{suffix}"] = half
      continue
    if name.endswith("sinks"):
      name += ".weight"
    if name.endswith("experts.gate_up_proj") and arch != "gemma4":
      number = name.split(".")[2]
      for part, half in zip(
        ("gate", "up"), np.split(array, 2, axis=1), strict=True
      ):
        tensors[f"blk.{number}.ffn_{part}_exps.weight"] = half
      continue
    if name.endswith("shared_expert_gate.weight"):
      array = array[0]
    if name.endswith(("router.scale", "router.per_expert_scale")):
      kind = "gate_inp" if name.endswith("router.scale") else "down_exps"
      tensors[f"blk.{name.split('.')[2]}.ffn_{kind}.scale"] = array
      continue
    if name.endswith(("experts.down_proj", "gate_up_proj", "layer_scalar")):
      name += ".weight"
    gguf_name = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert gguf_name, name
    tensors[gguf_name] = array
  rope = getattr(c, "rope_parameters", None) or {}
  if arch == "gemma4":
    pairs = _full_heads(c)["head_dim"] // 2
    turning = int(pairs * rope["full_attention"]["partial_rotary_factor"])
    still = [1e30] * (pairs - turning)
    tensors["rope_freqs.weight"] = np.array([1] * turning + still, np.float32)
  if rope.get("rope_type") == "llama3":
    tensors["rope_freqs.weight"] = _factors(c, rope)
  return tensors


def _factors(c, rope):
  """Llama 3's divisors of the frequencies, `f32[C / 2]`."""
  size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
  waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
  low, high = rope["low_freq_factor"], rope["high_freq_factor"]
  length = rope["original_max_position_embeddings"]
  smooth = (length / waves - low) / (high - low)
  between = 1 / ((1 - smooth) / rope["factor"] + smooth)
  factors = np.where(waves > length / low, rope["factor"], between)
  return np.where(waves < length / high, 1, factors).astype(np.float32)
