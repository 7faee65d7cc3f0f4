"""Verification widths that the host chooses between rounds."""

import dataclasses
import functools
import types

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import MODEL, PARAMS, VOCAB, rows_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import specjax
from specjax import drafters, exact, ladder, rules
from specjax.drafters import depth
from specjax.engine import Batch, Engine
from specjax.ladder import Ladder
from specjax.requests import Settings

pytestmark = pytest.mark.usefixtures("quick_to_compile")

WIDTHS = (0, 1, 4)
CHEAP = {0: 1.0, 1: 1.1, 4: 1.4}  # seconds of a round, by its width
DEAR = {0: 1.0, 1: 2.2, 4: 6.0}


def fixed(tree):
  return drafters.model.drafter(
    MODEL, tree=tree, vocab_size=VOCAB,
    depth=depth.fixed(depth=tree.max_depth),
  )  # fmt: skip


RUNGS = ladder.rungs(
  MODEL, fixed, rule=rules.get("token"), vocab_size=VOCAB, widths=WIDTHS
)


def request(i):
  tokens = decoding.PROMPTS[i, : decoding.LENGTHS[i]].tolist()
  return types.SimpleNamespace(
    token_ids=tokens, stream=i, settings=Settings(), ends=None
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


def climb(ladder_, seconds):
  """A loop over the rungs whose rounds take what is told, and no other time."""
  loop = ladder.Climb({w: program(w) for w in WIDTHS}, ladder_, seconds)
  learn = loop._learn_time

  def learn_what_is_told(rounds, _):
    learn(rounds, rounds * seconds[loop._now])

  loop._learn_time = learn_what_is_told
  return loop


def test_a_cheap_pass_is_made_wide_and_a_dear_one_not_at_all():
  wide = climb(Ladder(widths=WIDTHS, every=2), CHEAP)
  state = wide(PARAMS, start(), 1000)
  assert state.done.all()
  assert wide.chosen.count(4) > len(wide.chosen) / 2
  narrow = climb(Ladder(widths=WIDTHS, every=1, patience=3), DEAR)
  other = narrow(PARAMS, start(), 1000)
  assert rows_of(state) == rows_of(other)
  # What is supposed is accepted would not pay; but it is tried now and then.
  assert narrow.chosen[:5] == [0, 0, 0, 1, 0]
  assert narrow.chosen.count(0) > len(narrow.chosen) / 2


def test_no_more_rounds_are_made_than_were_asked_for():
  loop = climb(Ladder(widths=WIDTHS, every=4), CHEAP)
  state = loop(PARAMS, start(), 7)
  assert int(state.num_steps) == 7
  assert len(loop.chosen) == 2
  for _ in range(3):  # as one who looks at every token does
    state = loop(PARAMS, state, 1)
  assert int(state.num_steps) == 10
  assert len(loop.chosen) == 3  # after 4 and after 8 rounds
  state = loop(PARAMS, loop(PARAMS, state, 1000), 1000)
  assert state.done.all()


def test_a_text_that_ends_with_its_rounds_is_not_called_for_again():
  loop, calls = climb(Ladder(widths=WIDTHS, every=60), DEAR), []
  plain = loop._loops[0]

  def counting(params, state, rounds):
    calls.append(int(rounds))
    return plain(params, state, rounds)

  loop._loops = {**loop._loops, 0: counting}
  state = loop(PARAMS, start(), 1000)  # plain decoding of sixty tokens
  assert calls == [60]
  assert int(state.num_steps) == 60
  loop(PARAMS, state, 1000)
  assert calls == [60]


def test_a_width_that_was_mistimed_is_found_out():
  """Drafts of four seem to cost much less than they do."""
  loop = climb(Ladder(widths=WIDTHS, every=8), {0: 1.0, 1: 1.2, 4: 5.0})
  loop.seconds = {0: 1.0, 1: 1.2, 4: 1.8}
  for _ in range(4):
    loop(PARAMS, start(), 1000)
  assert loop.chosen[0] == 4
  assert loop.chosen[-1] == 1
  assert loop.seconds[4] > 1.02 * 1.8


def test_a_machine_that_slows_down_is_no_price_of_one_width():
  loop = climb(Ladder(widths=WIDTHS, every=8), {0: 1.0, 1: 1.2, 4: 9.0})
  slower = {0: 1.3, 1: 1.56, 4: 11.7}
  loop(PARAMS, start(), 1000)
  learn = type(loop)._learn_time
  loop._learn_time = lambda rounds, _: learn(
    loop, rounds, rounds * slower[loop._now]
  )
  for _ in range(3):
    loop(PARAMS, start(), 1000)
  assert loop._drift > 0.1
  assert loop.seconds[1] / loop.seconds[0] < 1.35  # and not 1.56
  assert set(loop.chosen[2:]) == {1}


def test_a_batch_that_drafting_leaves_half_empty_is_not_drafted_for():
  loop = climb(Ladder(widths=WIDTHS, every=8), {0: 1.0, 1: 1.4, 4: 9.0})
  loop(PARAMS, start(), 1000)
  assert loop.chosen[-1] == 1
  state = start()  # and one of two rows has nothing to do
  stopped = state.stop_reason.at[0].set(1)
  for _ in range(10):
    loop(PARAMS, dataclasses.replace(state, stop_reason=stopped), 1000)
  assert 0.5 < loop._at_work[1] < 0.8
  loop._at_work[0] = 1.0  # had they gone at the same pace
  loop._choose()
  assert loop.chosen[-1] == 0


def test_what_rounds_take_is_measured():
  loops = {w: program(w) for w in WIDTHS}
  told = {0: 1.0, 1: 2.0, 4: 1e6}  # a toy's round takes much less
  loop = ladder.Climb(loops, Ladder(widths=WIDTHS, every=8), told)
  for _ in range(3):
    loop(PARAMS, start(), 1000)
  assert loop._drift < -0.3


@pytest.mark.parametrize("on_mesh", [False, True])
def test_an_engine_climbs_by_what_its_batches_show(on_mesh):
  """Its texts are plain decoding's, whatever widths were the fastest."""
  mesh, params = None, PARAMS
  if on_mesh:
    mesh = jax.make_mesh(
      (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
  settings = dict(
    params=params, mesh=mesh, stop_tokens=(), max_new_tokens=40,
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0,
  )  # fmt: skip
  climbing = Engine(
    decoder=RUNGS.widest, rungs=RUNGS,
    ladder=Ladder(widths=WIDTHS, every=3, patience=2), **settings,
  )  # fmt: skip
  plain = Engine(
    decoder=specjax.make_decoder(MODEL, vocab_size=VOCAB), **settings
  )
  batch = Batch(tuple(map(request, range(2))), 2, 32)
  found, _ = climbing.run(batch)
  expected, _ = plain.run(batch)
  for one, other in zip(found, expected, strict=True):
    assert one.token_ids == other.token_ids
    assert sum(one.accept_counts) == one.num_target_calls
  assert climbing.ladder.reached[0] > 0
  before = climbing.ladder.reached[0]
  again, _ = climbing.run(batch)
  assert [a.token_ids for a in again] == [b.token_ids for b in expected]
  assert climbing.ladder.reached[0] != before


def test_what_a_batch_has_shown_the_next_one_begins_with():
  shared = Ladder(widths=WIDTHS, every=4, patience=100, supposed=1.0)
  assert max(shared.rates(CHEAP), key=shared.rates(CHEAP).get) == 4
  near = {0: 1.0, 1: 1.3, 4: 3.0}
  first, again = climb(shared, near), climb(shared, near)
  first(PARAMS, start(), 1000)
  again(PARAMS, start(), 1000)
  assert first.chosen[0] == 4
  assert again.chosen[0] == 1


def test_rounds_of_every_width_are_timed_on_a_copy():
  state = program(4)(PARAMS, start(), jnp.int32(2))
  before = rows_of(state)
  loops = {w: program(w) for w in WIDTHS}
  seconds = ladder.measured(loops, PARAMS, state, rounds=2, repeats=1)
  assert set(seconds) == set(WIDTHS)
  assert min(seconds.values()) > 0
  assert rows_of(state) == before
  ended = dataclasses.replace(
    state, stop_reason=jnp.ones_like(state.stop_reason)
  )
  with pytest.raises(ValueError, match="all done"):
    ladder.measured(loops, PARAMS, ended)


def test_a_width_is_left_for_a_clear_gain_only():
  known = Ladder(widths=WIDTHS, margin=0.1, patience=100)
  loop = climb(known, {0: 1.0, 1: 1.5, 4: 9.0})

  def choice(acceptance):
    known.supposed = acceptance
    loop._choose()
    return loop.chosen[-1]

  # A width of 1 gives 1 + a tokens: even at a = 0.5, a tenth better at 0.65.
  found = [choice(a) for a in (0.55, 0.45, 0.30, 0.55, 0.66, 0.60)]
  assert found == [1, 1, 0, 0, 1, 1]


def test_places_are_counted_apart_and_lean_on_the_one_before():
  known = Ladder(widths=(0, 2, 3), keep=1.0, supposed=0.5)
  # Ten rounds of two tokens: two stood in 4, one in 3, none in 3.
  known.saw(np.array([3, 3, 4]))
  first = (7 + 4 * 0.5) / (10 + 4)
  second = (4 + 4 * first) / (7 + 4)
  np.testing.assert_allclose(known.acceptances, [first, second, second])
  rates = known.rates({0: 2.0, 2: 4.0})
  tokens = 1 + first + first * second
  assert rates == pytest.approx({0: 0.5, 2: tokens / 4})
  known.saw(np.array([9]))  # nothing was drafted
  np.testing.assert_allclose(known.reached, [10, 7, 0])


def test_old_rounds_fade():
  known = Ladder(widths=(0, 1), keep=0.5)
  known.saw(np.array([0, 8]))
  known.saw(np.array([1, 0]))
  np.testing.assert_allclose(known.reached, [8 / 2 + 1])
  np.testing.assert_allclose(known.stood, [8 / 2])


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (dict(widths=(4,)), "two widths or more"),
    (dict(widths=(0, 2, 1)), "rising"),
    (dict(patience=0), "patience and every >= 1"),
    (dict(keep=0.0), "keep must be in"),
  ],
)
def test_what_is_no_ladder_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    Ladder(**settings)


def test_widths_are_those_of_the_loops_and_take_time():
  loops = {w: program(w) for w in WIDTHS}
  with pytest.raises(ValueError, match="there are loops of"):
    ladder.Climb(loops, Ladder(), CHEAP)
  with pytest.raises(ValueError, match="there are seconds of"):
    ladder.Climb(loops, Ladder(widths=WIDTHS), {0: 1.0})
  with pytest.raises(ValueError, match="must be positive"):
    ladder.Climb(loops, Ladder(widths=WIDTHS), {0: 0.0, 1: 1.0, 4: 1.0})
  with pytest.raises(ValueError, match="two widths or more"):
    ladder.rungs(
      MODEL, fixed, rule=rules.get("token"), vocab_size=VOCAB, widths=(0,)
    )
