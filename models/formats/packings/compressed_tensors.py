"""compressed-tensors (Neural Magic's, now vLLM's), three of its formats.

For a weight with N outputs, D inputs and G groups of inputs:
`pack-quantized`  `weight_packed i32[N, ceil(D b / 32)]` holds q + 2^(b - 1)
                  with b = 4 or 8 bits, first input in the lowest bits;
                  `weight_shape` is (N, D); `weight_zero_point
                  i32[ceil(N b / 32), G]` packs zero points along outputs;
`int-quantized`   `weight i8[N, D]`;
`float-quantized` `weight` in float8_e4m3fn.
`w[n, d] = (q - z) s`, with `weight_scale` `[N, G]` per group, `[N, 1]` per
channel, one number per tensor, `[ceil(N / a), ceil(D / b)]` per block.

The parts of a weight show whether and how it is packed: `targets` and `ignore`
are not read. Activations are not quantized, whatever `input_activations` says.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from models.formats import json_files
from models.formats.families.family import Settings
from models.formats.packings.packing import (
  Packing,
  Parsed,
  Tensors,
  check_shape,
  group_of,
  in_blocks,
  join,
)
from models.formats.quantized_files import unpacked, within
from models.formats.weights import Tensor

_FORMATS = (
  "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
)  # fmt: skip
_PARTS = (
  "weight_packed", "weight", "weight_scale", "weight_zero_point",
  "weight_shape", "input_scale", "input_zero_point",
)  # fmt: skip
_OF_GROUP = {
  "weights", "targets", "input_activations", "output_activations", "format",
}  # fmt: skip
# Calibration settings.
_HARMLESS = {
  "observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype",
  "dynamic",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scheme:
  """How the weights of one of `config_groups` are quantized."""

  num_bits: int = 8
  type: str = "int"
  symmetric: bool = True
  strategy: str | None = None
  group_size: int | None = None
  block_structure: list[int] | None = None

  def __post_init__(self):
    known = {("int", 4), ("int", 8), ("float", 8)}
    read = (self.type, self.num_bits) in known
    if not read or self.strategy not in ("group", "block", "channel", "tensor"):
      raise ValueError(f"weights of {dataclasses.asdict(self)} are unsupported")

  def __str__(self) -> str:
    size = f" {self.group_size}" if self.strategy == "group" else ""
    return f"{self.type}{self.num_bits} by {self.strategy}{size}"

  def sizes(self, inputs: int) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale; None for the whole tensor."""
    if self.strategy == "block":
      return tuple(self.block_structure)  # type: ignore[arg-type]
    if self.strategy == "group":
      return 1, self.group_size  # type: ignore[return-value]
    return (1, inputs) if self.strategy == "channel" else None

  def has(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> bool:
    """True if the parts of a weight of that shape match this scheme."""
    (outputs, inputs), sizes = shape, self.sizes(shape[1])
    high, wide = sizes or shape
    expected = [(-(-outputs // high), -(-inputs // wide))]
    if parts["weight_scale"].shape not in expected + [(1,), ()] * (not sizes):
      return False
    if "weight_packed" not in parts:
      kind = "I8" if self.type == "int" else "F8_E4M3"
      return self.symmetric and parts["weight"].kind == kind
    words = (outputs, -(-inputs * self.num_bits // 32))
    zeros = self.symmetric or "weight_zero_point" in parts
    integers = self.type == "int" and parts["weight_packed"].kind == "I32"
    return integers and zeros and parts["weight_packed"].shape == words


def _open(settings: Settings) -> Parsed:
  formats, schemes = [settings["format"]], []
  for name, group in settings["config_groups"].items():
    json_files.refuse_unknown(group, _OF_GROUP, f"settings of {name}")
    formats += [group["format"]] if group.get("format") else []
    if (given := group.get("weights")) is not None:
      fields = {field.name for field in dataclasses.fields(_Scheme)}
      known = fields | _HARMLESS
      json_files.refuse_unknown(given, known, f"settings of {name}")
      schemes.append(_Scheme(**{k: v for k, v in given.items() if k in fields}))
  # With mixed precision each group names its format.
  if formats[0] == "mixed-precision":
    formats = formats[1:]
  for form in formats:
    if form not in _FORMATS:
      raise ValueError(
        f"the format of compressed-tensors must be one of {_FORMATS}, got "
        f"{form!r:.80}"
      )

  def joined(tensors: Tensors) -> dict[str, Tensor]:
    # First packed integers, then 8-bit weights.
    make = lambda parts: _weight(parts, schemes)
    tensors = join(tensors, mark="weight_packed", parts=_PARTS, make=make)
    return join(tensors, mark="weight", parts=_PARTS, make=make)

  said = ", ".join(dict.fromkeys(map(str, schemes)))
  return Parsed(label=f"compressed-tensors, {said}", join=joined)


def _weight(parts: dict[str, Tensor], schemes: list[_Scheme]) -> Tensor | None:
  """Joins the parts of a weight; None if it is not quantized."""
  if packed := parts.get("weight_packed"):
    shape = tuple(parts["weight_shape"].read(()).tolist())
  elif parts["weight"].kind in ("I8", "F8_E4M3"):
    shape = parts["weight"].shape
  else:
    return None
  # Try asymmetric schemes first: only they have zero points.
  in_order = sorted(schemes, key=lambda scheme: scheme.symmetric)
  scheme = next((x for x in in_order if x.has(parts, shape)), None)
  if scheme is None:
    shapes = {name: (x.kind, x.shape) for name, x in parts.items()}
    raise ValueError(f"none of config_groups matches {shapes} for {shape}")
  zeros = parts.get("weight_zero_point")
  if scheme.symmetric and zeros is not None and np.any(zeros.read(())):
    raise ValueError("zero points of symmetric weights must be 0")
  (outputs, inputs), bits = shape, scheme.num_bits
  sizes, scales = scheme.sizes(inputs), parts["weight_scale"]
  if not packed:
    return in_blocks(
      shape,
      sizes,
      scales,
      lambda rows: parts["weight"].read((rows, slice(None))),
      "int8" if scheme.type == "int" else "fp8",
    )

  def signed(words: np.ndarray) -> np.ndarray:
    return unpacked(words, bits) - 2 ** (bits - 1)

  def values(rows: slice) -> np.ndarray:
    return signed(packed.read((rows, slice(None))))[:, :inputs]

  if scheme.symmetric:
    return in_blocks(shape, sizes, scales, values, f"int{bits}")
  groups = group_of(inputs, sizes[1])
  words = (-(-outputs * bits // 32), scales.shape[1])
  check_shape("weight_zero_point", zeros, words, ("I32",))

  def differences(rows: slice) -> np.ndarray:
    at, inside = within(rows, outputs, 32 // bits)
    points = signed(zeros.read((at, slice(None))).T)[:, inside].T
    return values(rows) - points[:, groups]

  # Differences of 8-bit integers have nine bits.
  dtype = "int8" if bits == 4 else None
  return in_blocks(shape, sizes, scales, differences, dtype)


PACKING = Packing(
  open=_open,
  fixed=dict(
    quantization_status=("compressed", "frozen"), kv_cache_scheme=(),
    transform_config=({},), moe_sparsity_config=({},),
  ),
  harmless=frozenset(
    """
    ignore global_compression_ratio version run_compressed
    use_optimized_inference sparsity_config
    """.split()
  ),
)  # fmt: skip
