"""Dequantises MXFP4: four-bit numbers in blocks of 32 with a shared exponent.

OCP's microscaling formats (2023), as gpt-oss is released: a byte of
`NAME_blocks` holds two numbers, the lower half first, and a byte of
`NAME_scales` the exponent of 32 of them, 127 above what it is.
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from models.formats.weights import Tensor

_HALF = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
_NUMBERS = np.array([*_HALF, *(-x for x in _HALF)], np.float32)


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """The numbers, `u8[..., n, 16], u8[..., n] -> f32[..., 32 n]`."""
  both = np.stack([blocks & 15, blocks >> 4], axis=-1)  # [..., n, 16, 2]
  numbers = _NUMBERS[both].reshape(*scales.shape, 32)
  exponents = scales.astype(np.int32)[..., None] - 127
  return np.ldexp(numbers, exponents).reshape(*scales.shape[:-1], -1)


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """Tensors of which blocks and scales are one, as if it were not quantised.

  Args:
    tensors: by name. Of experts' projections `NAME`, `NAME_blocks` is
      `u8[E, N, D / 32, 16]` and `NAME_scales` `u8[E, N, D / 32]`.

  Returns:
    The tensors, where `NAME` is `[E, D, N]`; what has no partner, or one of
    another shape, stays as it is.
  """
  found = dict(tensors)
  for name, blocks in tensors.items():
    stem = name.removesuffix("_blocks")
    scales = tensors.get(f"{stem}_scales")
    if stem == name or scales is None or len(blocks.shape) != 4:
      continue
    fits = blocks.shape == (*scales.shape, 16)
    if not fits or (blocks.kind, scales.kind) != ("U8", "U8"):
      continue
    experts, rows, count, _ = blocks.shape
    found[stem] = dataclasses.replace(
      blocks,
      name=blocks.name.removesuffix("_blocks"),
      shape=(experts, 32 * count, rows),
      kind="F32",
      read=functools.partial(_read, blocks, scales),
    )
    del found[name], found[f"{stem}_scales"]
  return found


def _read(
  blocks: Tensor, scales: Tensor, index: tuple[slice, ...]
) -> np.ndarray:
  of_experts = index[:1]
  numbers = dequantised(blocks.read(of_experts), scales.read(of_experts))
  return numbers.swapaxes(1, 2)[(slice(None), *index[1:])]
