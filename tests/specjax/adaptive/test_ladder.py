"""Draft lengths on one state, among which the host chooses between rounds."""

import dataclasses
import types

import climbing
import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from climbing import DECODERS, LENGTHS, program, start
from decoding import MODEL, PARAMS, VOCAB, rows_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import specjax
from specjax import drafters, exact, rules
from specjax.adaptive import ladder as ladder_lib
from specjax.adaptive import policies
from specjax.adaptive.ladder import LadderLoop, make_ladder
from specjax.runtime.engine import Engine
from specjax.runtime.requests import Batch, Settings
from specjax.types import Params

CHEAP = {0: 1.0, 1: 1.1, 4: 1.4}  # seconds of a round, by its length
DEAR = {0: 1.0, 1: 2.2, 4: 6.0}


# ----------------------------------------------------------------- one state


def test_lengths_go_on_with_each_others_state():
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


def test_rounds_after_those_of_other_lengths_have_the_targets_law():
  with jax.enable_x64(True):
    tables = [toys.table(3, seed=s).astype(np.float64) for s in (0, 1)]
    few = Params(target=jnp.asarray(tables[0]), draft=jnp.asarray(tables[1]))
    model = toys.table_model(3)
    made = make_ladder(
      model,
      lambda tree: drafters.model(
        model, tree=tree, vocab_size=3,
        policy=policies.fixed(tree.max_depth),
      ),
      rule=rules.get("token"), vocab_size=3, lengths=(0, 1, 2),
    )  # fmt: skip
    state = made.longest.init(
      few, np.array([[1, 0]]), [2], jax.random.key(0), buffer_length=32,
      max_new_tokens=30,
    )  # fmt: skip
    for length in (2, 0, 1):
      state = made.decoders[length].steps(few, state, 2)
    for length in (1, 2):
      law, expected = exact.round_law(made.decoders[length], few, state)
      assert np.abs(law.output - expected).max() < 1e-10


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


def test_gaps_of_any_size_are_filled():
  """Of one token, of a few, and of more than are read at once."""
  state = one_by_one((1, 0, 4, 0, 0, 4, *[0] * 19, 4))
  assert not state.done.any()
  np.testing.assert_array_equal(state.counters.num_drafted, 13)
  np.testing.assert_array_equal(state.counters.num_accepted, 13)


def test_a_gap_at_the_end_of_the_buffer_is_filled():
  """Less than a piece is left there, so that it is read from further before."""
  state = one_by_one((*[0] * 52, 4, 0))
  held = int(state.drafter_state.inner.length[0])
  assert state.tokens.shape[1] - 16 < held < state.length[0] - 2
  state = one_by_one([4], state)
  assert state.done[0]  # in the middle of five tokens
  assert state.counters.num_accepted[0] == 4 + 2


def test_a_row_that_drafts_fills_no_gap_of_another():
  """Each lacks 18 tokens: two pieces of 16."""
  allowed = lambda state, depths: dataclasses.replace(
    state, max_depth=jnp.array(depths, jnp.int32)
  )
  state = one_by_one([0] * 19)
  before = int(state.drafter_state.passes)
  state = one_by_one([4], allowed(state, [0, 4]))
  assert int(state.drafter_state.passes) - before == 2 + 4
  state = one_by_one([4, 4], allowed(state, [4, 4]))
  assert state.counters.num_drafted.tolist() == [8, 12]
  assert state.counters.num_accepted.tolist() == [8, 12]


def test_a_text_that_goes_on_is_read_when_it_is_drafted_for():
  state = program(0)(SURE, one_by_one([0]), jnp.int32(100))
  state = DECODERS[4].extend(
    SURE, state, 1, jnp.array([3, 1, 2]), 3, max_new_tokens=5
  )
  state = program(4)(SURE, state, jnp.int32(100))
  assert state.counters.num_target_calls[1] == 1
  assert state.counters.num_accepted[1] == 4


