"""Reads checkpoints in Hugging Face's format, and writes Llama's.

Neither torch nor transformers is needed: `config.json` is read as JSON, weights
from safetensors. The file reads top to bottom: configuration, the tables that
say which tensor of a checkpoint is which parameter, `load`, `save_llama`.

Whatever would change the logits and is not understood is an error; so is every
tensor that is left over, missing or of another shape.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from models import tokenizers
from models.transformer import RopeScaling, Transformer, TransformerConfig


class CheckpointError(ValueError):
  """The tensors of a checkpoint are not those of its configuration."""


# ------------------------------------------------------------- configuration

# What transformers assumes for a key that config.json leaves out.
_GATED = dict(
  hidden_act="silu", rms_norm_eps=1e-6, head_dim=None, tie_word_embeddings=False
)
_QWEN = dict(
  _GATED, num_key_value_heads=32, use_sliding_window=False,
  sliding_window=4096, max_window_layers=28, layer_types=None,
)  # fmt: skip
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
  "gpt2": dict(
    n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
  ),
  "gpt_neox": dict(
    hidden_act="gelu", layer_norm_eps=1e-5, use_parallel_residual=True,
    attention_bias=True, tie_word_embeddings=False,
  ),
  "llama": dict(_GATED, attention_bias=False, mlp_bias=False),
  "mistral": dict(
    _GATED, num_key_value_heads=8, sliding_window=4096, layer_types=None
  ),
  "qwen2": _QWEN,
  "qwen3": dict(_QWEN, head_dim=128, attention_bias=False),
}  # fmt: skip

# Keys that must have this value if they are there at all.
_FIXED: Mapping[str, Mapping[str, Any]] = {
  "gpt2": dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
  "llama": dict(sliding_window=None, rope_interleaved=False),
  "qwen2": dict(use_mrope=False),
}
_FIXED_IN_ALL = dict(
  add_cross_attention=False, is_encoder_decoder=False, quantization_config=None
)

# What two families call the keys that the others agree on.
_NAMES: Mapping[str, Mapping[str, str]] = {
  "gpt2": dict(
    hidden_size="n_embd", num_hidden_layers="n_layer",
    num_attention_heads="n_head", intermediate_size="n_inner",
    max_position_embeddings="n_positions", hidden_act="activation_function",
    rms_norm_eps="layer_norm_epsilon",
  ),
  "gpt_neox": dict(rms_norm_eps="layer_norm_eps"),
}  # fmt: skip

_ACTIVATIONS = {
  **dict.fromkeys(("silu", "swish"), "silu"),
  **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
  **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
  **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
}

_ROPE_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")
_ROPE_LENGTH = "original_max_position_embeddings"
_ROPE_ALIASES = {
  "type": "rope_type",
  "rotary_emb_base": "rope_theta",
  "rotary_pct": "partial_rotary_factor",
}


def config_from_json(config: Mapping[str, Any]) -> TransformerConfig:
  """Translates the contents of a `config.json`.

  Args:
    config: of a GPT-2, GPT-NeoX, Llama, Mistral, Qwen2 or Qwen3 model, as
      transformers 4 or 5 write it. A key that is left out has the value that
      transformers gives it; the model's sizes must be there.

  Returns:
    The configuration of the equivalent `Transformer`.

  Raises:
    ValueError: if the model is of another type, or a setting that changes the
      logits is missing, malformed or not supported.
  """
  family = config.get("model_type")
  if family not in list(_DEFAULTS):
    raise ValueError(
      f"model_type must be one of {sorted(_DEFAULTS)}, got {family!r}"
    )
  for key, value in {**_FIXED.get(family, {}), **_FIXED_IN_ALL}.items():
    if config.get(key, value) != value:
      raise ValueError(
        f"{key} must be {value!r} in a {family} model, got {config[key]!r}"
      )
  config = {**_DEFAULTS[family], **config}
  name = lambda key: _NAMES.get(family, {}).get(key, key)
  embed_dim = _get(config, name("hidden_size"), int)
  num_heads = _get(config, name("num_attention_heads"), int)
  head_dim = _get(config, "head_dim", int, None)
  if head_dim is None and embed_dim % num_heads:
    raise ValueError(
      f"without a head_dim, {name('num_attention_heads')} must divide "
      f"{name('hidden_size')}, got {num_heads} and {embed_dim}"
    )
  mlp_dim = (4 * embed_dim,) if family == "gpt2" else ()
  activation = config[name("hidden_act")]
  if activation not in list(_ACTIVATIONS):
    raise ValueError(
      f"{name('hidden_act')} must be one of {sorted(_ACTIVATIONS)}, got "
      f"{activation!r}"
    )
  common = dict(
    vocab_size=_get(config, "vocab_size", int),
    embed_dim=embed_dim,
    num_layers=_get(config, name("num_hidden_layers"), int),
    num_heads=num_heads,
    num_kv_heads=_get(config, "num_key_value_heads", int, num_heads),
    head_dim=head_dim or embed_dim // num_heads,
    mlp_dim=_get(config, name("intermediate_size"), int, *mlp_dim),
    max_positions=_get(config, name("max_position_embeddings"), int),
    norm_eps=_get(config, name("rms_norm_eps"), float),
    activation=_ACTIVATIONS[activation],
    tied_embeddings=_get(config, "tie_word_embeddings", bool),
  )
  if family == "gpt2":
    return TransformerConfig(
      **common, norm="layer", gated_mlp=False, learned_positions=True,
      qkv_bias=True, out_bias=True, mlp_bias=True,
    )  # fmt: skip
  if family == "gpt_neox":
    rope, share = _rope(config, default_share=0.25)
    bias = _get(config, "attention_bias", bool)
    return TransformerConfig(
      **common, **rope, norm="layer", gated_mlp=False,
      rotary_dim=int(common["head_dim"] * share),
      parallel_residual=_get(config, "use_parallel_residual", bool),
      qkv_bias=bias, out_bias=bias, mlp_bias=True,
    )  # fmt: skip
  rope, share = _rope(config, default_share=1.0)
  if share != 1.0:
    raise ValueError(
      f"partial_rotary_factor must be 1 in a {family} model, got {share}"
    )
  has_switch = family in ("llama", "qwen3")
  bias = has_switch and _get(config, "attention_bias", bool)
  return TransformerConfig(
    **common, **rope, qkv_bias=bias or family == "qwen2", out_bias=bias,
    mlp_bias=family == "llama" and _get(config, "mlp_bias", bool),
    qk_norm=family == "qwen3",
    windows=None if family == "llama" else _windows(config, family),
  )  # fmt: skip


def _get(config, key: str, kind: type, default: Any = ..., *, least=1) -> Any:
  """A checked value: a bool, an int >= `least` or a positive float.

  A `default`, if there is one, stands for null and for a key left out.
  """
  value = config.get(key)
  if value is None and default is not ...:
    return default
  if kind is bool:
    fits, expected = isinstance(value, bool), "true or false"
  elif kind is int:
    fits = type(value) is int and value >= least  # True is an int
    expected = f"an integer >= {least}"
  else:
    fits = type(value) in (int, float) and 0 < value < math.inf
    expected = "a positive number"
  if not fits:
    raise ValueError(f"{key} must be {expected}, got {value!r}")
  return kind(value)


def _rope(
  config: Mapping[str, Any], *, default_share: float
) -> tuple[dict[str, Any], float]:
  """The rotary fields of `TransformerConfig`, and the share that rotates.

  transformers 5 keeps everything in `rope_parameters`; before, the base and the
  share were keys of the configuration (under other names in GPT-NeoX) and the
  rest was in `rope_scaling`. What is given twice must be the same.
  """
  known = {*_ROPE_ALIASES.values(), *_ROPE_FACTORS, _ROPE_LENGTH}
  outside = (known | {*_ROPE_ALIASES}) - {"type", "rope_type", *_ROPE_FACTORS}
  sources = [{key: config.get(key) for key in outside}]
  for where in ("rope_parameters", "rope_scaling"):
    sources.append(config.get(where) or {})
    if not isinstance(sources[-1], Mapping):
      raise ValueError(f"{where} must be an object, got {sources[-1]!r}")
  rope: dict[str, Any] = {}
  for key, value in (item for source in sources for item in source.items()):
    key = _ROPE_ALIASES.get(key, key)
    if value is not None and rope.setdefault(key, value) != value:
      raise ValueError(f"{key} is both {rope[key]!r} and {value!r}")
  kind = rope.get("rope_type", "default")
  if kind not in ("default", "llama3"):
    raise ValueError(f"rope_type must be 'default' or 'llama3', got {kind!r}")
  if unknown := sorted(set(rope) - known):
    raise ValueError(
      f"rotary settings must be of {sorted(known)}, got {unknown}"
    )
  scaling = None
  if kind == "llama3":
    factor, low, high = (_get(rope, key, float) for key in _ROPE_FACTORS)
    longest = _get(config, "max_position_embeddings", int)
    scaling = RopeScaling(
      factor=factor,
      low_freq_factor=low,
      high_freq_factor=high,
      original_max_positions=_get(rope, _ROPE_LENGTH, int, longest),
    )
    if low >= high:
      raise ValueError(
        f"low_freq_factor must be below high_freq_factor, got {low} and {high}"
      )
  elif rope.get("factor", 1) != 1:
    raise ValueError(
      f"a rotary factor needs rope_type 'llama3', got 'default' and a factor "
      f"of {rope['factor']!r}"
    )
  share = _get(rope, "partial_rotary_factor", float, default_share)
  if share > 1:
    raise ValueError(f"partial_rotary_factor must be at most 1, got {share}")
  theta = _get(rope, "rope_theta", float, 10_000.0)
  return {"rope_theta": theta, "rope_scaling": scaling}, share


def _windows(
  config: Mapping[str, Any], family: str
) -> tuple[int | None, ...] | None:
  """The sliding window of every layer, or None if there are none."""
  layers = _get(config, "num_hidden_layers", int)
  window = _get(config, "sliding_window", int, None)
  if family != "mistral" and not _get(config, "use_sliding_window", bool):
    window = None
  if window is None:
    num_full = layers
  elif family == "mistral":
    num_full = 0
  else:
    num_full = _get(config, "max_window_layers", int, least=0)
  full, sliding = "full_attention", "sliding_attention"
  usual = [full if i < num_full else sliding for i in range(layers)]
  allowed = [full] if window is None else [full, sliding]
  if family == "mistral":  # where transformers itself ignores layer_types
    allowed = [usual[0]]
  types = usual if config["layer_types"] is None else config["layer_types"]
  well_formed = isinstance(types, list) and len(types) == layers
  if not well_formed or any(kind not in allowed for kind in types):
    raise ValueError(
      f"layer_types must be {layers} entries, each one of {allowed} (the "
      f"sliding window is {window}), got {types!r}"
    )
  if window is None:
    return None
  return tuple(window if kind == sliding else None for kind in types)


# ------------------------------------------------------------------- tensors


@dataclasses.dataclass(frozen=True)
class _Layout:
  """How a tensor of a checkpoint holds a parameter.

  Attributes:
    shape: of the tensor, given the parameter's.
    take: the parameter, given the tensor and the model's configuration.
  """

  shape: Callable[[tuple[int, ...]], tuple[int, ...]]
  take: Callable[[np.ndarray, TransformerConfig], np.ndarray]


# Both are their own inverse, and leave vectors as they are.
_AS_IS = _Layout(lambda s: s, lambda x, c: x)
_TRANSPOSED = _Layout(lambda s: s[::-1], lambda x, c: x.T)


def _qkv_columns(part: int) -> _Layout:
  """GPT-2: queries, keys and values side by side in the last axis."""
  return _Layout(
    lambda s: (*s[:-1], 3 * s[-1]),
    lambda x, c: np.split(x, 3, axis=-1)[part],
  )


def _qkv_per_head(part: int) -> _Layout:
  """GPT-NeoX: rows run over heads, then queries, keys, values, channels."""

  def take(x, c):
    x = x.reshape(c.num_heads, 3, c.head_dim, *x.shape[1:])
    return x[:, part].reshape(-1, *x.shape[3:]).T

  return _Layout(lambda s: (3 * s[-1], *s[:-1]), take)


# Module -> the checkpoint's name for it, and its layout; # is a layer's number.
_GPT2 = {
  "embed": ("wte", _AS_IS),
  "position_embed": ("wpe", _AS_IS),
  "final_norm": ("ln_f", _AS_IS),
  "lm_head": ("lm_head", _TRANSPOSED),
  "layers.#.attention_norm": ("h.#.ln_1", _AS_IS),
  "layers.#.attention.q": ("h.#.attn.c_attn", _qkv_columns(0)),
  "layers.#.attention.k": ("h.#.attn.c_attn", _qkv_columns(1)),
  "layers.#.attention.v": ("h.#.attn.c_attn", _qkv_columns(2)),
  "layers.#.attention.out": ("h.#.attn.c_proj", _AS_IS),
  "layers.#.mlp_norm": ("h.#.ln_2", _AS_IS),
  "layers.#.mlp.up": ("h.#.mlp.c_fc", _AS_IS),
  "layers.#.mlp.down": ("h.#.mlp.c_proj", _AS_IS),
}
_NEOX_QKV = "layers.#.attention.query_key_value"
_GPT_NEOX = {
  "embed": ("embed_in", _AS_IS),
  "final_norm": ("final_layer_norm", _AS_IS),
  "lm_head": ("lm_head", _TRANSPOSED),
  "layers.#.attention_norm": ("layers.#.input_layernorm", _AS_IS),
  "layers.#.attention.q": (_NEOX_QKV, _qkv_per_head(0)),
  "layers.#.attention.k": (_NEOX_QKV, _qkv_per_head(1)),
  "layers.#.attention.v": (_NEOX_QKV, _qkv_per_head(2)),
  "layers.#.attention.out": ("layers.#.attention.dense", _TRANSPOSED),
  "layers.#.mlp_norm": ("layers.#.post_attention_layernorm", _AS_IS),
  "layers.#.mlp.up": ("layers.#.mlp.dense_h_to_4h", _TRANSPOSED),
  "layers.#.mlp.down": ("layers.#.mlp.dense_4h_to_h", _TRANSPOSED),
}
_LLAMA = {
  "embed": ("embed_tokens", _AS_IS),
  "final_norm": ("norm", _AS_IS),
  "lm_head": ("lm_head", _TRANSPOSED),
  "layers.#.attention_norm": ("layers.#.input_layernorm", _AS_IS),
  "layers.#.attention.q": ("layers.#.self_attn.q_proj", _TRANSPOSED),
  "layers.#.attention.k": ("layers.#.self_attn.k_proj", _TRANSPOSED),
  "layers.#.attention.v": ("layers.#.self_attn.v_proj", _TRANSPOSED),
  "layers.#.attention.out": ("layers.#.self_attn.o_proj", _TRANSPOSED),
  "layers.#.attention.q_norm": ("layers.#.self_attn.q_norm", _AS_IS),
  "layers.#.attention.k_norm": ("layers.#.self_attn.k_norm", _AS_IS),
  "layers.#.mlp_norm": ("layers.#.post_attention_layernorm", _AS_IS),
  "layers.#.mlp.gate": ("layers.#.mlp.gate_proj", _TRANSPOSED),
  "layers.#.mlp.up": ("layers.#.mlp.up_proj", _TRANSPOSED),
  "layers.#.mlp.down": ("layers.#.mlp.down_proj", _TRANSPOSED),
}
_TABLES = {"gpt2": _GPT2, "gpt_neox": _GPT_NEOX}  # all others: _LLAMA

# Some files have this prefix, some not; the head has two names in GPT-NeoX.
_PREFIX = re.compile(r"^(transformer|gpt_neox|model)\.")
_OLD_HEAD = re.compile(r"^embed_out\.")
# Causal masks and rotary frequencies, which follow from the configuration.
_BUFFER = re.compile(
  r"rotary_emb\.inv_freq|(h|layers)\.\d+\.(attn|attention|self_attn)\."
  r"(bias|masked_bias|rotary_emb\.inv_freq)"
)
_DTYPES = ("F16", "BF16", "F32", "F64")


def _locate(path: Iterable[str | int], family: str) -> tuple[str, _Layout]:
  """The checkpoint's name, without prefix, and the layout of a parameter."""
  *module, parameter = path
  number = next((str(p) for p in module if isinstance(p, int)), "")
  key = ".".join("#" if isinstance(p, int) else p for p in module)
  name, layout = _TABLES.get(family, _LLAMA)[key]
  suffix = "bias" if parameter == "bias" else "weight"
  return f"{name.replace('#', number)}.{suffix}", layout


