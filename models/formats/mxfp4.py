"""Dequantizes MXFP4: four-bit numbers in blocks of 32 with a shared exponent.

OCP's microscaling formats (2023), as gpt-oss is released: a byte of
`NAME_blocks` holds two numbers, the lower half first, and a byte of
`NAME_scales` the exponent of 32 of them, 127 above what it is.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from models.formats.weights import Index, Tensor
from models.networks.quantized_tensor import QuantizedTensor

_GROUP = 32
_HALF = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
_NUMBERS = np.array([*_HALF, *(-x for x in _HALF)], np.float32)


def _quantized(blocks: Tensor, scales: Tensor) -> QuantizedTensor:
  """All experts' projections, `[E, D, N]` with scales `[E, G, N]`.

  Args:
    blocks: `u8[E, N, G, 16]`.
    scales: `u8[E, N, G]`.
  """

  def values(index: Index) -> np.ndarray:
    codes = _codes(blocks.read(index[:1]))
    numbers = codes.reshape(*codes.shape[:2], -1).view(jnp.float4_e2m1fn)
    return numbers.swapaxes(1, 2)[:, *index[1:]]

  def powers(index: Index) -> np.ndarray:
    exponents = scales.read(index[:1]).astype(np.int32) - 127
    return np.ldexp(np.float32(1), exponents).swapaxes(1, 2)[:, *index[1:]]

  experts, rows, count = scales.shape
  return QuantizedTensor(
    values=Tensor(
      name=blocks.name, shape=(experts, _GROUP * count, rows), kind="fp4",
      read=values,
    ),
    scales=Tensor(
      name=scales.name, shape=(experts, count, rows), kind="F32", read=powers
    ),
    inputs=-2,
  )  # fmt: skip


def _codes(blocks: np.ndarray) -> np.ndarray:
  """The codes of numbers, `u8[..., 16] -> u8[..., 16, 2]`."""
  return np.stack([blocks & 15, blocks >> 4], axis=-1)


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """The numbers, `u8[..., n, 16], u8[..., n] -> f32[..., 32 n]`."""
  numbers = _NUMBERS[_codes(blocks)].reshape(*scales.shape, 32)
  exponents = scales.astype(np.int32)[..., None] - 127
  return np.ldexp(numbers, exponents).reshape(*scales.shape[:-1], -1)


def is_in(tensors: Mapping[str, Tensor]) -> bool:
  """True if there are blocks among tensors."""
  return any(name.endswith("_blocks") for name in tensors)


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """Tensors of which blocks and scales are one, as if it were not quantized.

  Args:
    tensors: by name. Of experts' projections `NAME`, `NAME_blocks` is
      `u8[E, N, D / 32, 16]` and `NAME_scales` `u8[E, N, D / 32]`.

  Returns:
    The tensors, where `NAME` is `[E, D, N]`; what has no partner, or one of
    another shape, stays as it is.
  """
  joined_tensors = dict(tensors)
  for name, blocks in tensors.items():
    stem = name.removesuffix("_blocks")
    scales = tensors.get(f"{stem}_scales")
    if stem == name or scales is None or len(blocks.shape) != 4:
      continue
    fits = blocks.shape == (*scales.shape, 16)
    if not fits or (blocks.kind, scales.kind) != ("U8", "U8"):
      continue
    quantized = _quantized(blocks, scales)
    joined_tensors[stem] = Tensor(
      name=blocks.name.removesuffix("_blocks"),
      shape=quantized.shape,
      kind="F32",
      read=functools.partial(_read, blocks, scales),
      quantized=quantized,
    )
    del joined_tensors[name], joined_tensors[f"{stem}_scales"]
  return joined_tensors


def _read(blocks: Tensor, scales: Tensor, index: Index) -> np.ndarray:
  of_experts = index[:1]
  numbers = dequantized(blocks.read(of_experts), scales.read(of_experts))
  return numbers.swapaxes(1, 2)[:, *index[1:]]
