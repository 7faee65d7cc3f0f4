"""Parts of a `config.json` that families share: sizes, windows, rotations.

Whatever would change the logits and is not understood is an error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from models.networks.rope import Rope, RopeScaling

FULL, SLIDES = "full_attention", "sliding_attention"

ACTIVATIONS = {
  **dict.fromkeys(("silu", "swish"), "silu"),
  **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
  **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
  **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
  **{name: name for name in ("quick_gelu", "relu")},
}

# Beyond any model; what is said of every layer is listed for each.
_MOST_LAYERS = 2**20

ROPE_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")
_OF_YARN = (
  "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
  "truncate",
)  # fmt: skip
ROPE_LENGTH = "original_max_position_embeddings"
_ROPE_KINDS = {
  "default": (),
  "linear": ("factor",),
  "dynamic": ("factor",),
  "llama3": (*ROPE_FACTORS, ROPE_LENGTH),
  "yarn": ("factor", ROPE_LENGTH, *_OF_YARN),
  "longrope": (
    "factor", ROPE_LENGTH, "attention_factor", "short_factor", "long_factor",
  ),
  "proportional": ("factor",),
}  # fmt: skip
_ROPE_ALIASES = {
  "type": "rope_type",
  "rotary_emb_base": "rope_theta",
  "rotary_pct": "partial_rotary_factor",
}


def get(config, key: str, kind: type, default: Any = ..., *, least=1) -> Any:
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


def sizes(
  config: Mapping[str, Any],
  *,
  names: Mapping[str, str] | None = None,
  mlp_dim: Callable[[int], int] | None = None,
) -> dict[str, Any]:
  """The fields of `TransformerConfig` that all families have.

  Args:
    config: a `config.json`.
    names: what it calls the usual keys.
    mlp_dim: the MLP's width by the model's, where none is said.
  """
  name = lambda key: (names or {}).get(key, key)
  num_layers = get(config, name("num_hidden_layers"), int)
  if num_layers > _MOST_LAYERS:
    raise ValueError(
      f"{name('num_hidden_layers')} must be at most {_MOST_LAYERS}, got "
      f"{num_layers}"
    )
  embed_dim = get(config, name("hidden_size"), int)
  num_heads = get(config, name("num_attention_heads"), int)
  head_dim = get(config, name("head_dim"), int, None)
  if head_dim is None and embed_dim % num_heads:
    raise ValueError(
      f"without a head_dim, {name('num_attention_heads')} must divide "
      f"{name('hidden_size')}, got {num_heads} and {embed_dim}"
    )
  usual = () if mlp_dim is None else (mlp_dim(embed_dim),)
  activation = config[name("hidden_act")]
  if activation not in list(ACTIVATIONS):
    raise ValueError(
      f"{name('hidden_act')} must be one of {sorted(ACTIVATIONS)}, got "
      f"{activation!r}"
    )
  return dict(
    vocab_size=get(config, "vocab_size", int),
    embed_dim=embed_dim,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=get(config, "num_key_value_heads", int, num_heads),
    head_dim=head_dim or embed_dim // num_heads,
    mlp_dim=get(config, name("intermediate_size"), int, *usual),
    max_positions=_longest(config, name("max_position_embeddings")),
    norm_eps=get(config, name("rms_norm_eps"), float),
    activation=ACTIVATIONS[activation],
    tied_embeddings=get(config, "tie_word_embeddings", bool),
  )


def heads(fields: Mapping[str, Any]) -> dict[str, int]:
  """The fields of `sizes` that an `AttentionSpec` has."""
  return {x: fields[x] for x in ("num_heads", "num_kv_heads", "head_dim")}


def frame(fields: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of `sizes` that belong to no layer."""
  return {
    x: fields[x]
    for x in (
      "vocab_size", "embed_dim", "max_positions", "norm_eps", "tied_embeddings",
    )
  }  # fmt: skip


def layer_types(
  config: Mapping[str, Any],
  usual: Sequence[str],
  allowed: Sequence[str],
  window: int | None,
) -> list[str]:
  """Types of the layers: full or sliding attention.

  Args:
    config: a `config.json`, whose `layer_types` count where they are given.
    usual: of every layer, where they are not.
    allowed: what may be said of a layer.
    window: the size of the sliding windows, for messages.
  """
  types = config.get("layer_types")
  types = list(usual) if types is None else types
  well_formed = isinstance(types, list) and len(types) == len(usual)
  if not well_formed or any(kind not in allowed for kind in types):
    raise ValueError(
      f"layer_types must be {len(usual)} entries, each one of {[*allowed]} "
      f"(the sliding window is {window}), got {types!r}"
    )
  return types