# ---------------------------------------------------------------------- load


def load(directory: str, *, dtype=jnp.float32) -> Transformer:
  """Reads a checkpoint directory.

  Args:
    directory: holds `config.json` and either `model.safetensors` or
      `model.safetensors.index.json` with the files it names. Nothing is fetched
      from a hub.
    dtype: of the parameters and activations, whatever the files' is.

  Returns:
    The module.

  Raises:
    FileNotFoundError: if the directory or a file is missing.
    ValueError: if a file cannot be read, or the model is not supported.
    CheckpointError: (a ValueError) if tensors are left over, missing or of
      another shape or type than they should be; it lists them all.
  """
  path = pathlib.Path(directory)
  if not path.is_dir():
    raise FileNotFoundError(
      f"there is no directory {str(directory)!r}: only local checkpoint "
      "directories are read, nothing is fetched from a hub"
    )
  settings = _read_json(path / "config.json")
  try:
    config = config_from_json(settings)
  except ValueError as error:
    raise ValueError(f"cannot use {path / 'config.json'}: {error}") from error
  family = settings["model_type"]
  graphdef, state = nnx.split(
    nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))
  )
  state = dict(nnx.to_flat_state(state))
  wanted: dict[str, list] = {}  # tensor -> the parameters that it holds
  shapes: dict[str, tuple[int, ...]] = {}
  for parameter, variable in state.items():
    name, layout = _locate(parameter, family)
    wanted.setdefault(name, []).append((parameter, layout))
    shapes[name] = layout.shape(variable.shape)
  tied = _locate(("embed", "embedding"), family)[0]
  with contextlib.ExitStack() as stack:
    tensors, problems = _open(_weight_files(path), stack)
    problems += _mismatches(
      tensors, shapes, tied if config.tied_embeddings else None
    )
    if problems:
      raise CheckpointError(
        f"the tensors in {path} are not those of the {family} model in its "
        "config.json:\n  " + "\n  ".join(sorted(problems))
      )
    for name, parameters in wanted.items():
      tensor = _read(tensors[name])
      for parameter, layout in parameters:
        array = layout.take(tensor, config).astype(jnp.dtype(dtype))
        state[parameter] = state[parameter].replace(jnp.array(array))
  return nnx.merge(graphdef, nnx.from_flat_state(state))


