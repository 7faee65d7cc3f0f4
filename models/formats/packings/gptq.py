"""GPTQ's packing (Frantar et al., 2022), as AutoGPTQ and GPTQModel save it.

A weight with N outputs and D inputs, g integers per word (8 with 4 bits), has
`qweight i32[D / g, N]`, first input in the lowest bits; zero points `qzeros
i32[G, N / g]`, packed along outputs; `scales [G, N]`; and the group of each
input `g_idx i32[D]`, `d // group_size` unless inputs were quantized in order of
activation size (`desc_act`). `w[n, d] = (q - z) s`.

The format `gptq` stores `z - 1`, `gptq_v2` stores z. For symmetric weights z is
2^(bits - 1) whatever is stored, because some `gptq` files store it as `gptq_v2`
does.
"""

import numpy as np

from models.formats.families.family import Settings
from models.formats.packings.packing import (
  Packing,
  Parsed,
  check_shape,
  group_of,
  join,
)
from models.formats.quantized_files import tensor, unpacked, within
from models.formats.weights import Tensor

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_ADDED = {"gptq": 1, "gptq_v2": 0}  # to stored zero points


def _open(settings: Settings) -> Parsed:
  bits, size = settings["bits"], settings["group_size"]
  form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
  if form not in _ADDED:
    raise ValueError(
      f"the format of gptq must be one of {[*_ADDED]}, got {form!r:.80}"
    )
  symmetric, adds = settings["sym"], _ADDED[form]
  return Parsed(
    label=f"{form}, {bits} bits in groups of {size}",
    join=lambda tensors: join(
      tensors,
      mark="qweight",
      parts=_PARTS,
      make=lambda parts: _weight(parts, bits, size, symmetric, adds),
    ),
  )


def _weight(
  parts: dict[str, Tensor], bits: int, size: int, symmetric: bool, adds: int
) -> Tensor:
  """Joins the parts of a weight; `adds` is added to stored zero points."""
  count, middle = 32 // bits, 2 ** (bits - 1)
  weight, zeros, scales = (parts[name] for name in _PARTS[:3])
  words, outputs = weight.shape
  inputs = words * count
  groups = group_of(inputs, size)
  num_groups = int(groups[-1]) + 1
  if "g_idx" in parts:
    check_shape("g_idx", parts["g_idx"], (inputs,), ("I32",))
    groups = parts["g_idx"].read(())
  check_shape("qweight", weight, (words, outputs), ("I32",))
  check_shape("qzeros", zeros, (num_groups, -(-outputs // count)), ("I32",))
  check_shape("scales", scales, (num_groups, outputs), ("F16", "BF16", "F32"))

  def values(rows: slice) -> np.ndarray:
    unsigned = unpacked(weight.read((slice(None), rows)).T, bits)
    at, inside = within(rows, outputs, count)
    points = unpacked(zeros.read((slice(None), at)), bits)[:, inside].T
    if symmetric:
      if not any(np.all(points == z) for z in (middle - 1, middle)):
        raise ValueError(f"{zeros.name} does not fit symmetric weights")
      return unsigned - middle
    if adds and np.any(points == 2**bits - 1):  # kernels differ on these
      raise ValueError(f"{zeros.name} has zero points of {2**bits - 1}")
    return unsigned - (points + adds)[:, groups]

  return tensor(
    (outputs, inputs),
    dtype=(f"int{bits}" if symmetric else {4: "int8"}.get(bits)),
    group_of=groups,
    values=values,
    scales=lambda rows: scales.read((slice(None), rows)).T.astype(np.float32),
  )


PACKING = Packing(
  open=_open,
  defaults=dict(group_size=128, sym=True),
  fixed=dict(
    bits=(4, 8), pack_dtype=("int32",), is_marlin_format=(False,),
    dynamic=({},), adapter=(), rotation=(),
  ),
  # `desc_act` follows from g_idx; the rest are settings of calibration.
  harmless=frozenset(
    """
    desc_act lm_head checkpoint_format format meta damp_percent
    damp_auto_increment true_sequential static_groups mse act_group_aware
    quantizer model_name_or_path model_file_base_name dataset tokenizer
    batch_size backend block_name_to_quantize modules_in_block_to_quantize
    module_name_preceding_first_block cache_block_outputs max_input_length
    model_seqlen pad_token_id use_cuda_fp16 use_exllama disable_exllama
    exllama_config
    """.split()
  ),
)  # fmt: skip
