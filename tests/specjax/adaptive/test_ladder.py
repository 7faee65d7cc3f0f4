"""Draft lengths among which the host chooses between rounds."""

import dataclasses
import types

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from climbing import LENGTHS, RUNGS, program, start
from decoding import MODEL, PARAMS, VOCAB, rows_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import specjax
from specjax.adaptive import ladder
from specjax.adaptive.ladder import Ladder
from specjax.runtime.engine import Engine
from specjax.runtime.requests import Batch, Settings

pytestmark = pytest.mark.usefixtures("quick_to_compile")

CHEAP = {0: 1.0, 1: 1.1, 4: 1.4}  # seconds of a round, by its length
DEAR = {0: 1.0, 1: 2.2, 4: 6.0}


def request(i):
  tokens = decoding.PROMPTS[i, : decoding.LENGTHS[i]].tolist()
  return types.SimpleNamespace(
    token_ids=tokens, stream=i, settings=Settings(), ends=None
  )


class Climbing:
  """A loop over the rungs whose rounds take what is told, and no other time.

  Attributes:
    loop: what climbs.
    ladder: how.
    takes: seconds of a round by its length.
    chosen: lengths, in order.
    asked: length and most rounds of every call.
  """

  def __init__(self, ladder_, seconds):
    self.chosen, self.asked, self.takes = [], [], seconds
    self.ladder = ladder_
    self.loop = ladder.Climb({n: self._called(n) for n in LENGTHS}, seconds)
    choose, learn = self.loop._choose, self.loop._learn_time

    def choose_and_tell(known):
      choose(known)
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
  wide = Climbing(Ladder(lengths=LENGTHS, every=2), CHEAP)
  state = wide(start())
  assert state.done.all()
  assert wide.chosen.count(4) > len(wide.chosen) / 2
  narrow = Climbing(Ladder(lengths=LENGTHS, every=1, patience=3), DEAR)
  other = narrow(start())
  assert rows_of(state) == rows_of(other)
  # What is supposed is accepted would not pay; but it is tried now and then.
  assert narrow.chosen[:5] == [0, 0, 0, 1, 0]
  assert narrow.chosen.count(0) > len(narrow.chosen) / 2
  made = narrow.ladder.rounds
  assert sum(made.values()) == int(other.num_steps)
  assert made[4] == 0 < made[1] < made[0]


def test_a_draft_is_tried_for_a_quarter_of_the_rounds():
  loop = Climbing(Ladder(lengths=LENGTHS, every=16, patience=1), DEAR)
  loop(start())
  assert loop.asked[:5] == [(0, 16), (1, 1), (1, 4), (0, 16), (1, 1)]


def test_no_more_rounds_are_made_than_were_asked_for():
  loop = Climbing(Ladder(lengths=LENGTHS, every=4), CHEAP)
  state = loop(start(), 7)
  assert int(state.num_steps) == 7
  assert len(loop.chosen) == 2
  for _ in range(3):  # as one who looks at every token does
    state = loop(state, 1)
  assert int(state.num_steps) == 10
  assert len(loop.chosen) == 3  # after 4 and after 8 rounds
  state = loop(loop(state))
  assert state.done.all()


def test_a_text_that_ends_with_its_rounds_is_not_called_for_again():
  loop = Climbing(Ladder(lengths=LENGTHS, every=60), DEAR)
  state = loop(start())  # plain decoding of sixty tokens
  assert loop.asked == [(0, 60)]
  assert int(state.num_steps) == 60
  loop(state)
  assert loop.asked == [(0, 60)]


def test_a_length_that_was_mistimed_is_found_out():
  """Drafts of four seem to cost much less than they do."""
  loop = Climbing(
    Ladder(lengths=LENGTHS, every=8), {0: 1.0, 1: 1.2, 4: 1.8}
  )  # fmt: skip
  loop.takes = {0: 1.0, 1: 1.2, 4: 5.0}
  for _ in range(4):
    loop(start())
  assert loop.chosen[0] == 4
  assert loop.chosen[-1] == 1
  assert loop.loop.seconds[4] > 1.02 * 1.8


def test_a_machine_that_slows_down_is_no_price_of_one_length():
  loop = Climbing(Ladder(lengths=LENGTHS, every=8), {0: 1.0, 1: 1.2, 4: 9.0})
  loop(start())
  loop.takes = {0: 1.3, 1: 1.56, 4: 11.7}
  for _ in range(3):
    loop(start())
  assert loop.loop._drift > 0.1
  assert loop.loop.seconds[1] / loop.loop.seconds[0] < 1.35  # and not 1.56
  assert set(loop.chosen[2:]) == {1}


