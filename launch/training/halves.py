"""Hidden states in float16 with an exponent for each vector.

What flows between a target's layers is larger than float16 reaches (65,504) in
some models, at a few places. bfloat16 reaches there, but keeps 8 bits of each
number, and float16 11. So a vector is divided by the power of two that brings
its largest number to just below 2**15. Every number is then kept to one part in
2,048 of itself or, where it is very small, to 2**-39 of the largest one.
"""

import jax.numpy as jnp
from jax import Array

_REACH = 15  # of float16's 16: what is rounded up stays finite
_LEAST = -100  # of int8's -128; a vector that small is zero


def halved(x: Array) -> tuple[Array, Array]:
  """`f32[..., D]` in half the bytes: `f16[..., D]` and exponents `i8[...]`."""
  _, exponents = jnp.frexp(jnp.max(jnp.abs(x), axis=-1))
  exponents = jnp.maximum(exponents - _REACH, _LEAST)
  small = jnp.ldexp(x, -exponents[..., None])
  return small.astype(jnp.float16), exponents.astype(jnp.int8)


def restored(halves: Array, exponents: Array) -> Array:
  """`f32[..., D]` of what `halved` gave."""
  exponents = exponents[..., None].astype(jnp.int32)
  return jnp.ldexp(halves.astype(jnp.float32), exponents)
