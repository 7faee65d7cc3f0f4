"""Timings of runs in pieces, and the parts of a round."""

import dataclasses

import pytest

from launch.evaluation import costs, timing


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


def test_host_call_overhead_is_subtracted_from_round_time(monkeypatch):
  run = run_of(monkeypatch, Clock(), place=3, parts=NO_PARTS)
  assert (run.prefill, run.seconds, run.rounds) == (1.0, 4.0, 8)


COSTS = costs.Costs(
  depth=3, step=1.5, plain_step=1.0, target={1: 0.9, 4: 1.0}, draft={1: 0.1},
  draft_passes=(1, 1, 1), nodes=4, one_width=True, proposal=None, again=0.95,
  prefill=0.0, plain_prefill=0.0,
)  # fmt: skip


def test_round_cost_splits_into_passes_overhead_and_levels():
  assert COSTS.forwards == pytest.approx(1.3)
  assert COSTS.rest == pytest.approx(0.1)
  assert COSTS.level == pytest.approx((0.3 + 0.1) / 3)
  of_a_head = dataclasses.replace(
    COSTS, draft={}, draft_passes=(), proposal=0.25
  )
  assert of_a_head.forwards == 1.25


def test_consistent_timings_raise_no_doubts():
  assert COSTS.doubts == []
  # A few hundredths less than nothing are what timings differ by.
  assert dataclasses.replace(COSTS, step=1.26).doubts == []


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(step=1.2), "of a drafted round took 1300.00 ms, the round 1200"),
    (dict(plain_step=0.8), "the pass of a plain round took 900.00 ms, the"),
    (dict(target={1: 1.1, 4: 1.0}), "over one token took 1100.00 ms, one over"),
    (dict(again=1.2), "900.00 ms and 1200.00 ms, disagree by 33%"),
  ],
  ids=str,
)
def test_inconsistent_timings_are_reported_as_doubts(changes, words):
  doubts = dataclasses.replace(COSTS, **changes).doubts
  assert any(words in doubt for doubt in doubts), doubts
