"""Decoders of several draft lengths on one state."""

import dataclasses

import climbing
import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from climbing import RUNGS, program, start
from decoding import MODEL, PARAMS, VOCAB, rows_of

from specjax import drafters, exact, rules
from specjax.adaptive.rungs import make_rungs
from specjax.types import Params

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def test_rungs_go_on_with_each_others_state():
  """Greedy, so that every token is known; wide after none after narrow."""
  state, plan = start(), (4, 0, 0, 0, 1, 4, 0, 4, 1) * 3
  offered = np.zeros(2)
  for length in plan:
    before = state
    state = program(length)(PARAMS, state, jnp.int32(3))
    drafted = np.asarray(
      state.counters.num_drafted - before.counters.num_drafted
    )
    rounds = np.asarray(
      state.counters.num_target_calls - before.counters.num_target_calls
    )
    np.testing.assert_array_equal(drafted, length * rounds)
    # Greedily a round comes to all that are accepted, and to who follows the
    # last.
    counts = state.counters.accept_counts - before.counters.accept_counts
    offered += counts @ np.minimum(np.arange(5) + 1, length)
    if not state.done.any():  # else a round's end was cut off
      c = state.counters
      np.testing.assert_allclose(c.rank_accepted[:, 0], c.num_accepted)
      np.testing.assert_allclose(c.rank_offered[:, 0], offered)
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
  assert (c.rank_offered > c.rank_accepted).all()


def test_rounds_that_draft_nothing_make_no_pass():
  made = {n: len(one.drafter.passes) for n, one in RUNGS.decoders.items()}
  assert made == {0: 0, 1: 1, 4: 4}


def of_three_tokens():
  """Parameters and rungs, whose rounds can be enumerated; in x64."""
  wide = lambda x: jnp.asarray(np.asarray(x)[:, :3], jnp.float64)
  model = toys.table_model(3)
  made = make_rungs(
    model,
    lambda tree: drafters.model(
      model, tree=tree, vocab_size=3, longest=2
    ),
    rule=rules.get("block"), vocab_size=3, lengths=(0, 1, 2),
  )  # fmt: skip
  return jax.tree.map(wide, PARAMS), made


def test_a_round_after_other_lengths_has_the_targets_law():
  with jax.enable_x64(True):
    few, made = of_three_tokens()
    state = made.longest.init(
      few, np.array([[1, 0]]), [2], jax.random.key(0), buffer_length=32,
      max_new_tokens=30,
    )  # fmt: skip
    for length in (2, 0, 1):
      state = made.steps(length, few, state, 2)
    for length in (1, 2):
      law, expected = exact.round_law(made.decoders[length], few, state)
      assert np.abs(law.output - expected).max() < 1e-10


# --------------------------------------- prompts that the draft has not read

SURE = Params(target=PARAMS.target, draft=PARAMS.target)


LONG = (2, 4)  # prompts of more than it reads in every round


def unread():
  return start(decoder=RUNGS.unread, params=SURE, prompts=LONG)


def test_a_draft_that_has_read_no_prompt_says_so():
  read, not_read = start(params=SURE, prompts=LONG), unread()
  same = lambda a, b: np.testing.assert_array_equal(a, b)
  jax.tree.map(same, read.target_cache, not_read.target_cache)
  same(read.tokens, not_read.tokens)
  same(read.drafter_state.inner.length, decoding.LENGTHS[list(LONG)])
  same(not_read.drafter_state.inner.length, [0, 0])
  assert jax.tree.map(jnp.shape, read) == jax.tree.map(jnp.shape, not_read)


@pytest.mark.parametrize("plan", [(4, 4), (0, 0, 4, 1, 4), (1, 0, 4)])
def test_it_reads_them_before_it_drafts(plan):
  """It is the target: each of its tokens is accepted if it has read all."""
  state = unread()
  for length in plan:
    state = program(length)(SURE, state, jnp.int32(2))
  assert state.counters.num_drafted.sum() == 2 * 2 * sum(plan)
  np.testing.assert_array_equal(
    state.counters.num_accepted, state.counters.num_drafted
  )


def test_a_single_token_that_it_lacks_is_read_before_it_drafts():
  """A round whose draft was accepted whole, and one without a draft."""
  state = start(params=SURE, prompts=LONG)
  for length in (1, 0, 4):
    state = program(length)(SURE, state, jnp.int32(1))
  assert state.counters.num_accepted.tolist() == [5, 5]


