"""Quantized keys and values: int8 or fp8 with a scale per slot and head.

A slot of a head is stored as `x = q s` with one scale `s = max |x| / M` over
its channels, so slots and rows do not depend on each other. If any channel is
not finite, the scale is NaN: a broken key breaks its whole slot, for the tokens
that see it.

Letters in shapes as in `specjax.cache`.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.structs import static, struct

# The stored types by name, with M, their largest value.
KINDS = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}


@struct
class Quantized:
  """A quantized buffer of a cache, or some slots of one.

  Both arrays have the axes of a buffer, so their slots move together.

  Attributes:
    values: `[B, K, S, C]` or `[L, B, K, S, C]`.
    scales: `f32[.., S, 1]`, likewise.
    dtype: dtype of dequantized values (static).
  """

  values: Any
  scales: Any
  dtype: Any = static()

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the values."""
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


def zeros(shape: tuple[int, ...], dtype, kind: str) -> Quantized:
  """An empty buffer that dequantizes to `dtype`."""
  return Quantized(
    values=jnp.zeros(shape, KINDS[kind][0]),
    scales=jnp.zeros((*shape[:-1], 1), jnp.float32),
    dtype=jnp.dtype(dtype),
  )


def store(rows: Array, like: Quantized) -> Quantized:
  """Quantizes slots, `[..., C]`, to the types of a buffer."""
  kind = like.values.dtype
  most = next(most for known, most in KINDS.values() if kind == known)
  wide = rows.astype(jnp.float32)
  largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / most
  whole = jnp.all(jnp.isfinite(wide), axis=-1, keepdims=True)
  scales = jnp.where(whole, largest, jnp.nan)
  values = jnp.where(whole, wide / jnp.where(scales > 0, scales, 1), 0)
  if jnp.issubdtype(kind, jnp.integer):
    values = jnp.round(values)
  return Quantized(values=values.astype(kind), scales=scales, dtype=like.dtype)


def load(stored: Quantized) -> Array:
  """Dequantizes slots to `f[..., C]` of the buffer's dtype."""
  wide = jnp.promote_types(stored.dtype, jnp.float32)
  product = stored.values.astype(wide) * stored.scales.astype(wide)
  return product.astype(stored.dtype)
