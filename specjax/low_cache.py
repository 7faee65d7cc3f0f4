"""Keys and values in eight bits: storing to a cache, and reading from it.

A slot of a head is stored as whole numbers, or floats, of eight bits with one
scale, `x = q s`, `s = max |x| / M` over its channels; so no slot depends on
another, nor a row on its neighbors. If any channel is not finite, the scale is
NaN: a broken key breaks its whole slot, for the tokens that see it.

Letters in shapes as in `specjax.cache`.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.structs import static, struct

# What is stored, by name, and M, the largest of it.
KINDS = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}


@struct
class LowBits:
  """A buffer of a cache, or some slots of one, in eight bits.

  Both arrays have the axes of a buffer: what moves slots moves them alike.

  Attributes:
    values: `[B, K, S, C]` or `[L, B, K, S, C]`.
    scales: `f32[.., S, 1]`, likewise.
    dtype: of what is read (static).
  """

  values: Any
  scales: Any
  dtype: Any = static()

  @property
  def shape(self) -> tuple[int, ...]:
    """The values'."""
    return self.values.shape

  @property
  def ndim(self) -> int:
    """4, or 5."""
    return self.values.ndim


def check(kind: str | None) -> None:
  """Raises ValueError unless the kind is None or known."""
  if kind is not None and kind not in KINDS:
    raise ValueError(
      f"a cache is stored as one of {sorted(KINDS)}, got {kind!r}"
    )


def zeros(shape: tuple[int, ...], dtype, kind: str) -> LowBits:
  """An empty buffer, which is read as `dtype`."""
  return LowBits(
    values=jnp.zeros(shape, KINDS[kind][0]),
    scales=jnp.zeros((*shape[:-1], 1), jnp.float32),
    dtype=jnp.dtype(dtype),
  )


def store(rows: Array, like: LowBits) -> LowBits:
  """Quantized slots, `[..., C]`, in the form of a buffer."""
  kind = like.values.dtype
  most = next(most for known, most in KINDS.values() if kind == known)
  wide = rows.astype(jnp.float32)
  largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / most
  whole = jnp.all(jnp.isfinite(wide), axis=-1, keepdims=True)
  scales = jnp.where(whole, largest, jnp.nan)
  values = jnp.where(whole, wide / jnp.where(scales > 0, scales, 1), 0)
  if jnp.issubdtype(kind, jnp.integer):
    values = jnp.round(values)
  return LowBits(values=values.astype(kind), scales=scales, dtype=like.dtype)


def load(stored: LowBits) -> Array:
  """Dequantized slots, `f[..., C]` of the buffer's dtype."""
  wide = jnp.promote_types(stored.dtype, jnp.float32)
  product = stored.values.astype(wide) * stored.scales.astype(wide)
  return product.astype(stored.dtype)
