"""Timings of runs in pieces, and the parts of a round."""

import dataclasses
import json
import types

import pytest
import toys

import specjax
from launch.evaluation import costs, timing

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
  return costs._in_pieces(clock, None, **changes)


NO_PARTS = lambda state: {}


def test_calls_from_the_host_are_taken_off_the_rounds(monkeypatch):
  run = run_of(monkeypatch, Clock(), place=3, parts=NO_PARTS)
  assert (run.prefill, run.seconds, run.rounds) == (1.0, 4.0, 8)


def test_an_idle_call_that_was_held_up_makes_no_round_negative(monkeypatch):
  clock = Clock()
  fast = clock.generate

  def generate(batch, state, num_rounds=1 << 30):
    clock.now += 100.0 * (state.num_steps == clock.length)
    return fast(batch, state, num_rounds)

  clock.generate = generate
  assert run_of(monkeypatch, clock, place=3, parts=NO_PARTS).seconds == 4.25


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
  assert costs._mean_round(runs) == pytest.approx((0.5 + 1 + 1) / 3)
  assert costs._scaled(runs, 0.5) == {"target 1": 0.25}


def test_passes_of_a_draft_on_the_targets_cache_are_timed_there(monkeypatch):
  model = toys.table_model(5)
  drafter = specjax.drafters.quantized_self(
    model, tree=specjax.tree.chain(2), vocab_size=5
  )
  decoder = specjax.make_decoder(model, drafter=drafter, vocab_size=5)
  speculative = types.SimpleNamespace(
    params=specjax.Params(target=1, draft=2), decoder=decoder, mesh=1
  )
  pieces = costs.Pieces(
    speculative,
    types.SimpleNamespace(max_new_tokens=4),
    draft=model,
    batch=types.SimpleNamespace(width=2),
  )
  timed = []
  monkeypatch.setattr(
    pieces, "_time", lambda orders, caches: timed.append((orders, caches)) or {}
  )
  pieces._of_a_round(dataclasses.make_dataclass("State", [
    "tokens", "drafter_state", "target_cache"
  ])(0, (), "cache"))  # fmt: skip
  ((orders, caches),) = timed
  assert orders["in_order"] == (("draft", 1), ("draft", 1), ("target", 3))
  assert caches == {"target": "cache"}
  assert pieces._params == {"target": 1, "draft": 2}


COSTS = costs.Costs(
  depth=3, step=1.5, plain_step=1.0, target={1: 0.9, 4: 1.0}, draft={1: 0.1},
  draft_passes=(1, 1, 1), nodes=4, in_order=1.35, unverified=1.4,
  proposal=None, again=0.95, prefill=0.0, plain_prefill=0.0,
)  # fmt: skip


def test_what_a_round_takes_adds_up_where_a_head_drafts():
  some = dataclasses.replace(
    COSTS, step=1.0, plain_step=0.5, target={1: 0.3, 4: 0.4}, draft={},
    draft_passes=(), in_order=0.45, unverified=0.8, proposal=0.25,
  )  # fmt: skip
  assert some.drafting == 0.25
  assert some.forwards == 0.65
  parts = some.attribution
  assert sum(parts.values()) == pytest.approx(some.step)
  assert parts["passes"] == 0.65
  assert parts["laws"] == pytest.approx(0.1)
  on_a_mesh = dataclasses.replace(some, unverified=None)
  assert on_a_mesh.attribution["laws"] is None


def test_costs_are_read_from_a_record_as_they_were():
  record = json.loads(json.dumps({"seconds": dataclasses.asdict(COSTS)}))
  assert costs.Costs.of(record) == dataclasses.replace(
    COSTS, draft_passes=[1, 1, 1]
  )


def test_timings_that_agree_leave_no_doubt():
  assert COSTS.doubts == []
  # A few hundredths less than nothing are what timings differ by.
  close = dataclasses.replace(COSTS, in_order=1.27, unverified=1.33, step=1.32)
  assert close.doubts == []
  assert min(close.attribution.values()) == 0
  assert sum(close.attribution.values()) == pytest.approx(close.step)


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(step=1.2), "bookkeeping took -200.00 ms of a round"),
    (dict(unverified=1.2), "laws took -150.00 ms of a round"),
    (dict(in_order=1.1), "out of cache took -200.00 ms of a round"),
    (dict(in_order=1.1, unverified=None), "out of cache took -200.00 ms"),
    (dict(plain_step=0.8), "the pass of a plain round took 900.00 ms, the"),
    (dict(target={1: 1.1, 4: 1.0}), "over one token took 1100.00 ms, one over"),
    (dict(again=0.6), "900.00 ms and 600.00 ms, disagree by 50%"),
    (dict(again=1.2), "900.00 ms and 1200.00 ms, disagree by 33%"),
    (dict(step=0.8, in_order=None, unverified=None), "900.00 ms, a drafted"),
  ],
  ids=str,
)
def test_timings_that_cannot_be_are_said(changes, words):
  doubts = dataclasses.replace(COSTS, **changes).doubts
  assert any(words in doubt for doubt in doubts), doubts


def test_a_round_of_several_widths_is_not_taken_apart():
  """A pass over the widest is no part of a round over a narrower one."""
  unknown = dataclasses.replace(COSTS, in_order=None, unverified=None)
  assert {*unknown.attribution.values()} == {None}
  assert unknown.doubts == []
