"""Floats of eight bits with a scale a block, as DeepSeek and Qwen release them.

Of a weight of N outputs and D inputs: `weight` is float8_e4m3fn `[N, D]`, and
`weight_scale_inv [ceil(N / a), ceil(D / b)]` has the scale of every block of a
outputs and b inputs (128 and 128 unless `weight_block_size` says otherwise), by
which it is multiplied, whatever the name says; or `weight_scale`, and with null
`weight_scale_inv` too, is one of all. Scales are floats, or the exponent of two
of each, 127 above what it is, in a byte.

Scales of activations (`input_scale`, `activation_scale`) are left out:
activations keep their type here.
"""

import numpy as np

from models.formats.families.family import Settings
from models.formats.packings.packing import Opened, Packing, join
from models.formats.quantized_files import tensor
from models.formats.weights import Tensor

_SCALES = ("weight_scale_inv", "weight_scale")
_PARTS = ("weight", *_SCALES, "input_scale", "activation_scale")
FLOATS = ("F32", "BF16", "F16", "F8_E8M0", "U8")


def _open(settings: Settings) -> Opened:
  sizes = settings["weight_block_size"]
  if sizes is not None and not (
    isinstance(sizes, list)
    and len(sizes) == 2
    and all(type(x) is int and x > 0 for x in sizes)
  ):
    raise ValueError(f"weight_block_size must be two sizes, got {sizes!r:.80}")

  def make(parts: dict[str, Tensor]):
    if parts["weight"].kind != "F8_E4M3":
      return None
    given = [name for name in _SCALES if name in parts]
    if len(given) != 1:
      raise ValueError(f"expected one of {_SCALES}, got {given}")
    of_one = None if given == ["weight_scale"] else sizes
    return in_blocks(parts["weight"], parts[given[0]], of_one)

  one = "one scale a weight"
  blocks = f"blocks of {sizes[0]} x {sizes[1]}" if sizes else one
  return Opened(
    says=f"fp8, {blocks}",
    joined=lambda tensors: join(
      tensors, mark="weight", parts=_PARTS, make=make
    ),
  )


def in_blocks(weight: Tensor, scales: Tensor, sizes) -> Tensor:
  """A weight with a scale for every block of it.

  Args:
    weight: `[N, D]`, of eight bits.
    scales: of the blocks.
    sizes: outputs and inputs of a block; None for all in one.

  Raises:
    ValueError: if shapes or types do not go together.
  """
  if len(weight.shape) != 2:
    raise ValueError(f"weight must have two axes, got {weight.shape}")
  outputs, inputs = weight.shape
  high, wide = sizes or (outputs, inputs)
  shape = (-(-outputs // high), -(-inputs // wide))
  fits = scales.shape == shape or (sizes is None and scales.shape in ((), (1,)))
  if not fits or scales.kind not in FLOATS:
    raise ValueError(
      f"scales must be {shape} of {' or '.join(FLOATS)}, got {scales.shape} of "
      f"{scales.kind}"
    )
  blocks = np.arange(outputs) // high

  def of_rows(rows: slice) -> np.ndarray:
    return floats(scales).reshape(shape)[blocks[rows]]

  return tensor(
    (outputs, inputs),
    dtype="fp8" if weight.kind == "F8_E4M3" else "int8",
    group_of=np.arange(inputs) // wide,
    values=lambda rows: weight.read((rows, slice(None))),
    scales=of_rows,
  )


def floats(scales: Tensor) -> np.ndarray:
  """Scales that are floats, or exponents of two in bytes, as float32."""
  values = scales.read(())
  if scales.kind == "U8":
    return np.ldexp(np.float32(1), values.astype(np.int32) - 127)
  return values.astype(np.float32)


PACKING = Packing(
  open=_open,
  defaults=dict(weight_block_size=[128, 128]),
  fixed=dict(
    fmt=("e4m3",), scale_fmt=("float", "ue8m0"), expert_dtype=("fp8",),
    activation_scheme=("dynamic", "static"), kv_cache_scheme=(),
  ),
  harmless=frozenset({"modules_to_convert"}),
)  # fmt: skip