def _read_json(path: pathlib.Path) -> Mapping[str, Any]:
  if not path.is_file():
    raise FileNotFoundError(
      f"there is no {path.name} in {path.parent}: expected a checkpoint in "
      "Hugging Face's format"
    )
  try:
    contents = json.loads(path.read_text("utf-8"))
  except ValueError as error:  # bad JSON or bad UTF-8
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(contents, Mapping):
    raise ValueError(f"{path} must hold a JSON object, got {contents!r:.40}")
  return contents


def _weight_files(path: pathlib.Path) -> list[pathlib.Path]:
  whole, index = (
    path / f"model.safetensors{suffix}" for suffix in ("", ".index.json")
  )
  if whole.is_file():
    return [whole]
  if not index.is_file():
    raise FileNotFoundError(
      f"there are no weights in {path}: expected {whole.name}, or {index.name} "
      "with the files it names (no other format is read)"
    )
  names = _read_json(index).get("weight_map")
  if not isinstance(names, Mapping) or not all(
    isinstance(n, str) and n == pathlib.PurePath(n).name for n in names.values()
  ):
    raise ValueError(f"weight_map in {index} must map tensors to file names")
  files = [path / name for name in sorted(set(names.values()))]
  if missing := [file.name for file in files if not file.is_file()]:
    raise FileNotFoundError(f"{index} names {missing}, which are not there")
  return files


