"""Rotary positions: how fast each pair of channels turns, and the turning.

A pair of channels is turned by its position times its frequency; by default
`theta ** (-2 i / d)` for pair i of a head with d channels that rotate. The
kinds rescale that:

  default       as it is;
  linear        all divided by `factor` (position interpolation);
  llama3        long wavelengths divided by `factor`, short ones kept, those
                between `original_max_positions` over the high and the low
                factor blended;
  yarn          the same along a ramp over the pairs' numbers, and cosines and
                sines times `scale` (Peng et al., 2023, section 3);
  longrope      each pair divided by a `factors` of its own (Ding et al., 2024);
  dynamic       as it is up to the positions that the model is meant for;
  proportional  the first share of the pairs turns, at the frequencies of the
                whole head; the rest stands still (Gemma 4).

In every other kind a `share` below 1 leaves the last channels of a head out
("partial"). Pair i is channels i and i + d / 2.

**Kinds that depend on the length of the text.** In transformers, `dynamic` and
`longrope` choose the frequencies of a pass by the longest row of its batch, and
keys that are cached were turned by whatever was chosen before: a row's logits
then depend on its neighbours and on how its prompt was cut. One choice is made
here instead, for all rows and for good: `dynamic` is that of texts within
`max_position_embeddings`, `longrope` that of a `length` given when the
configuration is read. Within `Rope.max_positions` it is what transformers
computes; a model must be refused texts beyond it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

FULL, SLIDING = "full_attention", "sliding_attention"

# Keys of each kind in a config.json, those that must be there first.
_LENGTH = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
  "default": ((), ()),
  "linear": (("factor",), ()),
  "dynamic": (("factor",), ()),
  "llama3": (_LLAMA3, (_LENGTH,)),
  "yarn": (
    (),
    ("factor", _LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale",
     "mscale_all_dim", "truncate"),
  ),
  "longrope": (
    ("short_factor", "long_factor"), ("factor", _LENGTH, "attention_factor"),
  ),
  "proportional": ((), ("factor",)),
}  # fmt: skip
_COMMON = ("rope_type", "rope_theta", "partial_rotary_factor")
_ALIASES = {
  "type": "rope_type",
  "rotary_emb_base": "rope_theta",
  "rotary_pct": "partial_rotary_factor",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """The rotary positions of a layer.

  Attributes:
    kind: one of the module's kinds.
    theta: base of the frequencies.
    share: of a head's channels that rotate (of `proportional`: of its pairs
      that turn).
    factor: what frequencies are divided by.
    original_max_positions: of `llama3` and `yarn`, the length of training.
    low_freq_factor, high_freq_factor: of `llama3`.
    beta_fast, beta_slow: of `yarn`, how often a pair turns within the original
      length that is kept, and that is divided.
    truncate: of `yarn`: the ramp begins and ends at whole pairs.
    factors: of `longrope`, what each pair's frequency is divided by.
    scale: of cosines and sines, and squared of what queries find in keys.
    max_positions: the longest text for which this is what transformers
      computes; None for any.

  Raises:
    ValueError: for an unknown kind, or numbers out of range.
  """

  kind: str = "default"
  theta: float = 10_000.0
  share: float = 1.0
  factor: float = 1.0
  original_max_positions: int | None = None
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  factors: tuple[float, ...] | None = None
  scale: float = 1.0
  max_positions: int | None = None

  def __post_init__(self):
    if self.kind not in _KINDS:
      raise ValueError(
        f"rope_type must be one of {sorted(_KINDS)}, got {self.kind!r}"
      )
    if not 0 < self.share <= 1:
      raise ValueError(
        f"partial_rotary_factor must be in (0, 1], got {self.share}"
      )
    if self.theta <= 1:
      raise ValueError(f"rope_theta must be above 1, got {self.theta}")
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
        "low_freq_factor must be below high_freq_factor, got "
        f"{self.low_freq_factor} and {self.high_freq_factor}"
      )
    needs = self.kind in ("llama3", "yarn")
    if needs and self.original_max_positions is None:
      raise ValueError(f"{self.kind} needs original_max_positions")
    if (self.kind == "longrope") != (self.factors is not None):
      raise ValueError("factors are longrope's, and longrope needs them")

  def rotated(self, head_dim: int) -> int:
    """d: channels of a head that the angles cover."""
    return head_dim if self.kind == "proportional" else int(
      head_dim * self.share
    )  # fmt: skip


# ------------------------------------------------------------------- angles


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
  """Radians a position of each pair, `f32[pairs]`, computed in float64.

  Raises:
    ValueError: if `factors` are of another number of pairs.
  """
  dim = rope.rotated(head_dim)
  freq = 1.0 / rope.theta ** (np.arange(0, dim, 2) / dim)
  if rope.kind in ("linear", "proportional"):
    freq = freq / rope.factor
  if rope.kind == "proportional":
    turning = int(rope.share * head_dim // 2)
    freq = np.where(np.arange(len(freq)) < turning, freq, 0.0)
  elif rope.kind == "llama3":
    turns = rope.original_max_positions * freq / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    freq = keep * freq + (1 - keep) * freq / rope.factor
  elif rope.kind == "yarn":
    ramp = _ramp(rope, dim, len(freq))
    freq = freq * (1 - ramp + ramp / rope.factor)
  elif rope.kind == "longrope":
    if len(rope.factors) != len(freq):
      raise ValueError(
        f"short_factor and long_factor must have {len(freq)} entries, one a "
        f"pair of channels, got {len(rope.factors)}"
      )
    freq = freq / np.array(rope.factors)
  return freq.astype(np.float32)


def _ramp(rope: Rope, dim: int, pairs: int) -> np.ndarray:
  """YaRN's share of dividing, `f64[pairs]`: 0 for kept pairs, then up to 1."""
  length, base = rope.original_max_positions, math.log(rope.theta)

  def pair(turns: float) -> float:
    """The pair that turns so often within the original length, a fraction."""
    return dim * math.log(length / (turns * 2 * math.pi)) / (2 * base)

  low, high = pair(rope.beta_fast), pair(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  if low == high:
    high += 0.001
  return np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)