def one_by_one(state, plan):
  """The state after rounds of these lengths, each called for by itself."""
  for length in plan:
    state = program(length)(SURE, state, jnp.int32(1))
  return state


def test_gaps_of_any_size_are_filled():
  """Of one token, of a few, and of more than are read at once."""
  state = one_by_one(unread(), (4, 0, 4, 1, 0, 4, 0, 0, 4, *[0] * 19, 4))
  np.testing.assert_array_equal(state.counters.num_drafted, 21)
  np.testing.assert_array_equal(state.counters.num_accepted, 21)


def test_a_gap_at_the_end_of_the_buffer_is_filled():
  """Less than a piece is left there, so that it is read from further before."""
  state = one_by_one(unread(), (*[0] * 52, 4, 0))
  held = int(state.drafter_state.inner.length[0])
  assert state.tokens.shape[1] - 16 < held < state.length[0] - 2
  state = one_by_one(state, [4])
  assert state.done[0]  # after two tokens of five
  assert state.counters.num_accepted[0] == 4 + 2


def test_a_row_that_drafts_fills_no_gap_of_another():
  """One lacks 18 tokens and the other 19: one piece of 16, or two."""
  allowed = lambda state, depths: dataclasses.replace(
    state, max_depth=jnp.array(depths, jnp.int32)
  )
  state = one_by_one(unread(), [0] * 13)
  before = int(state.drafter_state.passes)
  assert state.length.tolist() == [19, 18]
  state = one_by_one(allowed(state, [0, 4]), [4])
  assert int(state.drafter_state.passes) - before == 1 + 4
  assert state.drafter_state.inner.length.tolist() == [16, 21]
  state = one_by_one(allowed(state, [4, 4]), [4, 4])
  assert state.counters.num_drafted.tolist() == [8, 12]
  assert state.counters.num_accepted.tolist() == [8, 12]


def test_a_draft_that_does_not_know_what_it_lacks_is_caught():
  """It is told that it holds the prompt."""
  state = unread()
  held = state.drafter_state.inner.replace(length=jnp.asarray(state.length))
  state = dataclasses.replace(
    state, drafter_state=dataclasses.replace(state.drafter_state, inner=held)
  )
  state = program(4)(SURE, state, jnp.int32(4))
  assert (state.counters.num_accepted < state.counters.num_drafted).all()


def test_after_a_prompt_that_was_not_read_rounds_have_the_targets_law():
  with jax.enable_x64(True):
    few, made = of_three_tokens()
    state = made.unread.init(
      few, np.array([[1, 0, 2]]), [3], jax.random.key(0), buffer_length=32,
      max_new_tokens=28,
    )  # fmt: skip
    state = made.steps(0, few, state, 1)
    for length in (1, 2):
      law, expected = exact.round_law(made.decoders[length], few, state)
      assert np.abs(law.output - expected).max() < 1e-10


def test_a_text_that_goes_on_unread_is_read_when_it_is_drafted_for():
  state = program(0)(SURE, unread(), jnp.int32(100))
  state = RUNGS.longest.extend(
    SURE, state, 1, jnp.array([3, 1, 2]), 3, max_new_tokens=5
  )
  state = program(4)(SURE, state, jnp.int32(100))
  counters = state.counters
  assert counters.num_target_calls[1] == 1
  assert counters.num_accepted[1] == 4


def ngram(tree):
  """Remembers nothing, and reads the text itself."""
  return drafters.ngram(tokens=tree.max_depth)


@pytest.mark.parametrize(
  ("made", "can"),
  [
    (ngram, False),
    (climbing.fixed, True),
  ],
)
def test_who_can_do_without_its_prompts(made, can):
  built = make_rungs(
    MODEL, made, rule=rules.get("token"), vocab_size=VOCAB, lengths=(0, 2)
  )
  assert (built.unread is not None) == can
  always = make_rungs(
    MODEL, made, rule=rules.get("token"), vocab_size=VOCAB, lengths=(1, 2)
  )
  assert always.unread is None


def test_drafters_that_lose_rounds_without_a_draft_are_refused():
  lags = lambda tree: drafters.model(MODEL, tree=tree, vocab_size=VOCAB)
  make = lambda draft, lengths: make_rungs(
    MODEL, draft, rule=rules.get("token"), vocab_size=VOCAB, lengths=lengths
  )
  assert sorted(make(lags, (1, 2)).decoders) == [1, 2]
  with pytest.raises(ValueError, match="'model' does not say how"):
    make(lags, (0, 2))
  with pytest.raises(ValueError, match="two lengths or more"):
    make(climbing.fixed, (0,))
