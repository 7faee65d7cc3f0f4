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

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.formats import json_files
from models.formats.families.family import Settings
from models.formats.packed import Packed, unpacked, within
from models.formats.packings.block_fp8 import floats, in_blocks
from models.formats.packings.packing import (
  Opened,
  Packing,
  check_shape,
  group_of,
  join,
)
from models.formats.weights import Tensor

_FORMATS = (
  "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
)  # fmt: skip
_PARTS = (
  "weight_packed", "weight", "weight_scale", "weight_zero_point",
  "weight_shape", "weight_g_idx", "input_scale", "input_zero_point",
)  # fmt: skip
_STRATEGIES = ("tensor", "channel", "group", "block")
_OF_GROUP = {
  "weights", "targets", "input_activations", "output_activations", "format",
}  # fmt: skip
# How scales were found; `actorder` is what weight_g_idx says.
_HARMLESS = {
  "observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype",
  "dynamic",
}  # fmt: skip


def _open(settings: Settings) -> Opened:
  groups = settings["config_groups"]
  if not isinstance(groups, Mapping) or not groups:
    raise ValueError(f"config_groups must be an object, got {groups!r:.80}")
  sparsity = settings.get("sparsity_config") or {"format": "dense"}
  if not isinstance(sparsity, Mapping) or sparsity.get("format") != "dense":
    raise ValueError(
      f"sparsity_config must be of dense weights, got {sparsity!r:.80}"
    )
  formats = [settings["format"]]
  ways = []
  for name, group in groups.items():
    if not isinstance(group, Mapping):
      raise ValueError(f"{name} of config_groups must be an object")
    json_files.refuse_unknown(group, _OF_GROUP, f"settings of {name}")
    if group.get("output_activations") is not None:
      raise ValueError(f"output_activations of {name} are not read")
    formats += [group["format"]] if group.get("format") else []
    if group.get("weights") is not None:
      ways.append(_way(name, group["weights"]))
  # Of several formats the groups say which.
  if len({*formats}) > 1 and formats[0] == "mixed-precision":
    formats = formats[1:]
  for form in formats:
    if form not in _FORMATS:
      raise ValueError(
        f"the format of compressed-tensors must be one of {_FORMATS}, got "
        f"{form!r:.80}"
      )

  def joined(tensors):
    # Integers that are packed first, then weights of eight bits.
    for mark in ("weight_packed", "weight"):
      tensors = join(
        tensors,
        mark=mark,
        parts=_PARTS,
        make=lambda parts, mark=mark: _packed(parts, mark, ways),
      )
    return tensors

  said = ", ".join(dict.fromkeys(_in_words(way) for way in ways))
  return Opened(says=f"compressed-tensors, {said}", joined=joined)


def _way(name: str, given: Any) -> dict[str, Any]:
  """Settings of the packing of a group's weights."""
  if not isinstance(given, Mapping):
    raise ValueError(f"weights of {name} must be an object, got {given!r:.80}")
  way = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": None,
    "group_size": None, "block_structure": None,
  }  # fmt: skip
  json_files.refuse_unknown(given, {*way} | _HARMLESS, f"settings of {name}")
  way |= {key: value for key, value in given.items() if key in way}
  if way["strategy"] is None:
    of_size = {None: "tensor", -1: "channel"}
    way["strategy"] = of_size.get(way["group_size"], "group")
  sizes = way["block_structure"]
  allowed = {("int", 4), ("int", 8), ("float", 8)}
  if (
    (way["type"], way["num_bits"]) not in allowed
    or way["strategy"] not in _STRATEGIES
    or type(way["symmetric"]) is not bool
    or given.get("dynamic")
    or (way["strategy"] == "group" and type(way["group_size"]) is not int)
    or (way["strategy"] == "block" and not _are_sizes(sizes))
  ):
    raise ValueError(
      f"weights of {name} must be int of 4 or 8 bits, or float of 8, by "
      f"{', '.join(_STRATEGIES)}, static: got {dict(given)!r:.200}"
    )
  return way


def _are_sizes(value: Any) -> bool:
  return (
    isinstance(value, list)
    and len(value) == 2
    and all(type(x) is int and x > 0 for x in value)
  )


def _in_words(way: Mapping[str, Any]) -> str:
  by = {
    "group": f"groups of {way['group_size']}",
    "block": f"blocks of {way['block_structure']}",
    "channel": "one scale an output",
    "tensor": "one scale a weight",
  }[way["strategy"]]
  zeros = "" if way["symmetric"] else ", zero points"
  return f"{way['type']} of {way['num_bits']} bits, {by}{zeros}"


