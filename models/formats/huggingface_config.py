"""What `config.json` says, as a `TransformerConfig`, and back for Llama.

Whatever would change the logits and is not understood is an error.
"""

import math
from collections.abc import Mapping
from typing import Any

from models.networks.layers import RopeScaling, TransformerConfig

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
  "llama": dict(use_sliding_window=False, rope_interleaved=False),
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

# Names of transformers' own for the same in GPT-2.
_GPT2_ALIASES = (
  "hidden_size", "num_hidden_layers", "num_attention_heads",
  "max_position_embeddings",
)  # fmt: skip
_FULL, _SLIDES = "full_attention", "sliding_attention"

_ACTIVATIONS = {
  **dict.fromkeys(("silu", "swish"), "silu"),
  **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
  **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
  **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
  **{name: name for name in ("quick_gelu", "relu")},
}

# Beyond any model; what is said of every layer is listed for each.
_MOST_LAYERS = 2**20

_ROPE_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")
_OF_YARN = (
  "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
  "truncate",
)  # fmt: skip
_ROPE_KINDS = {
  "default": (),
  "linear": ("factor",),
  "dynamic": ("factor",),
  "llama3": (*_ROPE_FACTORS, "original_max_position_embeddings"),
  "yarn": ("factor", "original_max_position_embeddings", *_OF_YARN),
}
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
  if family == "llama" and _SLIDES in (config.get("layer_types") or ()):
    raise ValueError(f"no layer of a llama model is of {_SLIDES}")
  config = {**_DEFAULTS[family], **_aliases(config, family), **config}
  name = lambda key: _NAMES.get(family, {}).get(key, key)
  num_layers = _get(config, name("num_hidden_layers"), int)
  if num_layers > _MOST_LAYERS:
    raise ValueError(
      f"{name('num_hidden_layers')} must be at most {_MOST_LAYERS}, got "
      f"{num_layers}"
    )
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
    num_layers=num_layers,
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
    rope, share = _rope(config, common["head_dim"], default_share=0.25)
    bias = _get(config, "attention_bias", bool)
    return TransformerConfig(
      **common, **rope, norm="layer", gated_mlp=False,
      rotary_dim=int(common["head_dim"] * share),
      parallel_residual=_get(config, "use_parallel_residual", bool),
      qkv_bias=bias, out_bias=bias, mlp_bias=True,
    )  # fmt: skip
  rope, share = _rope(config, common["head_dim"], default_share=1.0)
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


