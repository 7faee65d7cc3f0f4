"""Timings of runs in pieces and of whole ones, and the parts of a round."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_heads
import toys

import specjax
from specjax import random
from specjax.runtime import timing

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@dataclasses.dataclass
class Clock:
  """An engine of known speed, and the clock that it is timed by."""

  now: float = 0.0
  length: int = 8

  def __call__(self):
    return self.now

  def prefill(self, batch):
    self.now += 1.0
    return self.state(0)

  def generate(self, batch, state, num_rounds=1 << 30):
    rounds = min(num_rounds, self.length - state.num_steps)
    self.now += 0.125 + 0.5 * rounds
    return self.state(state.num_steps + rounds)

  def state(self, num_steps):
    return dataclasses.make_dataclass("State", ["num_steps"])(num_steps)


def run_of(monkeypatch, clock, **changes):
  monkeypatch.setattr(timing.time, "perf_counter", clock)
  return timing._in_pieces(clock, None, **changes)


def test_two_pieces_tell_what_a_whole_run_takes(monkeypatch):
  clock = Clock()
  run = run_of(monkeypatch, clock, place=3, parts=None)
  assert (run.prefill, run.dispatch, run.seconds) == (1.0, 0.125, 4.0)
  assert run.rounds == 8
  before = clock.now
  clock.generate(None, clock.prefill(None))
  assert run.whole == clock.now - before


def test_an_empty_call_that_was_held_up_makes_no_time_negative(monkeypatch):
  """The first call of the loop, and one that finds nothing to do, take long."""
  times = iter([0.0, 5.0, 5.0, 5.6])  # 5 s without a repeat, 0.6 s with all
  monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))
  seconds, _ = timing.per_repeat(lambda params, carry, count: carry, None, 0)
  assert seconds == pytest.approx(0.6 / timing._REPEATS)
  clock = Clock()
  fast = clock.generate

  def generate(batch, state, num_rounds=1 << 30):
    clock.now += 100.0 * (state.num_steps == clock.length)
    return fast(batch, state, num_rounds)

  clock.generate = generate
  assert run_of(monkeypatch, clock, place=3, parts=None).seconds == 4.25


def test_parts_are_shares_of_the_round_beside_them(monkeypatch):
  """A machine that is twice as slow for a while changes no share."""
  runs = []
  for slower in (1, 2, 2):
    clock = Clock()
    fast = clock.generate

    def generate(*arguments, slower=slower, fast=fast, clock=clock):
      before = clock.now
      state = fast(*arguments)
      clock.now = before + slower * (clock.now - before)
      return state

    clock.generate = generate
    parts = lambda state, slower=slower: {"target 1": 0.25 * slower}
    runs.append(run_of(monkeypatch, clock, place=4, parts=parts))
  assert timing._mean_round(runs) == pytest.approx((0.5 + 1 + 1) / 3)
  assert timing._scaled(runs, 0.5) == {"target 1": 0.25}


def test_a_loop_of_passes_makes_all_of_them_where_the_cache_ends():
  model = toys.table_model(5)
  caches = {
    who: model.init_cache(2, 9).replace(length=jnp.full((2,), 3 + place))
    for place, who in enumerate(("target", "draft"))
  }
  loop = timing.passes_loop(
    {"target": (model, "target"), "draft": (model, "draft")},
    (("draft", 2), ("target", 4)),
  )
  params = dict.fromkeys(caches, toys.table(5, seed=0, scale=1.0) + 9)
  for repeats, written in ((0, 0), (1, 1)):
    copies = {who: cache.replace() for who, cache in caches.items()}
    actual = loop(params, copies, repeats)
    for place, (who, fed) in enumerate((("target", 4), ("draft", 2))):
      np.testing.assert_array_equal(actual[who].length, 3 + place)
      places = np.asarray(actual[who].positions[0]) > 0
      assert places.sum() == written * fed
      assert places[3 + place : 3 + place + fed * written].all()
    caches = actual
  # The draft was fed from token 0 on, and the target from what came of it, both
  # different tokens.
  fed = lambda who, row: actual[who].keys[0][row, 0, :, 0].astype(int)
  np.testing.assert_array_equal(fed("draft", 0)[4:6], [0, 2])
  np.testing.assert_array_equal(fed("draft", 1)[4:6], [4, 1])
  np.testing.assert_array_equal(fed("target", 0)[3:7], [1, 3, 0, 2])


@pytest.mark.parametrize("name", ["eagle, drawn chain", "medusa, best tree"])
def test_a_loop_of_drafts_makes_all_of_them(name):
  """Each after the token and the state that the one before led to."""
  vocab = 5
  decoder = specjax.make_decoder(
    toy_heads.target(vocab),
    drafter=toy_heads.make(name, vocab),
    rule=toy_heads.RULES[name][0],
  )
  table = jnp.asarray(toys.table(vocab, seed=0))
  params = specjax.Params(target=table, draft=table)
  state = decoder.init(
    params, jnp.array([[1, 2, 3], [4, 0, 1]]), jnp.array([3, 2]),
    jax.random.key(0), buffer_length=9, max_new_tokens=4,
  )  # fmt: skip
  loop, newest, states = timing.proposals_loop(decoder), [], []
  for repeats in (0, 1, 2):
    carry = (state.tokens, state.drafter_state, state.target_cache)
    carry = jax.tree.map(jnp.copy, carry)
    tokens, drafter_state, cache = loop(params, carry, repeats, state)
    newest.append([int(tokens[row, n - 1]) for row, n in enumerate((3, 2))])
    states.append(
      dataclasses.replace(
        state, tokens=tokens, drafter_state=drafter_state, target_cache=cache
      )
    )
    assert jax.tree.structure(drafter_state) == jax.tree.structure(
      state.drafter_state
    )
    np.testing.assert_array_equal(cache.length, state.target_cache.length)
  assert newest[0] == [3, 0]
  for index, expected in enumerate(newest[1:]):
    keys = random.step_keys(state.keys, state.length - 1 + index)
    now = dataclasses.replace(states[index], keys=keys)
    draft, *_ = decoder.propose(params, now)
    total = draft.tokens.sum(1)
    if draft.log_probs is not None:
      total += (draft.log_probs[:, 1:].max(-1) > -1).any(1)
    assert (total % vocab).tolist() == expected


def test_passes_of_a_draft_on_the_targets_cache_are_timed_there(monkeypatch):
  model = toys.table_model(5)
  drafter = specjax.drafters.quantized_self(
    model, tree=specjax.tree.chain(2), vocab_size=5
  )
  decoder = specjax.make_decoder(model, drafter=drafter, vocab_size=5)
  speculative = types.SimpleNamespace(
    params=specjax.Params(target=1, draft=2), decoder=decoder, mesh=1
  )
  pieces = timing.Pieces(
    speculative,
    types.SimpleNamespace(max_new_tokens=4),
    draft=model,
    typical=types.SimpleNamespace(rows=1, width=2),
  )
  timed = []
  monkeypatch.setattr(
    pieces, "_time", lambda orders, caches: timed.append((orders, caches)) or {}
  )
  pieces._of_a_round(dataclasses.make_dataclass("State", [
    "tokens", "drafter_state", "target_cache"
  ])(0, (), "cache"))  # fmt: skip
  ((orders, caches),) = timed
  assert orders["in order"] == (("draft", 1), ("draft", 1), ("target", 3))
  assert caches == {"target": "cache"}
  assert pieces._params == {"target": 1, "draft": 2}


def test_what_a_round_takes_adds_up_where_a_head_drafts():
  costs = timing.StepCosts(
    step=1.0, plain_step=0.5, target={1: 0.3, 4: 0.4}, draft={},
    draft_passes=(), nodes=4, in_order=0.45, with_laws=0.8, dispatch=0.0,
    prefill=0.0, plain_prefill=0.0, proposal=0.25,
  )  # fmt: skip
  assert costs.drafting == 0.25
  assert costs.forwards == 0.65
  parts = costs.attribution
  assert sum(parts.values()) == pytest.approx(costs.step)
  assert parts["passes"] == 0.65
  assert parts["laws"] == pytest.approx(0.1)
  on_a_mesh = dataclasses.replace(costs, with_laws=None)
  assert on_a_mesh.attribution["laws"] is None


COSTS = timing.StepCosts(
  step=1.5, plain_step=1.0, target={1: 0.9, 4: 1.0}, draft={1: 0.1},
  draft_passes=(1, 1, 1), nodes=4, in_order=1.35, with_laws=1.4, dispatch=0.0,
  prefill=0.0, plain_prefill=0.0, again=0.95,
)  # fmt: skip


def test_timings_that_agree_leave_no_doubt():
  assert COSTS.doubts == []
  # A few hundredths less than nothing are what timings differ by.
  close = dataclasses.replace(COSTS, in_order=1.27, with_laws=1.33, step=1.32)
  assert close.doubts == []
  assert min(close.attribution.values()) == 0
  assert sum(close.attribution.values()) == pytest.approx(close.step)


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(step=1.2), "bookkeeping took -200.00 ms of a round"),
    (dict(with_laws=1.2), "laws took -150.00 ms of a round"),
    (dict(in_order=1.1), "out of cache took -200.00 ms of a round"),
    (dict(in_order=1.1, with_laws=None), "out of cache took -200.00 ms"),
    (dict(plain_step=0.8), "the pass of a plain round took 900.00 ms, the"),
    (dict(target={1: 1.1, 4: 1.0}), "over one token took 1100.00 ms, one over"),
    (dict(again=0.6), "900.00 ms and 600.00 ms, disagree by 50%"),
    (dict(again=1.2), "900.00 ms and 1200.00 ms, disagree by 33%"),
    (dict(step=0.8, in_order=None, with_laws=None), "900.00 ms, a drafted"),
  ],
  ids=str,
)
def test_timings_that_cannot_be_are_said(changes, words):
  doubts = dataclasses.replace(COSTS, **changes).doubts
  assert any(words in doubt for doubt in doubts), doubts


def test_a_round_of_several_widths_is_not_taken_apart():
  """A pass over the widest is no part of a round over a narrower one."""
  unknown = dataclasses.replace(COSTS, in_order=None, with_laws=None)
  assert {*unknown.attribution.values()} == {None}
  assert unknown.doubts == []