def _packed(
  parts: dict[str, Tensor], mark: str, ways: list[dict]
) -> tuple[tuple[int, int], Packed] | None:
  """Shape and parts of a weight; None if it is not packed."""
  weight = parts[mark]
  if mark == "weight" and weight.kind not in ("I8", "F8_E4M3"):
    return None
  if mark == "weight":
    shape = weight.shape
  else:
    check_shape("weight_shape", parts["weight_shape"], (2,), ("I64", "I32"))
    shape = tuple(parts["weight_shape"].read(()).tolist())
  if len(shape) != 2:
    raise ValueError(f"weight must have two axes, got {shape}")
  fitting = [way for way in ways if _is_of(way, parts, mark, shape)]
  if not fitting:
    raise ValueError(
      f"none of config_groups has {weight.kind} of {weight.shape} for {shape}, "
      f"scales of {parts['weight_scale'].shape} and "
      f"{'' if 'weight_zero_point' in parts else 'no '}zero points"
    )
  # Of a pair that differ in symmetry alone, zero points are the other one's.
  asymmetric = [way for way in fitting if not way["symmetric"]]
  given = asymmetric if "weight_zero_point" in parts else ()
  return shape, _of_way([*given, *fitting][0], parts, mark, shape)


def _scales_shape(way: Mapping[str, Any], shape) -> tuple[int, int]:
  """Shape of the scales of a weight."""
  outputs, inputs = shape
  if way["strategy"] == "group":
    return outputs, -(-inputs // way["group_size"])
  if way["strategy"] == "block":
    high, wide = way["block_structure"]
    return -(-outputs // high), -(-inputs // wide)
  return (outputs, 1) if way["strategy"] == "channel" else (1, 1)


def _is_of(way: Mapping[str, Any], parts, mark: str, shape) -> bool:
  """True if the parts of a weight are those of a group of the configuration."""
  bits, weight = way["num_bits"], parts[mark]
  scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
  expected = _scales_shape(way, shape)
  one = ((), (1,)) if way["strategy"] == "tensor" else ()
  if scales.shape != expected and scales.shape not in one:
    return False
  if zeros is None and not way["symmetric"]:
    return False
  if mark == "weight":
    return weight.kind == ("I8" if way["type"] == "int" else "F8_E4M3")
  words = -(-shape[1] * bits // 32)
  return (
    way["type"] == "int"
    and weight.kind == "I32"
    and weight.shape == (shape[0], words)
  )


def _of_way(way: Mapping[str, Any], parts, mark: str, shape) -> Packed:
  """The parts of a weight of a group of the configuration."""
  weight, scales = parts[mark], parts["weight_scale"]
  if way["strategy"] == "block":
    if not way["symmetric"] or mark != "weight":
      raise ValueError("blocks are read of symmetric weights of eight bits")
    return in_blocks(weight, scales, way["block_structure"])
  if scales.kind not in ("F32", "BF16", "F16"):
    raise ValueError(f"weight_scale must be floats, got {scales.kind}")
  outputs, inputs = shape
  bits, middle = way["num_bits"], 2 ** (way["num_bits"] - 1)
  size = way["group_size"] if way["strategy"] == "group" else -1
  groups = group_of(inputs, size)
  if "weight_g_idx" in parts:
    check_shape("weight_g_idx", parts["weight_g_idx"], (inputs,), ("I32",))
    groups_of_inputs = parts["weight_g_idx"].read(())
    if groups_of_inputs.min() < 0 or groups_of_inputs.max() > groups[-1]:
      raise ValueError(f"weight_g_idx must be in 0..{groups[-1]}")
    groups = groups_of_inputs
  num_groups = scales.shape[-1] if scales.shape else 1

  def of_rows(rows: slice) -> np.ndarray:
    table = floats(scales).reshape(-1, num_groups)
    return np.broadcast_to(table, (outputs, num_groups))[rows]

  def integers(rows: slice) -> np.ndarray:
    if mark == "weight":
      return weight.read((rows, slice(None)))
    values = unpacked(weight.read((rows, slice(None))), bits)
    return values[:, :inputs] - middle

  zeros = parts.get("weight_zero_point")
  if way["symmetric"] and zeros is not None:
    if np.any(zeros.read(()).astype(np.float32)):
      raise ValueError("zero points of symmetric weights must be 0")
    zeros = None

  one = num_groups == 1 and zeros is not None and zeros.shape in ((), (1,))
  if zeros is not None and not (one and zeros.kind == "I8"):
    words = (-(-outputs * bits // 32), num_groups)
    expected = words if zeros.kind == "I32" else scales.shape
    check_shape("weight_zero_point", zeros, expected, ("I32", "I8"))

  def zero_points(rows: slice) -> np.ndarray:
    if zeros.kind == "I8":
      whole = zeros.read(()).reshape(-1, num_groups).astype(np.int16)
      return np.broadcast_to(whole, (outputs, num_groups))[rows]
    at, inside = within(rows, outputs, 32 // bits)
    values = unpacked(zeros.read((at, slice(None))).T, bits)
    return values[:, inside].T - middle

  if zeros is None:
    whole = "fp8" if way["type"] == "float" else "int8"
    return Packed(
      kind=whole if mark == "weight" else f"int{bits}",
      group_of=groups,
      numbers=integers,
      scales=of_rows,
    )
  return Packed(
    # Differences of numbers of eight bits have nine.
    kind={4: "int8"}.get(bits) if way["type"] == "int" else None,
    group_of=groups,
    numbers=lambda rows: (
      integers(rows).astype(np.int16) - zero_points(rows)[:, groups]
    ),
    scales=of_rows,
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
