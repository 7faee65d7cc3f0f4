"""AWQ's packing (Lin et al., 2023), as AutoAWQ saves it for its GEMM kernels.

A weight with N outputs and D inputs has `qweight i32[D, N / 8]` and `qzeros
i32[G, N / 8]`, 4-bit integers with eight outputs per word, and `scales [G, N]`;
`w[n, d] = (q - z) s`. The outputs in a word are, from the lowest bits up,
0, 2, 4, 6, 1, 3, 5, 7.
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

_PARTS = ("qweight", "qzeros", "scales")
_COUNT = 8  # numbers per word
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word, lowest bits first
_PLACES = np.argsort(_ORDER)


def _open(settings: Settings) -> Parsed:
  size = settings["group_size"]
  form = settings.get("version") or settings.get("format") or "gemm"
  if not isinstance(form, str) or form.lower() != "gemm":
    raise ValueError(f"the version of awq must be 'gemm', got {form!r:.80}")
  return Parsed(
    label=f"awq, 4 bits in groups of {size}",
    join=lambda tensors: join(
      tensors,
      mark="qweight",
      parts=_PARTS,
      make=lambda parts: _weight(parts, size),
    ),
  )


def _in_order(numbers: np.ndarray) -> np.ndarray:
  """Unpacked words with outputs in order, `[..., 8 n]`."""
  words = numbers.reshape(*numbers.shape[:-1], -1, _COUNT)
  return words[..., _PLACES].reshape(numbers.shape)


def _weight(parts: dict[str, Tensor], size: int) -> Tensor:
  """Joins the parts of a weight."""
  weight, zeros, scales = (parts[name] for name in _PARTS)
  inputs, words = weight.shape
  outputs = words * _COUNT
  groups = group_of(inputs, size)
  num_groups = int(groups[-1]) + 1
  check_shape("qweight", weight, (inputs, words), ("I32",))
  check_shape("qzeros", zeros, (num_groups, words), ("I32",))
  check_shape("scales", scales, (num_groups, outputs), ("F16", "BF16", "F32"))

  def some(words: Tensor, rows: slice) -> np.ndarray:
    at, inside = within(rows, outputs, _COUNT)
    ordered = _in_order(unpacked(words.read((slice(None), at)), 4))
    return ordered[:, inside].T

  return tensor(
    (outputs, inputs),
    dtype="int8",  # from -15 to 15
    group_of=groups,
    values=lambda rows: some(weight, rows) - some(zeros, rows)[:, groups],
    scales=lambda rows: scales.read((slice(None), rows)).T.astype(np.float32),
  )


PACKING = Packing(
  open=_open,
  defaults=dict(group_size=128),
  fixed=dict(bits=(4,), zero_point=(True,), pack_dtype=("int32",)),
  harmless=frozenset(
    """
    version format backend do_fuse fuse_max_seq_len modules_to_fuse
    exllama_config meta checkpoint_format lm_head
    """.split()
  ),
)