def test_what_makes_no_ladder_is_refused():
  lags = lambda tree: drafters.model(MODEL, tree=tree, vocab_size=VOCAB)
  make = lambda draft, lengths: make_ladder(
    MODEL, draft, rule=rules.get("token"), vocab_size=VOCAB, lengths=lengths
  )
  assert sorted(make(lags, (1, 2)).decoders) == [1, 2]
  with pytest.raises(ValueError, match="'model' does not outlive"):
    make(lags, (0, 2))
  for lengths in ((4,), (0, 2, 1)):
    with pytest.raises(ValueError, match="two lengths or more"):
      make(climbing.fixed, lengths)


# ----------------------------------------------------------------- the choice


class Timed:
  """A loop over the lengths whose rounds take what is told, and no other time.

  Attributes:
    loop: what chooses.
    ladder: what it learns for.
    takes: seconds of a round by its length.
    chosen: lengths, in order.
    asked: length and most rounds of every call.
  """

  def __init__(self, seconds, ladder=None, **settings):
    self.chosen, self.asked, self.takes = [], [], seconds
    self.ladder = ladder or climbing.ladder(**settings)
    self.loop = LadderLoop({n: self._called(n) for n in LENGTHS}, seconds)
    choose, learn = self.loop._choose, self.loop._learn_time

    def choose_and_tell(ladder):
      choose(ladder)
      self.chosen.append(self.loop._now)

    self.loop._choose = choose_and_tell
    self.loop._learn_time = lambda rounds, _: learn(
      rounds, rounds * self.takes[self.loop._now]
    )

  def _called(self, length):
    def call(params, state, rounds):
      self.asked.append((length, int(rounds)))
      return program(length)(params, state, rounds)

    return call

  def __call__(self, state, rounds=1000):
    return self.loop(PARAMS, state, rounds, ladder=self.ladder)


def test_a_cheap_pass_is_made_wide_and_a_dear_one_not_at_all():
  wide = Timed(CHEAP, every=2)
  state = wide(start())
  assert state.done.all()
  assert wide.chosen.count(4) > len(wide.chosen) / 2
  narrow = Timed(DEAR, every=1, patience=3)
  assert rows_of(state) == rows_of(narrow(start()))
  # What is supposed is accepted would not pay; but it is tried now and then.
  assert narrow.chosen[:5] == [0, 0, 0, 1, 0]
  assert narrow.chosen.count(0) > len(narrow.chosen) / 2


def test_the_first_round_after_some_without_a_draft_is_made_alone():
  """The draft reads in that round what it lacks; then a quarter is tried."""
  loop = Timed(DEAR, every=32, patience=1)
  learned = []
  loop.loop._learn_time = lambda rounds, _: learned.append(rounds)
  loop(start(), 32 + 1 + 8)
  assert loop.asked == [(0, 32), (1, 1), (1, 8)]
  assert learned == [32, 8]


def test_no_more_rounds_are_made_than_were_asked_for():
  loop = Timed(CHEAP, every=4)
  state = loop(start(), 7)
  assert int(state.num_steps) == 7
  for _ in range(3):  # as one who looks at every token does
    state = loop(state, 1)
  assert int(state.num_steps) == 10
  assert len(loop.chosen) == 3  # after 4 and after 8 rounds
  state = loop(loop(state))
  assert state.done.all()


def test_a_length_that_was_mistimed_is_found_out():
  """Drafts of four seem to cost much less than they do."""
  loop = Timed({0: 1.0, 1: 1.2, 4: 1.8}, every=8)
  loop.takes = {0: 1.0, 1: 1.2, 4: 5.0}
  for _ in range(4):
    loop(start())
  assert loop.chosen[0] == 4
  assert loop.chosen[-1] == 1


def test_a_machine_that_slows_down_is_no_price_of_one_length():
  loop = Timed({0: 1.0, 1: 1.2, 4: 9.0}, every=8)
  loop(start())
  loop.takes = {0: 1.3, 1: 1.56, 4: 11.7}
  for _ in range(3):
    loop(start())
  assert loop.loop.seconds[1] / loop.loop.seconds[0] < 1.35  # and not 1.56
  assert set(loop.chosen[2:]) == {1}


