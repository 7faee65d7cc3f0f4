"""Rotary position embeddings (Su et al., 2021) and their rescalings.

`models.formats.families.reading.rope` translates a checkpoint's `rope_type`.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Llama 3's rescaling of the rotary frequencies.

  Long wavelengths are stretched by `factor`, short ones are kept, and those
  between `original_max_positions / high` and `/ low` are interpolated.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """Rotary position embeddings.

  Attributes:
    theta: base of the frequencies.
    dim: channels of each head that rotate (the first ones).
    scaling: Llama 3's rescaling, if any.
    factors: divisors of the frequencies of the `dim / 2` pairs, for any other
      rescaling. A pair with an infinite factor does not rotate.
    scale: factor of cosines and sines; it enters attention scores squared.
  """

  theta: float
  dim: int
  scaling: RopeScaling | None = None
  factors: tuple[float, ...] | None = None
  scale: float = 1.0

  def frequencies(self) -> np.ndarray:
    """Angular frequency of each rotated channel pair, `f32[dim / 2]`."""
    freq = 1.0 / self.theta ** (np.arange(0, self.dim, 2) / self.dim)
    scaling = self.scaling
    if scaling is not None:
      wavelength = 2 * math.pi / freq
      ratio = scaling.original_max_positions / wavelength
      low, high = scaling.low_freq_factor, scaling.high_freq_factor
      keep = np.clip((ratio - low) / (high - low), 0.0, 1.0)
      freq = keep * freq + (1 - keep) * freq / scaling.factor
    if self.factors is not None:
      freq = freq / np.array(self.factors)
    return freq.astype(np.float32)

  def table(self, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines for `i32[B, T]`, each `f32[B, T, 1, dim / 2]`."""
    angle = positions[..., None, None].astype(jnp.float32) * self.frequencies()
    return self.scale * jnp.cos(angle), self.scale * jnp.sin(angle)


def rotate(x: Array, table: tuple[Array, Array]) -> Array:
  """Rotates the first channels of every head.

  Args:
    x: `[B, T, H, C]`.
    table: from `Rope.table`.

  Returns:
    `[B, T, H, C]`, in x's dtype.
  """
  cos, sin = table
  half = cos.shape[-1]
  a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
