"""Draws: their laws, and the streams they come from."""

import functools

import exact_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax import random

pytestmark = pytest.mark.gpu


def _keys(count, seed=0):
  return random.row_keys(jax.random.key(seed), jnp.arange(count))


@functools.partial(jax.jit, static_argnums=0)
def _draw_many(draws, law):
  """Independent draws from one law, `i32[draws]`."""
  return jax.vmap(random.categorical, in_axes=(0, None))(_keys(draws), law)


@pytest.mark.parametrize("vocab", [2, 7, 64, 128])
def test_draws_match_the_distribution(vocab):
  draws = 400_000
  rng = np.random.default_rng(vocab)
  law = rng.dirichlet(np.full(vocab, 5.0))
  tokens = _draw_many(draws, jnp.log(law))
  counts = np.bincount(tokens, minlength=vocab)
  assert exact_cases.p_value(counts, draws * law, shift=0.01) > 1e-6


def test_zero_probability_tokens_are_never_drawn():
  vocab, draws = 1000, 20_000
  allowed = np.random.default_rng(1).permutation(vocab)[:13]
  law = np.full(vocab, -np.inf)
  law[allowed] = np.random.default_rng(2).standard_normal(13)
  tokens = random.categorical(
    _keys(draws), jnp.broadcast_to(jnp.asarray(law), (draws, vocab))
  )
  assert set(np.unique(tokens)) == set(allowed)


def test_extreme_uniforms_land_on_nonzero_mass():
  mass = jnp.array([[0.0, 0.1, 0.3, 0.0, 0.0]])
  smallest, largest = random._fraction(
    jnp.array([0, 2**32 - 1], jnp.uint32), jnp.float32
  )
  assert (smallest, largest) == (2.0**-32, 1)
  assert random.invert(mass, largest[None]).tolist() == [2]
  assert random.invert(mass, smallest[None]).tolist() == [1]


@functools.partial(jax.jit, static_argnums=2)
def _inverted(mass, bits, dtype=jnp.float32):
  """The entries drawn by random bits, `u32[R] -> i32[R]`."""
  uniforms = random._fraction(bits, dtype)
  return random.invert(jnp.broadcast_to(mass, (*bits.shape, 4)), uniforms)


@pytest.mark.parametrize("entry", range(4))
def test_share_of_random_bits_matches_probability(entry):
  """Counted, by bisection: which bits draw an entry is an interval."""
  # What is smaller than the spacing of float32 has width where it comes first.
  for share in (1e-30, 1e-9, 2.0**-25, 1e-6, 0.3, 0.9999999):
    mass = np.full(4, (1 - share) / 3)
    mass[entry] = share
    mass = jnp.asarray(mass, jnp.float32)

    def bits_until(token, mass=mass):
      """Number of the 2^32 that draw a token below this one."""
      low, high = 0, 2**32
      while low < high:
        middle = np.uint32((low + high) // 2)
        below = _inverted(mass, jnp.array([middle]))[0] < token
        low, high = (int(middle) + 1, high) if below else (low, int(middle))
      return low

    count = bits_until(entry + 1) - bits_until(entry)
    spacing = 2.0**-32 if entry == 0 else 2.0**-23
    assert abs(count / 2**32 - share) <= spacing + share * 2.0**-22


def test_rare_tokens_in_large_vocab_keep_their_probability():
  # Each rare token has 2e-8 of the mass, below the spacing of float32 near 1: a
  # flat cumulative sum gives most of them no width at all.
  vocab, draws = 2**19, 100_000
  law = np.full(vocab, np.log(0.01 / 0.99 / (vocab - 1)), np.float32)
  law[0] = 0.0
  flat = np.cumsum(np.exp(law) / np.exp(law).sum(), dtype=np.float32)
  assert (np.diff(flat) == 0).mean() > 0.5
  tokens = np.asarray(_draw_many(draws, jnp.asarray(law)))
  share = (tokens > 0).mean()
  assert abs(share - 0.01) < 5 * np.sqrt(0.01 / draws)
  quarter = np.bincount(tokens[tokens > 0] * 4 // vocab, minlength=4)
  assert stats.chisquare(quarter).pvalue > 1e-6


def test_argmax_returns_first_maximum():
  x = np.random.default_rng(0).integers(0, 4, (200, 17)).astype(np.float32)
  np.testing.assert_array_equal(random.argmax(jnp.asarray(x)), x.argmax(1))


def test_position_noise_has_full_gumbel_tail():
  # From one float32 uniform, Gumbel noise ends at 24 log 2.
  noise = np.asarray(
    jax.jit(random.position_noise, static_argnums=(2, 3))(
      _keys(64), jnp.arange(4)[None].repeat(64, 0), 2, 2**17
    )
  )
  for level in (-1.0, 0.0, 3.0, 10.0, 24 * np.log(2)):
    share = -np.expm1(-np.exp(-level))
    spread = np.sqrt(share * (1 - share) * noise.size)
    actual = (noise > level).sum()
    assert actual > 0
    assert abs(actual - share * noise.size) < 5 * spread


def test_nan_log_probs_give_a_valid_index():
  token = random.categorical(_keys(1), jnp.full((1, 5), jnp.nan))
  assert 0 <= int(token[0]) < 5


def test_random_streams_of_a_round_are_uncorrelated():
  keys = random.step_keys(_keys(2000), jnp.full(2000, 7))
  streams = [
    *random.role_keys(keys, range(5)).T,
    random.step_keys(_keys(2000), jnp.full(2000, 8)),
  ]
  drawn = np.stack([jax.vmap(jax.random.uniform)(s) for s in streams])
  correlation = np.corrcoef(drawn) - np.eye(len(drawn))
  assert np.abs(correlation).max() < 5 / np.sqrt(2000)