def _open(
  files: Iterable[pathlib.Path], stack: contextlib.ExitStack
) -> tuple[dict[str, tuple[Any, str]], list[str]]:
  """The open file and full name of every tensor; the tensors found twice."""
  tensors: dict[str, tuple[Any, str]] = {}
  problems = []
  for path in files:
    try:
      file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
    except (safetensors.SafetensorError, OSError) as error:
      raise ValueError(f"cannot read {path} as safetensors: {error}") from error
    for full_name in file.keys():
      name = _OLD_HEAD.sub("lm_head.", _PREFIX.sub("", full_name))
      if name in tensors:
        problems.append(f"twice: {tensors[name][1]} and {full_name}")
      elif not _BUFFER.fullmatch(name):
        tensors[name] = file, full_name
  return tensors, problems


def _read(tensor: tuple[Any, str]) -> np.ndarray:
  file, full_name = tensor
  return file.get_tensor(full_name)


def _mismatches(
  tensors: Mapping[str, tuple[Any, str]],
  shapes: Mapping[str, tuple[int, ...]],
  tied: str | None,
) -> list[str]:
  """What is wrong with a checkpoint's tensors, given the expected shapes.

  `tied` names the embedding if it is the output projection too; that may then
  be in the files, but only as a copy.
  """
  problems = [
    f"missing: {name}, of shape {shapes[name]}"
    for name in set(shapes) - set(tensors)
  ]
  for name, (file, full_name) in tensors.items():
    piece = file.get_slice(full_name)
    shape, kind = tuple(piece.get_shape()), piece.get_dtype()
    if name not in shapes and (name != "lm_head.weight" or tied is None):
      problems.append(f"unexpected: {full_name}, of shape {shape}")
    elif (expected := shapes.get(name, shapes[tied or name])) != shape:
      problems.append(
        f"wrong shape: {full_name}, expected {expected}, got {shape}"
      )
    elif kind not in _DTYPES:
      problems.append(
        f"wrong type: {full_name}, expected one of {_DTYPES}, got {kind}"
      )
    elif name not in shapes and tied in tensors:
      if not np.array_equal(_read(tensors[name]), _read(tensors[tied])):
        problems.append(f"not a copy of the tied embedding: {full_name}")
  return problems


