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

from models.formats.families.family import Settings
from models.formats.packings.packing import Opened, Packing, in_blocks, join
from models.formats.weights import Tensor

_SCALES = ("weight_scale_inv", "weight_scale")
_PARTS = ("weight", *_SCALES, "input_scale", "activation_scale")


def _open(settings: Settings) -> Opened:
  sizes = settings["weight_block_size"]
  if sizes is not None and len(sizes) != 2:
    raise ValueError(f"weight_block_size must be two sizes, got {sizes!r:.80}")

  def make(parts: dict[str, Tensor]):
    weight = parts["weight"]
    if weight.kind != "F8_E4M3":
      return None
    given = [name for name in _SCALES if name in parts]
    if len(given) != 1:
      raise ValueError(f"expected one of {_SCALES}, got {given}")
    return in_blocks(
      weight.shape,
      None if given == ["weight_scale"] else sizes,
      parts[given[0]],
      lambda rows: weight.read((rows, slice(None))),
      "fp8",
    )

  return Opened(
    says="fp8" if sizes is None else f"fp8 in blocks of {sizes}",
    joined=lambda tensors: join(
      tensors, mark="weight", parts=_PARTS, make=make
    ),
  )


PACKING = Packing(
  open=_open,
  defaults=dict(weight_block_size=[128, 128]),
  fixed=dict(
    fmt=("e4m3",), scale_fmt=("float", "ue8m0"), expert_dtype=("fp8",),
    activation_scheme=("dynamic", "static"), kv_cache_scheme=(),
  ),
  harmless=frozenset({"modules_to_convert"}),
)  # fmt: skip
