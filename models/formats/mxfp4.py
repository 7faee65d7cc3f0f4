"""MXFP4: 4-bit floats in blocks of 32 with a shared exponent, as in gpt-oss.

From OCP's microscaling formats (2023). A byte of `NAME_blocks` holds two
numbers, the first in the lower half; a byte of `NAME_scales` holds the exponent
of 32 numbers, plus 127.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from models.formats.weights import Index, Tensor
from models.networks.quantized_tensor import QuantizedTensor

_GROUP = 32


def join(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """Joins blocks and scales into one tensor, as if it were not quantized.

  Args:
    tensors: by name. An experts' projection `NAME` has `NAME_blocks`
      `u8[E, N, G, 16]` and `NAME_scales` `u8[E, N, G]`.

  Returns:
    The tensors, with `NAME` of `[E, 32 G, N]`. Tensors without a matching
    partner are unchanged.
  """
  joined = dict(tensors)
  for name, blocks in tensors.items():
    stem = name.removesuffix("_blocks")
    scales = tensors.get(f"{stem}_scales")
    if stem == name or scales is None or blocks.shape != (*scales.shape, 16):
      continue
    joined[stem] = _tensor(blocks, scales)
    del joined[name], joined[f"{stem}_scales"]
  return joined


def _tensor(blocks: Tensor, scales: Tensor) -> Tensor:
  """All experts' projections as one tensor; reads only the indexed experts."""
  name = blocks.name.removesuffix("_blocks")
  experts, rows, count = scales.shape
  shape = (experts, _GROUP * count, rows)

  def values(index: Index) -> np.ndarray:
    read = blocks.read(index[:1])
    codes = np.stack([read & 15, read >> 4], axis=-1)
    numbers = codes.reshape(*codes.shape[:2], -1).view(jnp.float4_e2m1fn)
    return numbers.swapaxes(1, 2)[:, *index[1:]]

  def powers(index: Index) -> np.ndarray:
    exponents = scales.read(index[:1]).astype(np.int32) - 127
    return np.ldexp(np.float32(1), exponents).swapaxes(1, 2)[:, *index[1:]]

  def dequantized(index: Index) -> np.ndarray:
    of_experts = index[:1]
    numbers = values(of_experts).astype(np.float32)
    numbers *= np.repeat(powers(of_experts), _GROUP, axis=1)
    return numbers[:, *index[1:]]

  return Tensor(
    name=name,
    shape=shape,
    kind="F32",
    read=dequantized,
    quantized=QuantizedTensor(
      values=Tensor(name=name, shape=shape, kind="fp4", read=values),
      scales=Tensor(
        name=name, shape=(experts, count, rows), kind="F32", read=powers
      ),
      inputs=-2,
    ),
  )