def test_a_batch_that_drafting_leaves_half_empty_is_not_drafted_for():
  """One of two rows has a third of the other's to do."""
  near = {0: 1.0, 1: 1.4, 4: 9.0}
  loop = Timed(near, every=8)
  lengths = jnp.asarray(decoding.LENGTHS[:2])
  uneven = dataclasses.replace(
    start(), max_length=lengths + jnp.array([60, 20])
  )
  ended = loop(uneven)
  known = loop.ladder
  assert {n for n, _ in loop.asked} == {1}
  assert known.occupied[0] == 1
  before = known.occupied[1]
  assert 0.6 < before < 0.8
  loop(ended)  # and nothing of a batch that is over
  assert known.occupied[1] == before
  loop.asked.clear()
  loop(start())
  assert {n for n, _ in loop.asked} == {0}


def test_batches_are_as_full_as_their_last_rounds_of_one_kind():
  known = climbing.ladder()
  known.saw_batch({1}, 8, 0.5)  # eight full ones before
  known.saw_batch({1, 4}, 16, 0.25)
  np.testing.assert_allclose(known.occupied, [1, 0.5])
  known.saw_batch({0, 1}, 99, 0.1)
  np.testing.assert_allclose(known.occupied, [1, 0.5])


def test_a_length_is_left_for_a_clear_gain_only(monkeypatch):
  monkeypatch.setattr(ladder_lib, "_MARGIN", 0.1)
  loop = Timed({0: 1.0, 1: 1.5, 4: 9.0}, patience=100)

  def choice(acceptance):
    monkeypatch.setattr(ladder_lib, "_SUPPOSED", acceptance)
    loop.loop._choose(loop.ladder)
    return loop.chosen[-1]

  # A length of 1 gives 1 + a tokens: even at a = 0.5, a tenth better at 0.65.
  actual = [choice(a) for a in (0.55, 0.45, 0.30, 0.55, 0.66, 0.60)]
  assert actual == [1, 1, 0, 0, 1, 1]


def test_places_are_counted_apart_lean_on_the_one_before_and_fade(monkeypatch):
  monkeypatch.setattr(ladder_lib, "_KEEP", 1.0)
  known = climbing.ladder()
  # Ten rounds of two tokens: two were accepted in 4, one in 3, none in 3.
  known.saw(np.array([3, 3, 4]))
  first = (7 + 4 * 0.7) / (10 + 4)
  second = (4 + 4 * first) / (7 + 4)
  np.testing.assert_allclose(known.acceptances(), [first, *[second] * 3])
  tokens = 1 + first + first * second
  assert known.rates({0: 2.0, 2: 4.0}) == pytest.approx({0: 0.5, 2: tokens / 4})
  known.saw(np.array([9]))  # nothing was drafted
  np.testing.assert_allclose(known.reached, [10, 7, 0, 0])
  monkeypatch.setattr(ladder_lib, "_KEEP", 0.5)
  known.saw(np.array([1, 2]))
  np.testing.assert_allclose(known.reached, [10 / 2**3 + 3, 7 / 2**3, 0, 0])


def test_the_machines_speed_is_that_of_the_middle_turn(monkeypatch):
  """Of turns at several speeds, of which the first one is not counted."""
  clock, turns = [0.0], iter([50, 1, 2, 4, 2])
  monkeypatch.setattr(
    ladder_lib, "time", types.SimpleNamespace(perf_counter=lambda: clock[0])
  )
  state, speed = types.SimpleNamespace(num_steps=7), [0]

  def loop_of(length):
    def loop(params, state, rounds):
      if not length:  # a turn begins
        speed[0] = next(turns)
      clock[0] += speed[0] * (rounds - 1) * (1 + length)
      # It ends before it has made all rounds that it may make.
      return types.SimpleNamespace(num_steps=state.num_steps + rounds - 1)

    return loop

  actual = ladder_lib.measured(
    {n: loop_of(n) for n in (0, 3)}, None, state, lambda state: state
  )
  assert actual == pytest.approx({0: 2.0, 3: 8.0})


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
def test_an_engine_chooses_by_what_its_batches_show(on_mesh):
  """Its texts are plain decoding's, whatever lengths were the fastest."""
  engine = engine_of(climbing.ladder(every=3, patience=2), on_mesh)
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
