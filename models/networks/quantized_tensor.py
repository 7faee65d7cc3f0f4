"""`QuantizedTensor`: an 8-bit or 4-bit weight with scales.

Values are integers or floats of eight or four bits, and every output, or every
group of consecutive inputs of an output, has a scale: `w = q s`. Weights in
files may also have minima, `w = q s + m`. Rounding is symmetric, `s = max |w| /
M` and `q = round(w / s)`, with M the largest value of the type, as in
LLM.int8() by rows (Dettmers et al., 2022, section 2.1).

Letters in shapes: N outputs, D inputs, G groups of inputs.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.structs import struct


class Dtype(NamedTuple):
  """A type of quantized values.

  Attributes:
    dtype: dtype of the values.
    largest: M.
    group: default number of inputs that share a scale; None for all.
  """

  dtype: Any
  largest: float
  group: int | None


DTYPES = {
  "int8": Dtype(jnp.int8, 127.0, None),
  "int4": Dtype(jnp.int4, 7.0, 32),
  "fp8": Dtype(jnp.float8_e4m3fn, 448.0, None),
  "fp4": Dtype(jnp.float4_e2m1fn, 6.0, 32),
}


@struct
class QuantizedTensor:
  """A quantized weight: arrays, their shapes, or unread tensors of a file.

  Attributes:
    values: `[..., N, D]`, or `[..., D, N]` if `inputs` is -2.
    scales: `f32[..., N, G]`, or `f32[..., G, N]`.
    minima: like scales; None if all are 0.
    inputs: the axis of inputs, -1 or -2.
  """

  values: Any
  scales: Any
  minima: Any = None
  inputs: int = dataclasses.field(default=-1, metadata={"static": True})

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the weight."""
    return self.values.shape

  @property
  def num_groups(self) -> int:
    """G."""
    return self.scales.shape[self.inputs]

  @property
  def group(self) -> int:
    """Inputs that share a scale."""
    return self.shape[self.inputs] // self.num_groups

  @property
  def by_output(self) -> bool:
    """True if `w = q s` with one scale per output."""
    return self.num_groups == 1 and self.minima is None

  def __getitem__(self, index) -> "QuantizedTensor":
    """Some rows, or experts: an index of the leading axes."""
    return jax.tree.map(lambda part: part[index], self)

  def dequantized(self) -> Array:
    """The weight, f32."""
    axis = len(self.shape) + self.inputs
    values = self.values.astype(jnp.float32)
    groups = values.reshape(_grouped(self.shape, axis, self.num_groups))
    groups = groups * jnp.expand_dims(self.scales, axis + 1)
    if self.minima is not None:
      groups = groups + jnp.expand_dims(self.minima, axis + 1)
    return groups.reshape(self.shape)


@functools.partial(jax.jit, static_argnames=("dtype", "group", "inputs"))
def quantize(
  weight: Array | QuantizedTensor,
  dtype: str,
  group: int | None = None,
  *,
  inputs: int = -1,
) -> QuantizedTensor:
  """Quantizes a weight.

  Args:
    weight: `f[..., N, D]`, or `f[..., D, N]`; a quantized one is dequantized
      first.
    dtype: one of `DTYPES`.
    group: inputs that share a scale; None for all of an output.
    inputs: the axis of inputs, -1 or -2.

  Returns:
    The quantized weight. A group of zeros has scale 0.

  Raises:
    ValueError: if groups do not divide the inputs.
  """
  if isinstance(weight, QuantizedTensor):
    weight = weight.dequantized()
  stored, largest, _ = DTYPES[dtype]
  axis = weight.ndim + inputs
  size = weight.shape[axis]
  if size % (group or size):
    raise ValueError(
      f"groups of {group} do not divide the {size} inputs of a weight"
    )
  groups = weight.astype(jnp.float32).reshape(
    _grouped(weight.shape, axis, size // (group or size))
  )
  scales = jnp.max(jnp.abs(groups), axis=axis + 1, keepdims=True) / largest
  values = groups / jnp.where(scales == 0, 1, scales)
  if jnp.issubdtype(stored, jnp.integer):
    values = jnp.round(values)
  elif dtype == "fp4":  # XLA:CPU would round twice
    size_of = jnp.abs(values)
    step = jnp.where(size_of < 2, 0.5, jnp.where(size_of < 4, 1, 2))
    values = jnp.round(values / step) * step
  return QuantizedTensor(
    values=values.astype(stored).reshape(weight.shape),
    scales=scales.squeeze(axis + 1),
    inputs=inputs,
  )


def _grouped(shape: tuple[int, ...], axis: int, count: int) -> tuple[int, ...]:
  """A shape with the axis of inputs split into groups."""
  return (*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])


def is_quantized(x: Any) -> bool:
  """True for a `QuantizedTensor`, for `is_leaf` of tree maps over weights."""
  return isinstance(x, QuantizedTensor)


def num_bits(dtype) -> int:
  """Bits of a number."""
  info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
  return info(dtype).bits


def num_bytes(array: jax.ShapeDtypeStruct) -> int:
  """Bytes of an array on an accelerator, where 4-bit values use half a byte."""
  return math.prod(array.shape) * num_bits(array.dtype) // 8
