"""compressed-tensors (Neural Magic's, now vLLM's), three of its formats.

Of a weight of N outputs and D inputs, with G groups of inputs:
`pack-quantized`  `weight_packed i32[N, ceil(D b / 32)]` holds q + 2^(b - 1) of
                  b = 4 or 8 bits, the lowest bits the first input;
                  `weight_shape` says N and D; `weight_zero_point
                  i32[ceil(N b / 32), G]` holds zero points likewise, outputs
                  along a word (or is `i8[N, G]`);
`int-quantized`   `weight i8[N, D]`, `weight_zero_point i8[N, G]`;
`float-quantized` `weight` in float8_e4m3fn.
`w[n, d] = (q - z) s` with `weight_scale [N, G]`; `[N, 1]` a channel, one number
a tensor, `[ceil(N / a), ceil(D / b)]` a block. `weight_g_idx i32[D]` is the
group of each input, where it is not `d // group_size`.

Which weights are packed, and how of several ways, their parts say: `targets`
and `ignore` are not asked. Activations keep their type, whatever
`input_activations` says.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.formats import json_files
from models.formats.families.family import Settings
from models.formats.packings.block_fp8 import floats, in_blocks
from models.formats.packings.packing import (
  Opened,
  Packing,
  Tensors,
  check_shape,
  group_of,
  join,
)
from models.formats.quantized_files import tensor, unpacked, within
from models.formats.weights import Tensor

_FORMATS = (
  "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
)  # fmt: skip
_PARTS = (
  "weight_packed", "weight", "weight_scale", "weight_zero_point",
  "weight_shape", "weight_g_idx", "input_scale", "input_zero_point",
)  # fmt: skip
_OF_GROUP = {
  "weights", "targets", "input_activations", "output_activations", "format",
}  # fmt: skip
# How scales were found; `actorder` is what weight_g_idx says.
_HARMLESS = {
  "observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype",
  "dynamic",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scheme:
  """How the weights of a group of the configuration are quantized."""

  num_bits: int = 8
  type: str = "int"
  symmetric: bool = True
  strategy: Any = None
  group_size: Any = None
  block_structure: Any = None

  def __post_init__(self):
    if self.strategy is None:
      of_size = {None: "tensor", -1: "channel"}
      strategy = of_size.get(self.group_size, "group")
      object.__setattr__(self, "strategy", strategy)

  def __str__(self) -> str:
    by = {
      "group": f"groups of {self.group_size}",
      "block": f"blocks of {self.block_structure}",
      "channel": "one scale an output",
      "tensor": "one scale a weight",
    }[self.strategy]
    zeros = "" if self.symmetric else ", zero points"
    return f"{self.type} of {self.num_bits} bits, {by}{zeros}"

  def check(self) -> None:
    """Raises ValueError for a scheme that is not read."""
    size, sizes = self.group_size, self.block_structure
    read = {
      "tensor": True,
      "channel": True,
      "group": type(size) is int and size > 0,
      "block": self.symmetric
      and isinstance(sizes, list)
      and len(sizes) == 2
      and all(type(x) is int and x > 0 for x in sizes),
    }
    bits = (self.type, self.num_bits)
    if bits not in {("int", 4), ("int", 8), ("float", 8)} or not read.get(
      self.strategy
    ):
      raise ValueError(f"weights are not read of {dataclasses.asdict(self)}")

  def has(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> bool:
    """True if the parts of a weight of that shape are of this scheme."""
    scales, (outputs, inputs) = parts["weight_scale"].shape, shape
    if self.strategy == "group":
      expected = [(outputs, -(-inputs // self.group_size))]
    elif self.strategy == "block":
      high, wide = self.block_structure
      expected = [(-(-outputs // high), -(-inputs // wide))]
    elif self.strategy == "channel":
      expected = [(outputs, 1)]
    else:
      expected = [(1, 1), (1,), ()]
    if scales not in expected:
      return False
    if "weight_zero_point" not in parts and not self.symmetric:
      return False
    if "weight_packed" not in parts:
      kind = "I8" if self.type == "int" else "F8_E4M3"
      return parts["weight"].kind == kind
    packed = parts["weight_packed"]
    words = (outputs, -(-inputs * self.num_bits // 32))
    integers = self.type == "int" and self.strategy != "block"
    return integers and (packed.kind, packed.shape) == ("I32", words)


def _open(settings: Settings) -> Opened:
  groups = settings["config_groups"]
  sparsity = settings.get("sparsity_config") or {"format": "dense"}
  if sparsity["format"] != "dense":
    raise ValueError(f"sparsity_config must be dense, got {sparsity!r:.80}")
  formats, schemes = [settings["format"]], []
  for name, group in groups.items():
    json_files.refuse_unknown(group, _OF_GROUP, f"settings of {name}")
    if group.get("output_activations") is not None:
      raise ValueError(f"output_activations of {name} are not read")
    formats += [group["format"]] if group.get("format") else []
    if (given := group.get("weights")) is not None:
      fields = {field.name for field in dataclasses.fields(_Scheme)}
      known = fields | _HARMLESS
      json_files.refuse_unknown(given, known, f"settings of {name}")
      if given.get("dynamic"):
        raise ValueError(f"weights of {name} are dynamic")
      scheme = _Scheme(**{k: v for k, v in given.items() if k in fields})
      scheme.check()
      schemes.append(scheme)
  # Of several formats the groups say which.
  if len({*formats}) > 1 and formats[0] == "mixed-precision":
    formats = formats[1:]
  for form in formats:
    if form not in _FORMATS:
      raise ValueError(
        f"the format of compressed-tensors must be one of {_FORMATS}, got "
        f"{form!r:.80}"
      )

  def joined(tensors: Tensors) -> dict[str, Tensor]:
    # Integers that are packed first, then weights of eight bits.
    make = lambda parts: _weight(parts, schemes)
    tensors = join(tensors, mark="weight_packed", parts=_PARTS, make=make)
    return join(tensors, mark="weight", parts=_PARTS, make=make)

  said = ", ".join(dict.fromkeys(map(str, schemes)))
  return Opened(says=f"compressed-tensors, {said}", joined=joined)


def _weight(parts: dict[str, Tensor], schemes: list[_Scheme]) -> Tensor | None:
  """The weight of some parts; None if it is not quantized."""
  if "weight_packed" in parts:
    check_shape("weight_shape", parts["weight_shape"], (2,), ("I64", "I32"))
    shape = tuple(parts["weight_shape"].read(()).tolist())
  elif parts["weight"].kind in ("I8", "F8_E4M3"):
    shape = parts["weight"].shape
  else:
    return None
  fitting = [x for x in schemes if len(shape) == 2 and x.has(parts, shape)]
  if not fitting:
    shapes = {name: (x.kind, x.shape) for name, x in parts.items()}
    raise ValueError(f"none of config_groups has {shapes} for {shape}")
  # Of a pair that differ in symmetry alone, zero points are the other one's.
  asymmetric = [x for x in fitting if not x.symmetric]
  given = asymmetric if "weight_zero_point" in parts else []
  return _of_scheme([*given, *fitting][0], parts, shape)


def _of_scheme(
  scheme: _Scheme, parts: dict[str, Tensor], shape: tuple[int, int]
) -> Tensor:
  """The weight of parts that a scheme has."""
  (outputs, inputs), bits = shape, scheme.num_bits
  packed, scales = "weight_packed" in parts, parts["weight_scale"]
  weight = parts["weight_packed" if packed else "weight"]
  if scheme.strategy == "block":
    return in_blocks(weight, scales, scheme.block_structure)
  if scales.kind not in ("F32", "BF16", "F16"):
    raise ValueError(f"weight_scale must be floats, got {scales.kind}")
  groups = group_of(
    inputs, scheme.group_size if scheme.strategy == "group" else -1
  )
  if "weight_g_idx" in parts:
    check_shape("weight_g_idx", parts["weight_g_idx"], (inputs,), ("I32",))
    most, groups = groups[-1], parts["weight_g_idx"].read(())
    if groups.min() < 0 or groups.max() > most:
      raise ValueError(f"weight_g_idx must be in 0..{most}")
  num_groups = scales.shape[-1] if scales.shape else 1

  def of_rows(array: np.ndarray, rows: slice) -> np.ndarray:
    array = array.reshape(-1, num_groups)
    return np.broadcast_to(array, (outputs, num_groups))[rows]

  def signed(words: np.ndarray) -> np.ndarray:
    return unpacked(words, bits) - 2 ** (bits - 1)

  def values(rows: slice) -> np.ndarray:
    some = weight.read((rows, slice(None)))
    return signed(some)[:, :inputs] if packed else some

  zeros = parts.get("weight_zero_point")
  if scheme.symmetric and zeros is not None:
    if np.any(zeros.read(()).astype(np.float32)):
      raise ValueError("zero points of symmetric weights must be 0")
    zeros = None
  if zeros is None:
    dtype = "fp8" if scheme.type == "float" else f"int{bits if packed else 8}"
    return tensor(
      shape, dtype=dtype, group_of=groups, values=values,
      scales=lambda rows: of_rows(floats(scales), rows),
    )  # fmt: skip
  whole = zeros.kind == "I8"
  one = whole and num_groups == 1 and zeros.shape in ((), (1,))
  words = (-(-outputs * bits // 32), num_groups)
  if not one:
    expected = scales.shape if whole else words
    check_shape("weight_zero_point", zeros, expected, ("I32", "I8"))

  def zero_points(rows: slice) -> np.ndarray:
    if whole:
      return of_rows(zeros.read(()).astype(np.int16), rows)
    at, inside = within(rows, outputs, 32 // bits)
    return signed(zeros.read((at, slice(None))).T)[:, inside].T

  return tensor(
    shape,
    # Differences of numbers of eight bits have nine.
    dtype="int8" if (scheme.type, bits) == ("int", 4) else None,
    group_of=groups,
    values=lambda rows: (
      values(rows).astype(np.int16) - zero_points(rows)[:, groups]
    ),
    scales=lambda rows: of_rows(floats(scales), rows),
  )


PACKING = Packing(
  open=_open,
  fixed=dict(
    quantization_status=("compressed", "frozen"), kv_cache_scheme=(),
    transform_config=({},), moe_sparsity_config=({},),
  ),
  harmless=frozenset(
    """
    ignore global_compression_ratio version run_compressed
    use_optimized_inference
    """.split()
  ),
)  # fmt: skip