def rotary_table(
  rope: Rope, head_dim: int, positions: Array
) -> tuple[Array, Array]:
  """Cosines and sines, each `f32[B, T, 1, pairs]`.

  Args:
    rope: the kind.
    head_dim: C.
    positions: `i32[B, T]`.
  """
  angle = positions[..., None, None].astype(jnp.float32)
  angle = angle * frequencies(rope, head_dim)
  return rope.scale * jnp.cos(angle), rope.scale * jnp.sin(angle)


def rotate(x: Array, table: tuple[Array, Array]) -> Array:
  """Turns the first channels of every head.

  Args:
    x: `[B, T, H, C]`.
    table: from `rotary_table`.

  Returns:
    `[B, T, H, C]`, in x's dtype.
  """
  cos, sin = table
  half = cos.shape[-1]
  a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


# -------------------------------------------------------------- config.json


def rope_from_json(
  config: Mapping[str, Any],
  *,
  layer_type: str | None = None,
  theta: float = 10_000.0,
  share: float = 1.0,
  length: int | None = None,
) -> Rope | None:
  """What a `config.json` says of rotary positions.

  transformers 5 keeps everything in `rope_parameters`, by layer type in models
  whose layers differ; before, base and share were keys of the configuration
  (GPT-NeoX has names of its own for them) and the rest was in `rope_scaling`.
  What is given twice must be the same.

  Args:
    config: the file's contents, or of its `text_config`.
    layer_type: FULL or SLIDING in models whose rotary positions differ by type
      (Gemma 3 and 4, OLMo 3), else None. There `rope_scaling` is that of full
      layers alone.
    theta: the base if the file has none.
    share: of channels that rotate if the file has none.
    length: the longest text that the model will be given, which longrope's
      factors are chosen by; by default a text of training's length at most.

  Returns:
    The description; None for a layer type without rotary positions.

  Raises:
    ValueError: for an unknown kind or key (named), values out of range or
      contradicting each other, and lengths beyond what `dynamic` is exact for.
  """
  found = _gather(config, layer_type, theta)
  if found is None:
    return None
  kind = found.get("rope_type", "default")
  if not isinstance(kind, str) or kind not in _KINDS:
    raise ValueError(f"rope_type must be one of {sorted(_KINDS)}, got {kind!r}")
  required, optional = _KINDS[kind]
  if kind == "default" and found.get("factor") == 1:
    del found["factor"]
  if unknown := sorted({*found} - {*_COMMON, *required, *optional}):
    raise ValueError(
      f"rotary positions of type {kind!r} have no {', '.join(unknown)}"
    )
  if lacking := [key for key in required if key not in found]:
    raise ValueError(f"{kind} needs {', '.join(lacking)}")
  longest = config.get("max_position_embeddings")
  given: dict[str, Any] = dict(
    kind=kind,
    theta=_number(found, "rope_theta", theta),
    share=_number(found, "partial_rotary_factor", share),
  )
  if kind == "dynamic":
    limit = _number({"max_position_embeddings": longest},
                    "max_position_embeddings", whole=True)  # fmt: skip
    if length is not None and length > limit:
      raise ValueError(
        f"dynamic frequencies of texts beyond {limit} positions depend on the "
        f"longest row of a batch: longer texts ({length}) are not supported"
      )
    _number(found, "factor")  # of no effect up to there
    return Rope(**given, max_positions=limit)
  if "factor" in {*required, *optional}:
    given["factor"] = _number(found, "factor", 1.0)
  if _LENGTH in {*required, *optional}:
    original = _number(found, _LENGTH, longest, whole=True)
    if longest is not None and "factor" not in found:
      given["factor"] = longest / original
    if kind == "longrope":
      return _longrope(found, given, original, length)
    given["original_max_positions"] = original
  for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
    if key in found:
      given[key] = _number(found, key)
  if kind == "yarn":
    given["truncate"] = _flag(found, "truncate")
    given["scale"] = _yarn_scale(found, given["factor"])
  return Rope(**given)


