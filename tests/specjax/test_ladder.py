"""Verification widths that the host chooses between rounds."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import MODEL, PARAMS, VOCAB, rows_of

import specjax
from specjax import drafters, exact, ladder, rules
from specjax.drafters import depth
from specjax.ladder import Ladder

pytestmark = pytest.mark.usefixtures("quick_to_compile")

WIDTHS = (0, 1, 4)
CHEAP = Ladder(seconds={0: 1.0, 1: 1.1, 4: 1.4})
DEAR = Ladder(seconds={0: 1.0, 1: 2.2, 4: 6.0}, patience=3)


def fixed(tree):
  return drafters.model.drafter(
    MODEL, tree=tree, vocab_size=VOCAB,
    depth=depth.fixed(depth=tree.max_depth),
  )  # fmt: skip


RUNGS = ladder.rungs(
  MODEL, fixed, rule=rules.get("token"), vocab_size=VOCAB, widths=WIDTHS
)


def start(temperature=0.0):
  return jax.jit(RUNGS.widest.init, static_argnames="buffer_length")(
    PARAMS, jnp.asarray(decoding.PROMPTS[:2]),
    jnp.asarray(decoding.LENGTHS[:2]), jax.random.key(2), buffer_length=70,
    max_new_tokens=jnp.array([60, 50]),
    sampling=specjax.make_sampling(2, temperature=temperature),
  )  # fmt: skip


@functools.cache
def program(width):
  return jax.jit(functools.partial(RUNGS.steps, width))


def test_rungs_go_on_with_each_others_state():
  """Greedy, so that every token is known; wide after none after narrow."""
  state, plan = start(), (4, 0, 0, 0, 1, 4, 0, 4, 1) * 3
  for width in plan:
    before = state
    state = program(width)(PARAMS, state, jnp.int32(3))
    drafted = np.asarray(
      state.counters.num_drafted - before.counters.num_drafted
    )
    rounds = np.asarray(
      state.counters.num_target_calls - before.counters.num_target_calls
    )
    np.testing.assert_array_equal(drafted, width * rounds)
  state = program(0)(PARAMS, state, jnp.int32(100))
  expected = [
    decoding.greedy_reference(decoding.PROMPTS[b, : decoding.LENGTHS[b]], count)
    for b, count in ((0, 60), (1, 50))
  ]
  assert rows_of(state) == expected
  c = state.counters
  np.testing.assert_array_equal(c.accept_counts.sum(axis=1), c.num_target_calls)
  sums = c.accept_counts @ np.arange(5)
  np.testing.assert_array_equal(sums, c.num_accepted)


def test_a_round_after_others_widths_has_the_targets_law():
  with jax.enable_x64(True):
    wide = lambda x: jnp.asarray(np.asarray(x)[:, :3], jnp.float64)
    few = jax.tree.map(wide, PARAMS)
    model = toys.table_model(3)
    made = ladder.rungs(
      model,
      lambda tree: drafters.model.drafter(
        model, tree=tree, vocab_size=3,
        depth=depth.fixed(depth=tree.max_depth),
      ),
      rule=rules.get("block"), vocab_size=3, widths=(0, 1, 2),
    )  # fmt: skip
    state = made.widest.init(
      few, np.array([[1, 0]]), [2], jax.random.key(0), buffer_length=32,
      max_new_tokens=30,
    )  # fmt: skip
    for width in (2, 0, 1):
      state = made.steps(width, few, state, 2)
    for width in (1, 2):
      law, expected = exact.round_law(made.decoders[width], few, state)
      assert np.abs(law.output - expected).max() < 1e-10


def test_a_cheap_pass_is_made_wide_and_a_dear_one_not_at_all():
  state, widths = ladder.generate(RUNGS, CHEAP, PARAMS, start(), every=4)
  assert state.done.all()
  assert widths.count(4) > len(widths) / 2
  other, narrow = ladder.generate(RUNGS, DEAR, PARAMS, start(), every=4)
  assert rows_of(state) == rows_of(other)
  assert narrow.count(0) > len(narrow) / 2
  assert 1 in narrow[1:]  # looked at from time to time


def test_rounds_of_every_width_are_timed_on_a_copy():
  state = program(4)(PARAMS, start(), jnp.int32(2))
  before = rows_of(state)
  seconds = ladder.measured(RUNGS, PARAMS, state, rounds=2, repeats=1)
  assert set(seconds) == set(WIDTHS)
  assert min(seconds.values()) > 0
  assert rows_of(state) == before
  ended = dataclasses.replace(
    state, stop_reason=jnp.ones_like(state.stop_reason)
  )
  with pytest.raises(ValueError, match="all done"):
    ladder.measured(RUNGS, PARAMS, ended)


def test_a_width_is_left_for_a_clear_gain_only():
  at = Ladder(seconds={0: 1.0, 1: 1.5, 2: 2.0}, margin=0.1)
  # A width of 1 gives 1 + a tokens: even at a = 0.5, a tenth better at 0.65.
  assert at.best(0.55) == 1
  assert at.choose(0, 0.55) == 0
  assert at.choose(0, 0.66) == 1
  assert at.choose(1, 0.45) == 1
  assert at.choose(1, 0.30) == 0
  assert at.choose(0, 0.3, idle=15) == 0
  assert at.choose(0, 0.3, idle=16) == 1


def test_acceptance_is_of_the_rounds_between():
  before = start(temperature=1.0)
  after = program(4)(PARAMS, before, jnp.int32(5))
  found = ladder.acceptance(before.counters, after.counters)
  expected = float(after.counters.expected_accepted.sum())
  assert 0 < found < 1
  assert found == pytest.approx(
    expected / float(after.counters.rank_offered.sum())
  )
  idle = program(0)(PARAMS, after, jnp.int32(2))
  assert ladder.acceptance(after.counters, idle.counters) is None


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (dict(seconds={1: 1.0}), "0 too"),
    (dict(seconds={0: 0.0}), "must be positive"),
    (dict(seconds={0: 1.0}, patience=0), "patience >= 1"),
  ],
)
def test_what_is_no_ladder_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    Ladder(**settings)


def test_widths_are_those_of_the_decoders():
  with pytest.raises(ValueError, match="there are decoders of"):
    ladder.generate(RUNGS, Ladder(seconds={0: 1.0}), PARAMS, None)
  with pytest.raises(ValueError, match="one above 0"):
    ladder.rungs(
      MODEL, fixed, rule=rules.get("token"), vocab_size=VOCAB, widths=(0,)
    )
