"""Random streams of rows, and draws from distributions.

Every draw of a row comes from `fold_in(fold_in(row_key, position), role)`, so a
row's tokens do not depend on its neighbors in the batch, on padding, or on the
mesh. Draws are made in float32 or better: `jax.random.categorical` on bfloat16
is off by a total variation of 0.2.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

# Roles of the draws within one step. Drafted node n (n >= 1) has role n + 1.
_NODE_ROLE = 0
_NEXT_ROLE = 1
# Noise belongs to a position and a path, not to a step.
_NOISE_ROLE = 1 << 20
# A drafter's own keys are disjoint from those above.
_DRAFTER_ROLE = (1 << 31) - 1


def row_keys(rng_key: Array, row_ids: Array) -> Array:
  """A stream per row: `key[B]` from a key and `i32[B]` row identities."""
  return jax.vmap(lambda i: jax.random.fold_in(rng_key, i))(row_ids)


def seeded_keys(seeds: Array, row_ids: Array) -> Array:
  """A stream per row, each with its own seed: `key[B]` from two `u32[B]`.

  Row b's is `row_keys(key(seeds[b]), row_ids)[b]`.
  """
  return jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))(
    seeds, row_ids
  )


def step_keys(keys: Array, length: Array) -> Array:
  """This round's keys, `key[B]`: no two rounds start at the same length."""
  return jax.vmap(jax.random.fold_in)(keys, length)


def role_keys(keys: Array, roles: range) -> Array:
  """`key[B, len(roles)]`, hashed together at the cost of one."""
  data = jnp.arange(roles.start, roles.stop, dtype=jnp.int32)
  each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return jax.vmap(each, in_axes=(0, None))(keys, data)


def verification_numbers(keys: Array, dtype) -> Array:
  """Random numbers for the deepest accepted node and the token after it.

  Maps a round's `key[B]` to `f[B, 2, 2]`, for distributions of a dtype.
  """
  return numbers(role_keys(keys, range(_NODE_ROLE, _NEXT_ROLE + 1)), dtype)


def drafted_numbers(keys: Array, num_drafted: int) -> Array:
  """Random numbers for each drafted node of a round, `key[B] -> f[B, N, 2]`."""
  if not num_drafted:
    return jnp.zeros((len(keys), 0, 2))
  roles = range(_NEXT_ROLE + 1, _NEXT_ROLE + 1 + num_drafted)
  return numbers(role_keys(keys, roles), jnp.result_type(float))


def drafter_keys(keys: Array) -> Array:
  """The drafter's own stream, from that of a row or round, `key[B]`."""
  return jax.vmap(lambda key: jax.random.fold_in(key, _DRAFTER_ROLE))(keys)


def position_noise(
  row_keys: Array, positions: Array, num_paths: int, vocab_size: int
) -> Array:
  """Gumbel noise fixed by row, position, path and token.

  Args:
    row_keys: `key[B]`, the rows' streams.
    positions: `i32[B, T]`, positions in the text.
    num_paths: K.
    vocab_size: V.

  Returns:
    `f32[B, K, T, V]`, fine enough for rare tokens of large vocabularies.
  """

  def one(row_key, position, path):
    key = jax.random.fold_in(row_key, position)
    key = jax.random.fold_in(key, _NOISE_ROLE + path)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")

  over_places = jax.vmap(one, in_axes=(None, 0, None))
  over_paths = jax.vmap(over_places, in_axes=(None, None, 0))
  return jax.vmap(over_paths, in_axes=(0, 0, None))(
    row_keys, positions, jnp.arange(num_paths)
  )


def race(noise: Array, log_probs: Array) -> Array:
  """`argmax(log p + Gumbel noise)`: two `f32[..., V]` to `i32[...]`."""
  return argmax(jnp.where(log_probs == -jnp.inf, -jnp.inf, log_probs + noise))


def categorical(keys: Array, log_probs: Array) -> Array:
  """Draws a token from each distribution: `pick` with `numbers` of the keys."""
  return pick(numbers(keys, log_probs.dtype), log_probs)


def pick(numbers: Array, log_probs: Array) -> Array:
  """Draws a token from each distribution by inversion, from two numbers.

  The first picks a block of about sqrt(V) tokens by the blocks' masses, the
  second a token inside the block. Unlike with one flat `cumsum`, rounding is
  relative to the block inside it, and 2^-23 of the total between blocks, so
  rare tokens among many keep their share. Unlike the Gumbel trick it needs two
  random numbers per draw instead of V, and is about 40 times faster on a CPU at
  V = 4096. A token without mass is never drawn, and coming first raises no
  token's probability by more than 2^-32.

  Args:
    numbers: `f32[..., 2]`, from `numbers`.
    log_probs: `f32[..., V]` with at least one finite entry each; they need not
      be normalized.

  Returns:
    `i32[...]` in 0..V-1 (for distributions of NaN too).
  """
  log_probs = log_probs.astype(jnp.promote_types(log_probs.dtype, jnp.float32))
  vocab = log_probs.shape[-1]
  mass = jnp.exp(log_probs - jnp.max(log_probs, axis=-1, keepdims=True))
  width = 1 << math.ceil(math.log2(max(vocab, 2)) / 2)
  pad = [(0, 0)] * (mass.ndim - 1) + [(0, -vocab % width)]
  blocks = jnp.pad(mass, pad).reshape(*mass.shape[:-1], -1, width)
  block = invert(jnp.sum(blocks, axis=-1), numbers[..., 0])
  inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)
  token = invert(inside[..., 0, :], numbers[..., 1])
  return jnp.minimum(block * width + token, vocab - 1)


def numbers(keys: Array, dtype) -> Array:
  """Two random numbers in (0, 1] for every key, `key[...] -> f[..., 2]`.

  `dtype` is that of the distributions to draw from, at least float32.
  """
  dtype = jnp.promote_types(dtype, jnp.float32)
  width = jnp.finfo(dtype).bits
  draw = lambda key: jax.random.bits(key, (2,), f"uint{width}")
  for _ in keys.shape:
    draw = jax.vmap(draw)
  return _fraction(draw(keys), dtype)


def _fraction(bits: Array, dtype) -> Array:
  """`(bits + 1) / 2^32`, or 2^64, rounded: keeps all random bits near zero.

  `jax.random.uniform` is in [0, 1) and keeps 23 bits (52 in float64), so an
  inversion would draw the first entry at least once in 2^23.
  """
  return (bits.astype(dtype) + 1) * 2.0 ** -jnp.finfo(dtype).bits


def invert(mass: Array, uniform: Array) -> Array:
  """The first entry with mass whose cumulative mass reaches `uniform * total`.

  `mass` is `f32[..., n]`, non-negative, and `uniform` `f32[...]` in (0, 1].
  Cumulative sums need not be monotone in floating point, but an entry without
  mass is never picked.
  """
  some = mass > 0
  cumulative = jnp.cumsum(mass, axis=-1)
  total = jnp.max(jnp.where(some, cumulative, 0), axis=-1)
  hit = some & (cumulative >= (uniform * total)[..., None])
  return argmax(hit.astype(mass.dtype))


def argmax(values: Array) -> Array:
  """The first index of the largest value, `f32[..., n] -> i32[...]`.

  Like `jnp.argmax` (but n - 1 where that would return a NaN's index), in two
  plain reductions, which XLA:CPU vectorizes, unlike `jnp.argmax`.
  """
  last = values.shape[-1] - 1
  largest = jnp.max(values, axis=-1, keepdims=True)
  index = jnp.arange(last + 1, dtype=jnp.int32)
  return jnp.min(jnp.where(values == largest, index, last), axis=-1)
