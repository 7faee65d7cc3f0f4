"""FP8 with a scale per block, as released by DeepSeek and Qwen.

A weight with N outputs and D inputs has `weight`, float8_e4m3fn `[N, D]`, and
`weight_scale_inv [ceil(N / a), ceil(D / b)]`, which despite its name multiplies
each block of a outputs and b inputs (`weight_block_size`, 128 x 128 by
default). `weight_scale`, or `weight_scale_inv` if `weight_block_size` is null,
is one scale for the whole tensor. Scales are floats, or bytes with a power of
two's exponent plus 127.

Scales of activations (`input_scale`, `activation_scale`) are ignored:
activations are not quantized here.
"""

from models.formats.families.family import Settings
from models.formats.packings.packing import Packing, Parsed, in_blocks, join
from models.formats.weights import Tensor

_SCALES = ("weight_scale_inv", "weight_scale")
_PARTS = ("weight", *_SCALES, "input_scale", "activation_scale")


def _open(settings: Settings) -> Parsed:
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

  return Parsed(
    label="fp8" if sizes is None else f"fp8 in blocks of {sizes}",
    join=lambda tensors: join(tensors, mark="weight", parts=_PARTS, make=make),
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
