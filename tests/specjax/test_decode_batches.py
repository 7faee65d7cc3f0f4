"""One program for any batch: rows alone, padded, a few steps at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import (
  FEWER_PAIRS,
  FEWEST_PAIRS,
  LENGTHS,
  PAIRS,
  PARAMS,
  PROMPTS,
  VOCAB,
  decode,
  jitted,
  make,
  rows_of,
  start,
)

from specjax import random
from specjax.warp import make_sampling


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "drafter"), FEWEST_PAIRS)
def test_generate_matches_python_loop_over_step(rule, drafter):
  decoder = make(drafter, rule)
  state = start(decoder)
  step = jitted(decoder, "step")
  while not bool(state.done.all()):
    state, _ = step(PARAMS, state)
  whole = decode(decoder, start(decoder))
  assert rows_of(whole) == rows_of(state)
  # Sums of probabilities may be rounded apart by two programs; counts may not.
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
  jax.tree.map(close, whole.counters, state.counters)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("rule", "drafter"), FEWER_PAIRS)
def test_row_output_is_independent_of_its_batch(rule, drafter, temperature):
  decoder = make(drafter, rule)
  options = dict(temperature=temperature, stop_tokens=(7, 7))
  together = rows_of(decode(decoder, start(decoder, **options)))
  order = np.array([3, 0, 4, 2, 1])
  shuffled = rows_of(decode(decoder, start(decoder, rows=order, **options)))
  assert shuffled == [together[i] for i in order]
  for b in range(len(PROMPTS)):
    alone = decode(decoder, start(decoder, rows=slice(b, b + 1), **options))
    assert rows_of(alone) == together[b : b + 1]


def test_row_output_is_independent_of_prompt_padding():
  decoder = make("paths", "match")
  other = np.where(np.arange(6) < LENGTHS[:, None], PROMPTS, 9)
  wider = np.pad(other, ((0, 0), (0, 7)), constant_values=5)
  expected = rows_of(decode(decoder, start(decoder)))
  assert rows_of(decode(decoder, start(decoder, prompts=other))) == expected
  assert rows_of(decode(decoder, start(decoder, prompts=wider))) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["model", "paths", "ngram", "layer_skip"])
def test_prompts_lengths_settings_and_budgets_share_one_trace(drafter):
  decoder = make(drafter, "match")
  traces = []

  @jax.jit
  def run(prompts, lengths, keys, budgets, settings, stops):
    traces.append(1)
    state = decoder.init(
      PARAMS, prompts, lengths, keys, buffer_length=40,
      max_new_tokens=budgets, sampling=settings, stop_tokens=stops,
    )  # fmt: skip
    return decoder.generate(PARAMS, state).tokens

  for seed in range(3):
    rng = np.random.default_rng(seed)
    run.trace(
      jnp.asarray(rng.integers(0, VOCAB, (5, 6))),
      jnp.asarray(rng.integers(1, 7, 5)),
      random.row_keys(jax.random.key(seed), jnp.arange(5)),
      jnp.asarray(rng.integers(1, 30, 5)),
      make_sampling(5, temperature=seed * 0.5, top_p=1 - seed / 4),
      jnp.array([seed]),
    )
  assert len(traces) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_generate_makes_no_host_callbacks(rule, drafter):
  """No callback, infeed or outfeed in the program of the whole loop."""
  decoder = make(drafter, rule)
  program = jitted(decoder, "generate").lower(PARAMS, start(decoder)).as_text()
  assert "while" in program
  for word in ("callback", "infeed", "outfeed", "send", "recv"):
    assert word not in program


@pytest.mark.gpu
def test_chunked_steps_match_full_generation():
  decoder = make("model")
  expected = rows_of(decode(decoder, start(decoder)))
  state = start(decoder)
  run = jitted(decoder, "steps")
  while not bool(state.done.all()):
    before = int(state.num_steps)
    state = run(PARAMS, state, 2)
    assert state.num_steps == before + 2 or state.done.all()
  assert state.num_steps <= before + 2
  assert rows_of(state) == expected


@pytest.mark.gpu
def test_donating_state_keeps_caller_arrays_alive():
  decoder = make("model")
  prompts, lengths = jnp.asarray(PROMPTS), jnp.asarray(LENGTHS)
  keys = random.row_keys(jax.random.key(0), jnp.arange(5))
  settings = make_sampling(5)
  stops, budget = jnp.array([3]), jnp.full(5, 4)
  state = decoder.init(
    PARAMS, prompts, lengths, keys, buffer_length=16, max_new_tokens=budget,
    sampling=settings, stop_tokens=stops,
  )  # fmt: skip
  jax.jit(decoder.generate, donate_argnums=1)(PARAMS, state)
  assert state.target_cache.keys[0].is_deleted()
  for x in jax.tree.leaves((prompts, lengths, settings, stops, budget, PARAMS)):
    assert not x.is_deleted()
  assert not keys.is_deleted()