# ---------------------------------------------------------------------- save


def save_llama(
  module: Transformer,
  directory: str,
  *,
  tokenizer: tokenizers.Tokenizer | None = None,
  dtype=jnp.bfloat16,
) -> None:
  """Writes a Llama checkpoint that `load` and transformers read.

  Files are written elsewhere first and then renamed, `config.json` last: a
  directory without one is incomplete.

  Args:
    module: what Llama's format can express: RMS norms, a gated SiLU MLP, full
      rotary positions, the same bias switch for all attention projections.
    directory: created if need be; files of the same names are replaced.
    tokenizer: saved too, unless the directory already holds the same one. Its
      end-of-text token becomes the model's `bos_token_id` and `eos_token_id`.
    dtype: of the file: float32, bfloat16 or float16.

  Raises:
    ValueError: if Llama's format cannot express the module, the tokenizer has
      more tokens than the module, or the dtype is another one.
  """
  config, dtype = module.config, jnp.dtype(dtype)
  if dtype.name not in ("float32", "bfloat16", "float16"):
    raise ValueError(
      f"dtype must be float32, bfloat16 or float16, got {dtype.name}"
    )
  if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
    raise ValueError(
      f"the tokenizer must have at most {config.vocab_size} tokens, as the "
      f"module has, got {tokenizer.vocab_size}"
    )
  end = None if tokenizer is None else tokenizer.eos_token_id
  settings = _llama_json(config, dtype.name, end)
  tensors = {}
  for parameter, variable in nnx.to_flat_state(nnx.state(module)):
    name, layout = _locate(parameter, "llama")
    array = layout.take(np.asarray(variable[...]), config).astype(dtype)
    prefix = "" if name.startswith("lm_head.") else "model."
    tensors[prefix + name] = np.ascontiguousarray(array)
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as temporary:
    new = pathlib.Path(temporary)
    safetensors.numpy.save_file(
      tensors, new / "model.safetensors", metadata={"format": "pt"}
    )
    if tokenizer is not None and not _holds(path, tokenizer):
      tokenizers.save(tokenizer, temporary)
    (new / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (path / "config.json").unlink(missing_ok=True)
    for file in sorted(new.iterdir(), key=lambda f: f.name == "config.json"):
      file.replace(path / file.name)


def _llama_json(
  c: TransformerConfig, dtype: str, eos_token_id: int | None
) -> dict[str, Any]:
  """The `config.json` of a module; ValueError if Llama cannot express it."""
  scaling = c.rope_scaling and {
    "rope_type": "llama3",
    **{key: getattr(c.rope_scaling, key) for key in _ROPE_FACTORS},
    _ROPE_LENGTH: c.rope_scaling.original_max_positions,
  }
  settings = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": c.vocab_size,
    "hidden_size": c.embed_dim,
    "intermediate_size": c.mlp_dim,
    "num_hidden_layers": c.num_layers,
    "num_attention_heads": c.num_heads,
    "num_key_value_heads": c.num_kv_heads,
    "head_dim": c.head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": c.max_positions,
    "rms_norm_eps": c.norm_eps,
    "rope_theta": c.rope_theta,
    "rope_scaling": scaling,
    "attention_bias": c.qkv_bias,
    "mlp_bias": c.mlp_bias,
    "tie_word_embeddings": c.tied_embeddings,
    "bos_token_id": eos_token_id,
    "eos_token_id": eos_token_id,
    "dtype": dtype,
    "torch_dtype": dtype,  # the same for transformers 4
  }
  # Whatever does not survive the way there and back cannot be expressed.
  have, back = vars(c).copy(), vars(config_from_json(settings))
  if c.rotary_dim == c.head_dim:
    have["rotary_dim"] = None  # another way to say the same
  if not any(c.windows or ()):
    have["windows"] = None
  lost = [
    f"{k}={have[k]!r} (not {v!r})" for k, v in back.items() if have[k] != v
  ]
  if c.embed_dim % c.num_heads:  # transformers insists, even with a head_dim
    lost.append(f"num_heads={c.num_heads} (no divisor of {c.embed_dim})")
  if lost:
    raise ValueError("Llama's format cannot express " + ", ".join(lost))
  return settings


def _holds(path: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> bool:
  """Whether a directory holds this very tokenizer."""
  try:
    found = tokenizers.load(path)
  except (FileNotFoundError, ValueError):
    return False
  same_end = found.eos_token_id == tokenizer.eos_token_id
  return same_end and found.fingerprint() == tokenizer.fingerprint()