def uneven():
  """One of two rows has a third of the other's to do."""
  lengths = jnp.asarray(decoding.LENGTHS[:2])
  return dataclasses.replace(start(), max_length=lengths + jnp.array([60, 20]))


def test_a_batch_that_drafting_leaves_half_empty_is_not_drafted_for():
  known = Ladder(lengths=LENGTHS, every=8)
  near = {0: 1.0, 1: 1.4, 4: 9.0}
  assert max(known.rates(near), key=known.rates(near).get) == 1
  loop = Climbing(known, near)
  ended = loop(uneven())
  assert {n for n, _ in loop.asked} == {1}
  assert known.occupied[0] == 1
  assert 0.6 < known.occupied[1] < 0.8
  before = known.occupied[1]
  loop(ended)  # and nothing of a batch that is over
  assert known.occupied[1] == before
  loop.asked.clear()
  loop(start())
  assert {n for n, _ in loop.asked} == {0}


def test_rows_that_fill_a_batch_up_leave_it_no_emptier():
  known = Ladder(lengths=LENGTHS, every=8)
  state = start()
  nothing = jnp.asarray(decoding.LENGTHS[:1])
  filled = dataclasses.replace(
    state, max_length=state.max_length.at[:1].set(nothing),
    stop_reason=state.stop_reason.at[0].set(1),
  )  # fmt: skip
  Climbing(known, CHEAP)(filled)
  np.testing.assert_array_equal(known.occupied, [1, 1])


def test_the_emptiness_of_a_batch_of_both_kinds_is_laid_to_none():
  known = Ladder(lengths=LENGTHS, every=4, patience=1)
  loop = Climbing(known, DEAR)
  loop(uneven())
  assert {n for n, _ in loop.asked} == {0, 1}
  np.testing.assert_array_equal(known.occupied, [1, 1])


def test_what_rounds_take_is_measured():
  loops = {n: program(n) for n in LENGTHS}
  told = {0: 1.0, 1: 2.0, 4: 1e6}  # a toy's round takes much less
  loop = ladder.Climb(loops, told)
  for _ in range(3):
    loop(PARAMS, start(), 1000, ladder=Ladder(lengths=LENGTHS, every=8))
  assert loop._drift < -0.3