def _longest(config: Mapping[str, Any], key: str) -> int:
  """Positions that the model is meant for.

  Of longrope those that its short factors are for. In longer texts transformers
  takes other factors from a pass on, for whole batches, and keeps the keys that
  are cached as they are: what it says then depends on how a text was cut.
  """
  longest = get(config, key, int)
  for where in ("rope_parameters", "rope_scaling"):
    given = config.get(where)
    given = given if isinstance(given, Mapping) else {}
    for said in (given, *given.values()):
      if not isinstance(said, Mapping):
        continue
      if "longrope" in (said.get("rope_type"), said.get("type")):
        outside = get(config, ROPE_LENGTH, int, longest)
        longest = min(longest, get(said, ROPE_LENGTH, int, outside))
  return longest


def rope(
  config: Mapping[str, Any],
  head_dim: int,
  *,
  share: float | None = None,
  theta: float = 10_000.0,
) -> Rope:
  """The rotary settings of a `config.json`.

  transformers 5 keeps everything in `rope_parameters`; before, the base and the
  share were keys of the configuration (under other names in GPT-NeoX) and the
  rest was in `rope_scaling`. What is given twice must be the same.

  Args:
    config: of the model.
    head_dim: channels of a head.
    share: of them that rotates, where none is said; None in families whose
      heads rotate as a whole.
    theta: the base, where none is said.
  """
  of_kinds = {key for keys in _ROPE_KINDS.values() for key in keys}
  known = {*_ROPE_ALIASES.values(), *of_kinds}
  outside = (known | {*_ROPE_ALIASES}) - {"type", "rope_type", *of_kinds}
  outside.add(ROPE_LENGTH)
  sources = [{key: config.get(key) for key in outside}]
  for where in ("rope_parameters", "rope_scaling"):
    sources.append(config.get(where) or {})
    if not isinstance(sources[-1], Mapping):
      raise ValueError(f"{where} must be an object, got {sources[-1]!r:.80}")
  said: dict[str, Any] = {}
  for key, value in (item for source in sources for item in source.items()):
    key = _ROPE_ALIASES.get(key, key)
    if value is not None and said.setdefault(key, value) != value:
      raise ValueError(f"{key} is both {said[key]!r:.60} and {value!r:.60}")
  kind = said.get("rope_type", "default")
  if kind not in list(_ROPE_KINDS):
    raise ValueError(
      f"rope_type must be one of {sorted(_ROPE_KINDS)}, got {kind!r}"
    )
  if unknown := sorted(set(said) - known):
    raise ValueError(
      f"rotary settings must be of {sorted(known)}, got {unknown}"
    )
  whole, least = share is None and kind != "proportional", 1 / head_dim
  share = get(said, "partial_rotary_factor", float, share or 1.0)
  if not least <= share <= 1 or (whole and share != 1):
    raise ValueError(
      "partial_rotary_factor must be "
      + ("1 in this family" if whole else f"in {least:.2g}..1")
      + f", got {share}"
    )
  theta = get(said, "rope_theta", float, theta)
  dim = head_dim if kind == "proportional" else int(head_dim * share)
  pairs = -(-dim // 2)
  more: dict[str, Any] = {}
  if kind == "llama3":
    factor, low, high = (get(said, key, float) for key in ROPE_FACTORS)
    longest = get(config, "max_position_embeddings", int)
    more["scaling"] = RopeScaling(
      factor=factor,
      low_freq_factor=low,
      high_freq_factor=high,
      original_max_positions=get(said, ROPE_LENGTH, int, longest),
    )
    if low >= high:
      raise ValueError(
        f"low_freq_factor must be below high_freq_factor, got {low} and {high}"
      )
  elif kind == "linear":
    more["factors"] = (get(said, "factor", float),) * pairs
  elif kind == "yarn":
    more = _yarn(config, said, theta, dim)
  elif kind == "longrope":
    more = _longrope(config, said, pairs)
  elif kind == "proportional":
    # The rest stands still.
    turning = int(share * head_dim // 2)
    factors = (get(said, "factor", float, 1.0),) * turning
    more["factors"] = factors + (math.inf,) * (pairs - turning)
  elif kind == "dynamic":
    # Up to the positions that the model is meant for nothing is rescaled.
    get(said, "factor", float)
  elif said.get("factor", 1) != 1:
    raise ValueError(
      "a rotary factor needs another rope_type than 'default', got a factor "
      f"of {said['factor']!r}"
    )
  return Rope(theta=theta, dim=dim, **more)


def rope_by_type(
  config: Mapping[str, Any],
  head_dim: int,
  *,
  older: Mapping[str, Mapping[str, Any]],
  theta: Mapping[str, float],
) -> dict[str, Rope]:
  """The rotary settings of every type of layer.

  transformers 5 keeps those of each type in `rope_parameters`, by its name.

  Args:
    config: of the model.
    head_dim: channels of a head.
    older: of each type, what the keys of earlier files say: a configuration's
      `rope_theta` and `rope_scaling`, each None if it is not there.
    theta: of each type, the base where none is said.
  """
  given = config.get("rope_parameters") or {}
  if not isinstance(given, Mapping) or {*given} - {*theta}:
    raise ValueError(
      f"rope_parameters must be an object of {sorted(theta)}, got {given!r:.80}"
    )
  longest = config.get("max_position_embeddings")
  for kind, said in given.items():
    if isinstance(said, Mapping) and said.get("truncate", True) is not True:
      raise ValueError(
        f"truncate must be true in rope_parameters of {kind}, where "
        f"transformers does not read it, got {said['truncate']!r}"
      )
  return {
    kind: rope(
      {
        **older[kind],
        "rope_parameters": given.get(kind),
        "max_position_embeddings": longest,
      },
      head_dim,
      theta=usual,
    )
    for kind, usual in theta.items()
  }


def _yarn(
  config: Mapping[str, Any], said: Mapping[str, Any], theta: float, dim: int
) -> dict[str, Any]:
  """The fields of a `Rope` with YaRN (Peng et al., 2023, section 3).

  Pairs that turn more than `beta_fast` times within the original length are
  kept, those that turn less than `beta_slow` times are stretched by `factor`,
  and between them there is a ramp over the pairs' numbers.
  """
  if dim % 2:
    raise ValueError(f"yarn rotates an even number of channels, got {dim}")
  longest = get(config, "max_position_embeddings", int)
  original = get(said, ROPE_LENGTH, int, longest)
  factor = get(said, "factor", float, longest / original)
  turns = lambda key, usual: get(said, key, float, usual)

  def pair(count: float) -> float:
    """The number of the pair that turns that many times, a float."""
    turn = original / (2 * math.pi * count)
    return dim * math.log(turn) / (2 * math.log(theta))

  low, high = pair(turns("beta_fast", 32.0)), pair(turns("beta_slow", 1.0))
  if get(said, "truncate", bool, True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  if low == high:
    high += 0.001
  pairs = range(-(-dim // 2))
  ramp = [min(max((i - low) / (high - low), 0), 1) for i in pairs]
  scale = lambda by: 0.1 * by * math.log(max(factor, 1)) + 1
  both = [get(said, key, float, None) for key in ("mscale", "mscale_all_dim")]
  usual = scale(both[0]) / scale(both[1]) if all(both) else scale(1)
  return {
    "factors": tuple(1 / (1 - r + r / factor) for r in ramp),
    "scale": get(said, "attention_factor", float, usual),
  }


def _longrope(
  config: Mapping[str, Any], said: Mapping[str, Any], pairs: int
) -> dict[str, Any]:
  """The fields of a `Rope` with LongRoPE (Ding et al., 2024).

  Each pair is stretched by a factor of its own: those of short texts, which are
  all that the model is given (`_longest`).
  """
  for key in ("short_factor", "long_factor"):
    each = said.get(key)
    if not isinstance(each, list) or len(each) != pairs:
      raise ValueError(
        f"{key} must be {pairs} numbers, one for each pair of channels, got "
        f"{each!r:.80}"
      )
    for value in each:
      get({key: value}, key, float)
  longest = get(config, "max_position_embeddings", int)
  original = get(said, ROPE_LENGTH, int, longest)
  factor = max(get(said, "factor", float, longest / original), 1)
  usual = math.sqrt(1 + math.log(factor) / math.log(original))
  return {
    "factors": tuple(map(float, said["short_factor"])),
    "scale": get(said, "attention_factor", float, usual),
  }
