"""Draft lengths on one state, among which the host chooses between rounds."""

import dataclasses
import functools
import types

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import MODEL, PARAMS, VOCAB, rows_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import specjax
from specjax import drafters, rules
from specjax.adaptive import ladder as ladder_lib
from specjax.adaptive import policies
from specjax.adaptive.ladder import LadderLoop, make_ladder
from specjax.runtime.engine import Engine
from specjax.runtime.requests import Batch, Settings
from specjax.types import Params

LENGTHS = (0, 1, 4)
CHEAP = {0: 1.0, 1: 1.1, 4: 1.4}  # seconds of a round, by its length
DEAR = {0: 1.0, 1: 2.2, 4: 6.0}


def fixed(tree):
  """A drafter that reads what it lacks of a text."""
  return drafters.model(
    MODEL, tree=tree, vocab_size=VOCAB, policy=policies.fixed(tree.max_depth)
  )


def make(draft=fixed, lengths=LENGTHS, **settings):
  made = make_ladder(
    MODEL, draft, rule=rules.get("token"), vocab_size=VOCAB, lengths=lengths
  )
  return dataclasses.replace(made, **settings)


DECODERS = make().decoders


def start(*, params=PARAMS, prompts=(0, 1)):
  """A greedy state of two rows, one with a longer answer."""
  prompts = np.array(prompts)
  return jax.jit(DECODERS[4].init, static_argnames="buffer_length")(
    params, jnp.asarray(decoding.PROMPTS[prompts]),
    jnp.asarray(decoding.LENGTHS[prompts]), jax.random.key(2), buffer_length=70,
    max_new_tokens=jnp.array([60, 50]),
    sampling=specjax.make_sampling(2, temperature=0.0),
  )  # fmt: skip


@functools.cache
def program(length):
  """The compiled rounds of a length."""
  return jax.jit(DECODERS[length].steps)


# ----------------------------------------------------------------- one state


def test_draft_lengths_can_switch_on_shared_state():
  """Greedy, so that every token is known; wide after none after narrow."""
  state, plan = start(), (4, 0, 0, 0, 1, 4, 0, 4, 1) * 3
  for length in plan:
    before = state
    state = program(length)(PARAMS, state, jnp.int32(3))
    new = lambda name, before=before, after=state: np.asarray(
      getattr(after.counters, name) - getattr(before.counters, name)
    )
    np.testing.assert_array_equal(
      new("num_drafted"), length * new("num_target_calls")
    )
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


# ------------------------------------------------- what a draft model lacks

SURE = Params(target=PARAMS.target, draft=PARAMS.target)


def one_by_one(plan, state=None):
  """The state after rounds of these lengths, each called for by itself.

  The draft is the target: all that it drafts is accepted if it has read all.
  """
  state = start(params=SURE, prompts=(2, 4)) if state is None else state
  for length in plan:
    state = program(length)(SURE, state, jnp.int32(1))
  return state


def test_draft_cache_gaps_of_any_size_are_filled():
  """Of one token, of a few, and of more than are read at once."""
  state = one_by_one((1, 0, 4, 0, 0, 4, *[0] * 19, 4))
  assert not state.done.any()
  np.testing.assert_array_equal(state.counters.num_drafted, 13)
  np.testing.assert_array_equal(state.counters.num_accepted, 13)


def test_draft_cache_gap_at_buffer_end_is_filled():
  """Less than a piece is left there, so that it is read from further before."""
  state = one_by_one((*[0] * 52, 4, 0))
  held = int(state.drafter_state.inner.length[0])
  assert state.tokens.shape[1] - 16 < held < state.length[0] - 2
  state = one_by_one([4], state)
  assert state.done[0]  # in the middle of five tokens
  assert state.counters.num_accepted[0] == 4 + 2


def test_extended_text_is_read_before_the_next_draft():
  state = program(0)(SURE, one_by_one([0]), jnp.int32(100))
  state = DECODERS[4].extend(
    SURE, state, 1, jnp.array([3, 1, 2]), 3, max_new_tokens=5
  )
  state = program(4)(SURE, state, jnp.int32(100))
  assert state.counters.num_target_calls[1] == 1
  assert state.counters.num_accepted[1] == 4