def _gather(config, layer_type: str | None, theta: float) -> dict | None:
  """All keys of one layer type, aliases resolved and nulls left out."""
  outside = {"rope_theta", "partial_rotary_factor", *_ALIASES} - {"type"}
  sources = [{key: config.get(key) for key in outside}]
  inside = {}
  for where in ("rope_parameters", "rope_scaling"):
    inside[where] = config.get(where) or {}
    if not isinstance(inside[where], Mapping):
      raise ValueError(f"{where} must be an object, got {inside[where]!r}")
  new, old = inside["rope_parameters"], inside["rope_scaling"]
  nested = {FULL, SLIDING} & {*new}
  if layer_type is None:
    if nested:
      raise ValueError(
        "rope_parameters are given by layer type, in a model whose layers have "
        "the same"
      )
    sources += [new, old]
  else:
    if new and not nested:
      raise ValueError(
        f"rope_parameters must be given by layer type, got {new}"
      )
    if nested and new.get(layer_type, {}) is None:
      return None
    own = dict(new.get(layer_type) or {})
    if own.get("truncate", True) is not True:
      raise ValueError(
        "truncate must be true in rope_parameters given by layer type, where "
        f"transformers does not read it, got {own['truncate']!r}"
      )
    sources.append(own)
    if layer_type == SLIDING:
      sources[0].pop("rotary_emb_base")
      base, local = sources[0].pop("rope_theta"), "rope_local_base_freq"
      if config.get(local) is not None:
        sources.append({"rope_theta": config[local]})
      elif not nested and base is not None and base != theta:
        raise ValueError(
          f"{local} must be given beside a rope_theta of {base}: that of "
          f"sliding layers would be {theta}"
        )
    else:
      sources.append(old)
  found: dict[str, Any] = {}
  for key, value in (item for source in sources for item in source.items()):
    key = _ALIASES.get(key, key)
    if value is not None and found.setdefault(key, value) != value:
      raise ValueError(f"{key} is both {found[key]!r} and {value!r}")
  length = config.get(_LENGTH)
  if length is not None and _LENGTH in _KINDS.get(
    str(found.get("rope_type")), ((), ())
  )[1]:  # fmt: skip
    if found.setdefault(_LENGTH, length) != length:
      raise ValueError(f"{_LENGTH} is both {found[_LENGTH]!r} and {length!r}")
  return found


def _longrope(found, given: dict, original: int, length: int | None) -> Rope:
  """The factors of texts up to a length, and what cosines are multiplied by."""
  for key in ("short_factor", "long_factor"):
    values = found[key]
    if not isinstance(values, list) or not values:
      raise ValueError(f"{key} must be a list of numbers, got {values!r}")
    for value in values:
      _number({key: value}, key)
  long = length is not None and length > original
  factor = given.pop("factor")
  usual = 1.0
  if factor > 1:
    usual = math.sqrt(1 + math.log(factor) / math.log(original))
  return Rope(
    **given,
    factors=tuple(map(float, found["long_factor" if long else "short_factor"])),
    scale=_number(found, "attention_factor", usual),
    max_positions=None if long else original,
  )


def _yarn_scale(found, factor: float) -> float:
  """YaRN's attention factor, given or the one of its paper's equation 22."""
  scale = lambda by: 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0
  usual = scale(1.0)
  if found.get("mscale") and found.get("mscale_all_dim"):
    both = (_number(found, key) for key in ("mscale", "mscale_all_dim"))
    over, under = map(scale, both)
    usual = over / under
  return _number(found, "attention_factor", usual)


def _number(found, key: str, default=None, *, whole: bool = False):
  """A checked positive number; `default` stands for a key left out."""
  value = found.get(key, default)
  kinds = (int,) if whole else (int, float)
  if type(value) not in kinds or not 0 < value < math.inf:
    expected = "integer" if whole else "number"
    raise ValueError(f"{key} must be a positive {expected}, got {value!r}")
  return value if whole else float(value)


def _flag(found, key: str) -> bool:
  value = found.get(key, True)
  if not isinstance(value, bool):
    raise ValueError(f"{key} must be true or false, got {value!r}")
  return value