def _aliases(config: Mapping[str, Any], family: str) -> dict[str, Any]:
  """What GPT-2's file says by the names that all other families have.

  Raises:
    ValueError: if it says something else by its own.
  """
  found = {}
  for alias, key in _NAMES["gpt2"].items() if family == "gpt2" else ():
    if alias not in _GPT2_ALIASES or config.get(alias) is None:
      continue
    if config.get(key, config[alias]) != config[alias]:
      raise ValueError(
        f"{key} is {config[key]!r} and {alias} {config[alias]!r}"
      )
    found[key] = config[alias]
  return found


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
  config: Mapping[str, Any], head_dim: int, *, default_share: float
) -> tuple[dict[str, Any], float]:
  """The rotary fields of `TransformerConfig`, and the share that rotates.

  transformers 5 keeps everything in `rope_parameters`; before, the base and the
  share were keys of the configuration (under other names in GPT-NeoX) and the
  rest was in `rope_scaling`. What is given twice must be the same.
  """
  of_kinds = {key for keys in _ROPE_KINDS.values() for key in keys}
  known = {*_ROPE_ALIASES.values(), *of_kinds}
  outside = (known | {*_ROPE_ALIASES}) - {"type", "rope_type", *of_kinds}
  outside.add(_ROPE_LENGTH)
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
  if kind not in list(_ROPE_KINDS):
    raise ValueError(
      f"rope_type must be one of {sorted(_ROPE_KINDS)}, got {kind!r}"
    )
  if unknown := sorted(set(rope) - known):
    raise ValueError(
      f"rotary settings must be of {sorted(known)}, got {unknown}"
    )
  share = _get(rope, "partial_rotary_factor", float, default_share)
  if share > 1:
    raise ValueError(f"partial_rotary_factor must be at most 1, got {share}")
  theta = _get(rope, "rope_theta", float, 10_000.0)
  pairs = int(head_dim * share) // 2
  more: dict[str, Any] = {}
  if kind == "llama3":
    factor, low, high = (_get(rope, key, float) for key in _ROPE_FACTORS)
    longest = _get(config, "max_position_embeddings", int)
    more["rope_scaling"] = RopeScaling(
      factor=factor,
      low_freq_factor=low,
      high_freq_factor=high,
      original_max_positions=_get(rope, _ROPE_LENGTH, int, longest),
    )
    if low >= high:
      raise ValueError(
        f"low_freq_factor must be below high_freq_factor, got {low} and {high}"
      )
  elif kind == "linear":
    more["rope_factors"] = (_get(rope, "factor", float),) * pairs
  elif kind == "yarn":
    more = _yarn(config, rope, theta, pairs)
  elif kind == "dynamic":
    # Up to the positions that the model is meant for nothing is rescaled.
    _get(rope, "factor", float)
  elif rope.get("factor", 1) != 1:
    raise ValueError(
      "a rotary factor needs another rope_type than 'default', got a factor "
      f"of {rope['factor']!r}"
    )
  return {"rope_theta": theta, **more}, share


def _yarn(
  config: Mapping[str, Any], rope: Mapping[str, Any], theta: float, pairs: int
) -> dict[str, Any]:
  """The rotary fields of YaRN (Peng et al., 2023, section 3).

  Pairs that turn more than `beta_fast` times within the original length are
  kept, those that turn less than `beta_slow` times are stretched by `factor`,
  and between them there is a ramp over the pairs' numbers.
  """
  longest = _get(config, "max_position_embeddings", int)
  original = _get(rope, _ROPE_LENGTH, int, longest)
  factor = _get(rope, "factor", float, longest / original)
  turns = lambda key, usual: _get(rope, key, float, usual)

  def pair(count: float) -> float:
    """Which pair turns that many times, as a fraction."""
    return pairs * math.log(original / (2 * math.pi * count)) / math.log(theta)

  low, high = pair(turns("beta_fast", 32.0)), pair(turns("beta_slow", 1.0))
  if _get(rope, "truncate", bool, True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * pairs - 1)
  if low == high:
    high += 0.001
  ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(pairs)]
  scale = lambda by: 0.1 * by * math.log(max(factor, 1)) + 1
  both = [_get(rope, key, float, None) for key in ("mscale", "mscale_all_dim")]
  usual = scale(both[0]) / scale(both[1]) if all(both) else scale(1)
  return {
    "rope_factors": tuple(1 / (1 - r + r / factor) for r in ramp),
    "rope_scale": _get(rope, "attention_factor", float, usual),
  }


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
  full, sliding = _FULL, _SLIDES
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


def llama_json(
  c: TransformerConfig, dtype: str, eos_token_id: int | None
) -> dict[str, Any]:
  """The `config.json` of a Llama checkpoint.

  Args:
    c: the module's configuration.
    dtype: of the weights in the file.
    eos_token_id: end-of-text token, if known.

  Returns:
    The contents of the file.

  Raises:
    ValueError: if Llama's format cannot express the configuration, saying which
      of its fields are in the way.
  """
  scaling = c.rope_scaling and {
    "rope_type": "llama3",
    **{key: getattr(c.rope_scaling, key) for key in _ROPE_FACTORS},
    _ROPE_LENGTH: c.rope_scaling.original_max_positions,
  }
  if c.rope_factors and len({*c.rope_factors}) == 1:
    scaling = {"rope_type": "linear", "factor": c.rope_factors[0]}
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