def test_invalid_ladders_are_rejected():
  lags = lambda tree: drafters.model(MODEL, tree=tree, vocab_size=VOCAB)
  assert sorted(make(lags, (1, 2)).decoders) == [1, 2]
  with pytest.raises(ValueError, match="'model' does not survive"):
    make(lags, (0, 2))
  for lengths in ((4,), (0, 2, 1)):
    with pytest.raises(ValueError, match="two or more increasing lengths"):
      make(lengths=lengths)


# ----------------------------------------------------------------- the choice


def timed(seconds, **settings):
  """A loop whose rounds take so long, and the lengths that it calls for."""
  ladder, called = make(**settings), []

  def loop_of(length):
    def call(params, state, rounds):
      called.append(length)
      return program(length)(params, state, rounds)

    return call

  loop = LadderLoop({n: loop_of(n) for n in LENGTHS}, seconds)
  loop._learn_time = lambda rounds, seconds: None
  run = lambda state, rounds=1000: loop(PARAMS, state, rounds, ladder=ladder)
  return run, called


def test_cheap_rounds_use_long_drafts_and_costly_ones_use_none():
  run, called = timed(CHEAP, interval=2)
  state = run(start())
  assert state.done.all()
  assert called.count(4) > len(called) / 2
  run, called = timed(DEAR, interval=1, patience=3)
  assert rows_of(state) == rows_of(run(start()))
  # What is supposed is accepted would not pay; but it is tried now and then.
  assert called[:5] == [0, 0, 0, 1, 0]
  assert called.count(0) > len(called) / 2


def test_loop_runs_exactly_the_requested_rounds():
  run, _ = timed(CHEAP, interval=4)
  state = run(start(), 7)
  assert int(state.num_steps) == 7
  for _ in range(3):  # as one who looks at every token does
    state = run(state, 1)
  assert int(state.num_steps) == 10


def test_acceptance_is_per_position_with_prior_and_decay(monkeypatch):
  monkeypatch.setattr(ladder_lib, "_KEEP", 1.0)
  known = make()
  # Ten rounds of two tokens: two were accepted in 4, one in 3, none in 3.
  known.count_rounds(np.array([3, 3, 4]))
  first = (7 + 4 * 0.7) / (10 + 4)
  second = (4 + 4 * first) / (7 + 4)
  np.testing.assert_allclose(known.acceptances(), [first, *[second] * 3])
  tokens = 1 + first + first * second
  assert known.rates({0: 2.0, 2: 4.0}) == pytest.approx({0: 0.5, 2: tokens / 4})
  known.count_rounds(np.array([9]))  # nothing was drafted
  np.testing.assert_allclose(known.reached, [10, 7, 0, 0])
  monkeypatch.setattr(ladder_lib, "_KEEP", 0.5)
  known.count_rounds(np.array([1, 2]))
  np.testing.assert_allclose(known.reached, [10 / 2**3 + 3, 7 / 2**3, 0, 0])


# ----------------------------------------------------------------- the engine


def engine_of(ladder, on_mesh):
  """A ladder's engine, or without a ladder a plain one."""
  mesh, params = None, PARAMS
  if on_mesh:
    mesh = jax.make_mesh(
      (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
  plain = specjax.make_decoder(MODEL, vocab_size=VOCAB)
  return Engine(
    decoder=ladder.longest if ladder else plain, ladder=ladder, params=params,
    mesh=mesh, max_new_tokens=40, max_length=128, temperature=0.0,
  )  # fmt: skip


def request(i):
  tokens = decoding.PROMPTS[i, : decoding.LENGTHS[i]].tolist()
  return types.SimpleNamespace(
    token_ids=tokens, stream=i, settings=Settings(), ends=None
  )


@pytest.mark.parametrize("on_mesh", [False, True])
def test_ladder_engine_matches_plain_and_learns_across_batches(on_mesh):
  """Its texts are plain decoding's, whatever lengths were the fastest."""
  engine = engine_of(make(interval=3, patience=2), on_mesh)
  batch = Batch(tuple(map(request, range(2))), 2, 32)
  actual, _ = engine.run(batch)
  expected, _ = engine_of(None, on_mesh).run(batch)
  for one, other in zip(actual, expected, strict=True):
    assert one.token_ids == other.token_ids
    assert sum(one.accept_counts) == one.num_target_calls
  before = engine.ladder.reached[0]
  assert before > 0
  again, _ = engine.run(dataclasses.replace(batch, width=64))
  assert [a.token_ids for a in again] == [b.token_ids for b in expected]
  assert engine.ladder.reached[0] != before
  narrow, wide = engine.programs.values()
  assert wide.loop is narrow.loop
