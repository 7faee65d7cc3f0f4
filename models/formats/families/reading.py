"""Settings of `config.json` that families share: sizes, layers, rotations.

An unknown setting that could change the logits is an error.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from models.networks.description import (
  AttentionSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.mixture import Mixture
from models.networks.rope import Rope, RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"

ACTIVATIONS = {
  "silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh",
  "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
  "swish": "silu", "gelu_python": "gelu",
}  # fmt: skip
ROPE_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_LENGTH = "original_max_position_embeddings"
_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "proportional")
_ROPE_KEYS = {
  "rope_type", "rope_theta", "partial_rotary_factor", *ROPE_FACTORS,
  ROPE_LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale",
  "mscale_all_dim", "truncate",
}  # fmt: skip
_ROPE_ALIASES = {
  "type": "rope_type",
  "rotary_emb_base": "rope_theta",
  "rotary_pct": "partial_rotary_factor",
}


def get(config, key: str, kind: type, default: Any = ..., *, least=1) -> Any:
  """Reads and checks a value: a bool, an int >= `least` or a positive float.

  A `default`, if given, replaces null and missing keys.
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


# ------------------------------------------------------------- sizes and layers


def sizes(
  config: Mapping[str, Any], *, names: Mapping[str, str] | None = None
) -> dict[str, Any]:
  """Reads the sizes that all families have, for `layer` and `model`.

  `names` maps the usual keys to the family's.
  """
  name = lambda key: (names or {}).get(key, key)
  embed_dim = get(config, name("hidden_size"), int)
  num_heads = get(config, name("num_attention_heads"), int)
  activation = config[name("hidden_act")]
  if activation not in ACTIVATIONS:
    raise ValueError(
      f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
    )
  return dict(
    vocab_size=get(config, "vocab_size", int),
    embed_dim=embed_dim,
    num_layers=get(config, name("num_hidden_layers"), int),
    num_heads=num_heads,
    num_kv_heads=get(config, "num_key_value_heads", int, num_heads),
    head_dim=get(config, name("head_dim"), int, embed_dim // num_heads),
    mlp_dim=get(config, name("intermediate_size"), int, 4 * embed_dim),
    max_positions=get(config, name("max_position_embeddings"), int),
    norm_eps=get(config, name("rms_norm_eps"), float),
    activation=ACTIVATIONS[activation],
    tied_embeddings=get(config, "tie_word_embeddings", bool),
  )


def dense(sizes: Mapping[str, Any], **more) -> DenseSpec:
  """The dense MLP for `sizes`; `more` overrides its fields."""
  return DenseSpec(
    **{"width": sizes["mlp_dim"], "activation": sizes["activation"]} | more
  )


def layer(
  sizes: Mapping[str, Any],
  feed_forward: DenseSpec | Mixture | None = None,
  *,
  bias: bool = False,
  norms: str = "pre",
  parallel: bool = False,
  **attention,
) -> LayerSpec:
  """A layer with attention.

  Args:
    sizes: from `sizes`.
    feed_forward: its feed-forward block; None for `dense`.
    bias: whether all attention projections have biases.
    norms, parallel: as for `LayerSpec`.
    **attention: fields of `AttentionSpec`, overriding the others.
  """
  heads = {x: sizes[x] for x in ("num_heads", "num_kv_heads", "head_dim")}
  biases = {"qkv_bias": bias, "out_bias": bias}
  return LayerSpec(
    attention=AttentionSpec(**heads | biases | attention),
    feed_forward=feed_forward or dense(sizes),
    norms=norms,
    parallel=parallel,
  )


def model(
  sizes: Mapping[str, Any], layers: Iterable[LayerSpec], **frame
) -> TransformerConfig:
  """A model with these layers; `frame` has fields of `TransformerConfig`."""
  names = "vocab_size embed_dim max_positions norm_eps tied_embeddings".split()
  return TransformerConfig(
    layers=tuple(layers), **{name: sizes[name] for name in names}, **frame
  )


def layer_types(
  config: Mapping[str, Any],
  usual: Sequence[str],
  allowed: Collection[str],
  key: str = "layer_types",
) -> list[str]:
  """The type of every layer, from the configuration or else `usual`."""
  types = config.get(key)
  types = list(usual) if types is None else types
  if len(types) != len(usual) or not {*types} <= {*allowed}:
    raise ValueError(
      f"{key} must be {len(usual)} entries, each one of {[*allowed]}, got "
      f"{types!r:.200}"
    )
  return types


def windowed(
  config: Mapping[str, Any], slides: Iterable[bool], window: int | None
) -> list[str]:
  """The type of every layer, full or sliding attention.

  Taken from `layer_types`, or by default from `slides`; a `window` of None
  allows full attention only.
  """
  if window is None:
    return layer_types(config, [FULL for _ in slides], [FULL])
  usual = [SLIDING if each else FULL for each in slides]
  return layer_types(config, usual, [FULL, SLIDING])


# -------------------------------------------------------------------- rotations


def rope(
  config: Mapping[str, Any],
  head_dim: int,
  *,
  share: float | None = None,
  theta: float = 10_000.0,
  ignored: Collection[str] = (),
) -> Rope:
  """Reads the rotary settings of a `config.json`.

  transformers 5 keeps them all in `rope_parameters`; before that, the base and
  the rotated share were top-level keys (with other names in GPT-NeoX) and the
  rest was in `rope_scaling`. `theta` is the default base and `share` the
  default share of a head's channels that rotate, None if it must be 1;
  `ignored` lists settings that change nothing.
  """
  given = _rope_settings(config, ignored)
  kind = given.get("rope_type", "default")
  if kind not in _ROPE_KINDS:
    raise ValueError(f"rope_type must be one of {_ROPE_KINDS}, got {kind!r}")
  partial = share is not None or kind == "proportional"
  share = get(given, "partial_rotary_factor", float, share or 1.0)
  if share != 1 and not partial:
    raise ValueError(f"partial_rotary_factor must be 1, got {share}")
  theta = get(given, "rope_theta", float, theta)
  dim = head_dim if kind == "proportional" else int(head_dim * share)
  pairs = -(-dim // 2)
  if kind == "llama3":
    longest = get(config, "max_position_embeddings", int)
    scaling = RopeScaling(
      **{key: get(given, key, float) for key in ROPE_FACTORS},
      original_max_positions=get(given, ROPE_LENGTH, int, longest),
    )
    return Rope(theta=theta, dim=dim, scaling=scaling)
  if kind == "yarn":
    return _yarn(config, given, theta, dim)
  factors = None
  if kind == "linear":
    factors = (get(given, "factor", float),) * pairs
  elif kind == "proportional":  # the other pairs do not rotate
    turning = int(share * head_dim // 2)
    factors = (get(given, "factor", float, 1.0),) * turning
    factors += (math.inf,) * (pairs - turning)
  # "dynamic" rescales nothing within the model's maximum length.
  return Rope(theta=theta, dim=dim, factors=factors)


def rope_by_type(
  config: Mapping[str, Any],
  head_dim: int,
  *,
  older: Mapping[str, Mapping[str, Any]],
  theta: Mapping[str, float],
) -> dict[str, Rope]:
  """Reads the rotary settings of every layer type.

  transformers 5 keeps them in `rope_parameters`, by type. `older` has the
  values of each type's older keys as `rope_theta` and `rope_scaling`, and
  `theta` each type's default base.
  """
  given = config.get("rope_parameters") or {}
  if {*given} - {*theta}:
    raise ValueError(
      f"rope_parameters must be of {sorted(theta)}, got {given!r:.80}"
    )
  longest = {"max_position_embeddings": config.get("max_position_embeddings")}
  return {
    kind: rope(
      longest | older.get(kind, {}) | {"rope_parameters": given.get(kind)},
      head_dim,
      theta=usual,
    )
    for kind, usual in theta.items()
  }


def _rope_settings(
  config: Mapping[str, Any], ignored: Collection[str]
) -> dict[str, Any]:
  """Rotary settings from all places, by their newest names."""
  outside = "rope_theta partial_rotary_factor rotary_emb_base rotary_pct"
  given: dict[str, Any] = {}
  for source in (
    {key: config.get(key) for key in outside.split()},
    config.get("rope_parameters") or {},
    config.get("rope_scaling") or {},
  ):
    for key, value in source.items():
      key = _ROPE_ALIASES.get(key, key)
      if value is None or key in ignored:
        continue
      if key not in _ROPE_KEYS:
        raise ValueError(f"unknown rotary setting: {key}")
      given[key] = value
  return given


def _yarn(
  config: Mapping[str, Any], given: Mapping[str, Any], theta: float, dim: int
) -> Rope:
  """A `Rope` with YaRN (Peng et al., 2023, section 3).

  Frequencies with more than `beta_fast` turns in the original length are kept,
  those with fewer than `beta_slow` are divided by `factor`, and those between
  are interpolated linearly in their index.
  """
  longest = get(config, "max_position_embeddings", int)
  original = get(given, ROPE_LENGTH, int, longest)
  factor = get(given, "factor", float, longest / original)

  def pair(key: str, turns: float) -> float:
    """The (fractional) index of the frequency with that many turns."""
    turn = original / (2 * math.pi * get(given, key, float, turns))
    return dim * math.log(turn) / (2 * math.log(theta))

  low, high = pair("beta_fast", 32.0), pair("beta_slow", 1.0)
  if get(given, "truncate", bool, True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  if low == high:
    high += 0.001
  ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]
  scale = lambda by: 0.1 * by * math.log(max(factor, 1)) + 1
  both = [get(given, key, float, None) for key in ("mscale", "mscale_all_dim")]
  usual = scale(both[0]) / scale(both[1]) if all(both) else scale(1)
  return Rope(
    theta=theta,
    dim=dim,
    factors=tuple(1 / (1 - r + r / factor) for r in ramp),
    scale=get(given, "attention_factor", float, usual),
  )