def engine_of(known, on_mesh):
  """A ladder's engine, or without a ladder a plain one."""
  mesh, params = None, PARAMS
  if on_mesh:
    mesh = jax.make_mesh(
      (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
  plain = specjax.make_decoder(MODEL, vocab_size=VOCAB)
  return Engine(
    decoder=RUNGS.longest if known else plain, rungs=known and RUNGS,
    ladder=known, params=params, mesh=mesh, stop_tokens=(), max_new_tokens=40,
    max_length=128, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0,
  )  # fmt: skip


def test_the_first_round_after_some_without_a_draft_is_in_no_price():
  """The draft reads in that round what it lacks."""
  loop = Climbing(Ladder(lengths=LENGTHS, every=32, patience=1), DEAR)
  assert loop.loop.begin(loop.ladder) == 0
  learned = []
  loop.loop._learn_time = lambda rounds, _: learned.append(rounds)
  loop(start(), 32 + 1 + 8)
  assert loop.asked == [(0, 32), (1, 1), (1, 8)]
  assert learned == [32, 8]


def test_a_batch_is_begun_as_it_was_said_to_be():
  loop = Climbing(Ladder(lengths=LENGTHS, every=70, patience=2), DEAR)
  for expected in (0, 0, 1, 0):  # the third is when a draft is tried
    assert loop.loop.begin(loop.ladder) == expected
    before = len(loop.asked)
    loop(start())
    assert loop.asked[before][0] == expected


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_draft_reads_no_prompts_that_it_will_not_draft_for(on_mesh):
  climbing = engine_of(Ladder(lengths=LENGTHS), on_mesh)
  batch = Batch(tuple(map(request, range(2))), 2, 32)
  climbing.compile(batch)
  (made,) = climbing.programs.values()
  held = lambda: climbing.prefill(batch).drafter_state.inner.length.tolist()
  price = lambda one: made.loop.seconds.update({0: 1.0, 1: one, 4: 9 * one})
  price(1.0)
  assert held() == decoding.LENGTHS[:2].tolist()
  price(9.0)
  assert held() == [0, 0]
  actual, _ = climbing.run(batch)
  plain, _ = engine_of(None, on_mesh).run(batch)
  assert [a.token_ids for a in actual] == [b.token_ids for b in plain]
  assert sum(c.num_drafted for c in actual) == 0


@pytest.mark.parametrize("on_mesh", [False, True])
def test_an_engine_climbs_by_what_its_batches_show(on_mesh):
  """Its texts are plain decoding's, whatever lengths were the fastest."""
  climbing = engine_of(Ladder(lengths=LENGTHS, every=3, patience=2), on_mesh)
  plain = engine_of(None, on_mesh)
  batch = Batch(tuple(map(request, range(2))), 2, 32)
  actual, _ = climbing.run(batch)
  expected, _ = plain.run(batch)
  for one, other in zip(actual, expected, strict=True):
    assert one.token_ids == other.token_ids
    assert sum(one.accept_counts) == one.num_target_calls
  assert climbing.ladder.reached[0] > 0
  before = climbing.ladder.reached[0]
  again, _ = climbing.run(dataclasses.replace(batch, width=64))
  assert [a.token_ids for a in again] == [b.token_ids for b in expected]
  assert climbing.ladder.reached[0] != before
  narrow, wide = climbing.programs.values()
  assert wide.loop is narrow.loop


def test_what_a_batch_has_shown_the_next_one_begins_with():
  shared = Ladder(lengths=LENGTHS, every=4, patience=100, supposed=1.0)
  assert max(shared.rates(CHEAP), key=shared.rates(CHEAP).get) == 4
  near = {0: 1.0, 1: 1.3, 4: 3.0}
  first, again = Climbing(shared, near), Climbing(shared, near)
  first(start())
  again(start())
  assert first.chosen[0] == 4
  assert again.chosen[0] == 1


def test_prices_are_of_a_loop_and_acceptance_is_of_a_ladder():
  """As at two temperatures, which share programs."""
  near = {0: 1.0, 1: 1.3, 4: 3.0}
  settings = dict(lengths=LENGTHS, every=4, patience=100, supposed=1.0)
  loop = Climbing(Ladder(**settings), near)
  loop(start())
  taught, loop.ladder = loop.ladder, dataclasses.replace(loop.ladder)
  assert loop.ladder.reached.sum() == 0 < taught.reached.sum()
  loop.chosen.clear()
  loop(start())
  assert loop.chosen[0] == 4


def test_rounds_of_every_length_are_timed_on_a_copy():
  state = program(4)(PARAMS, start(), jnp.int32(2))
  before = rows_of(state)
  loops = {n: program(n) for n in LENGTHS}
  seconds = ladder.measured(loops, PARAMS, state, rounds=2, repeats=1)
  assert set(seconds) == set(LENGTHS)
  assert rows_of(state) == before
  ended = dataclasses.replace(
    state, stop_reason=jnp.ones_like(state.stop_reason)
  )
  with pytest.raises(ValueError, match="all done"):
    ladder.measured(loops, PARAMS, ended)


def test_the_machines_speed_is_that_of_the_middle_turn(monkeypatch):
  """Of turns at several speeds, of which the first one is not counted."""
  clock, turns = [0.0], iter([50, 1, 2, 4])
  monkeypatch.setattr(
    ladder, "time", types.SimpleNamespace(perf_counter=lambda: clock[0])
  )
  state = types.SimpleNamespace(num_steps=7, done=np.array([False, True]))
  speed = [0]

  def loop_of(length):
    def loop(params, state, rounds):
      if not length:  # a turn begins
        speed[0] = next(turns)
      clock[0] += speed[0] * (rounds - 1) * (1 + length)
      # It ends before it has made all rounds that it may make.
      return types.SimpleNamespace(num_steps=state.num_steps + rounds - 1)

    return loop

  actual = ladder.measured(
    {n: loop_of(n) for n in (0, 3)}, None, state, repeats=3,
    copy=lambda state: state,
  )  # fmt: skip
  assert actual == pytest.approx({0: 2.0, 3: 8.0})


def test_a_length_is_left_for_a_clear_gain_only():
  known = Ladder(lengths=LENGTHS, margin=0.1, patience=100)
  loop = Climbing(known, {0: 1.0, 1: 1.5, 4: 9.0})

  def choice(acceptance):
    known.supposed = acceptance
    loop.loop._choose(known)
    return loop.chosen[-1]

  # A length of 1 gives 1 + a tokens: even at a = 0.5, a tenth better at 0.65.
  actual = [choice(a) for a in (0.55, 0.45, 0.30, 0.55, 0.66, 0.60)]
  assert actual == [1, 1, 0, 0, 1, 1]


def test_places_are_counted_apart_and_lean_on_the_one_before():
  known = Ladder(lengths=(0, 2, 3), keep=1.0, supposed=0.5)
  # Ten rounds of two tokens: two were accepted in 4, one in 3, none in 3.
  known.saw(np.array([3, 3, 4]))
  first = (7 + 4 * 0.5) / (10 + 4)
  second = (4 + 4 * first) / (7 + 4)
  np.testing.assert_allclose(known.acceptances, [first, second, second])
  rates = known.rates({0: 2.0, 2: 4.0})
  tokens = 1 + first + first * second
  assert rates == pytest.approx({0: 0.5, 2: tokens / 4})
  known.saw(np.array([9]))  # nothing was drafted
  np.testing.assert_allclose(known.reached, [10, 7, 0])


def test_old_rounds_fade_by_the_number_of_new_ones():
  known = Ladder(lengths=(0, 1), keep=0.5)
  known.saw(np.array([0, 8]))
  known.saw(np.array([1, 0]))
  np.testing.assert_allclose(known.reached, [8 / 2 + 1])
  np.testing.assert_allclose(known.accepted, [8 / 2])
  known.saw(np.array([9]))  # nothing was drafted
  known.saw(np.array([1, 2]))
  np.testing.assert_allclose(known.reached, [5 / 2**3 + 3])
  np.testing.assert_allclose(known.accepted, [4 / 2**3 + 2])


def test_how_full_batches_are_is_a_mean_over_their_last_rounds():
  known = Ladder(lengths=(0, 1))
  known.saw_batch(drafts=True, rounds=8, share=0.5)  # eight full ones before
  known.saw_batch(drafts=True, rounds=16, share=0.25)
  np.testing.assert_allclose(known.occupied, [1, 0.5])
  known.saw_batch(drafts=False, rounds=10**9, share=0.5)
  known.saw_batch(drafts=False, rounds=512, share=0.0)
  np.testing.assert_allclose(known.occupied, [0.25, 0.5])


def untried(seconds):
  """A loop that is asked for choices and prices alone."""
  return ladder.Climb(dict.fromkeys(seconds), seconds)


def test_a_length_that_few_rounds_were_timed_of_is_given_a_chance():
  """By 0.6 over the root of their number: 1.3 for 4, and 1.06 for 100."""
  known = Ladder(lengths=(0, 1), supposed=0.7)
  for price, rounds, expected in (
    (2.0, 4, 1), (2.0, 5, 1), (2.0, 6, 0), (2.0, 100, 0), (2.15, 4, 0),
  ):  # fmt: skip
    loop = untried({0: 1.0, 1: price})
    loop._timed[1] = rounds
    assert loop._next(known) == (expected, False)
  equal = untried({0: 1.0, 1: 1.7})
  assert equal._next(known) == (0, False)  # the shorter of two as fast


def test_what_rounds_take_is_laid_to_the_drift_first_and_then_to_their_price():
  loop = untried({0: 1.0, 1: 2.0})
  loop._now = 1
  loop._learn_time(64, 64 * 2.2)  # half of it is drift
  np.testing.assert_allclose(loop._drift, np.log(1.1) / 2)
  np.testing.assert_allclose(loop.seconds[1], 2 * 1.1 ** (32 / 164))
  faded = 100 * 0.9997**64
  assert loop._timed == pytest.approx({0: faded, 1: faded + 64})
  held_up = untried({0: 1.0, 1: 2.0})
  held_up._now = 1
  held_up._learn_time(64, 64 * 200)
  np.testing.assert_allclose(held_up._drift, np.log(1.5) / 2)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (dict(lengths=(4,)), "two lengths or more"),
    (dict(lengths=(0, 2, 1)), "rising"),
    (dict(patience=0), "patience and every >= 1"),
    (dict(keep=0.0), "keep must be in"),
  ],
)
def test_what_is_no_ladder_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    Ladder(**settings)


def test_lengths_are_those_of_the_loops_and_take_time():
  loops = {n: program(n) for n in LENGTHS}
  with pytest.raises(ValueError, match=r"there are loops of \(0, 1, 4\)"):
    ladder.Climb(loops, CHEAP)(PARAMS, start(), 1, ladder=Ladder())
  with pytest.raises(ValueError, match="and seconds of"):
    ladder.Climb(loops, {0: 1.0})
  with pytest.raises(ValueError, match="must be positive"):
    ladder.Climb(loops, {0: 0.0, 1: 1.0, 4: 1.0})
