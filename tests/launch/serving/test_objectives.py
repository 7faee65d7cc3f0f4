"""Depths of drafts for objectives: closed forms, and the controller's."""

import dataclasses
import itertools
import random

import decoding
import numpy as np
import pytest
import served

import specjax
from launch.serving import builder, objectives
from launch.serving.objectives import Controller, Row, Seen
from launch.serving.scheduler import Ticket
from launch.serving.slots import Slots

pytestmark = pytest.mark.usefixtures("quick_to_compile")

# Rows of acceptance .9 and .5, a draft pass of .1, a verification of 1 and .05
# a fed token: worked out by hand.
ROWS = [Row(acceptance=0.9), Row(acceptance=0.5)]


def cost(deepest, fed):
  return 0.1 * deepest + 1 + 0.05 * fed


def test_the_best_shared_depth_is_that_of_dinkelbach():
  """Acceptance .8, draft .1, verification 1: 2.4696 at depth 6."""
  flat = lambda deepest, fed: 0.1 * deepest + 1
  row = [Row(acceptance=0.8)]
  assert objectives.goodput(row, [6], flat) == pytest.approx(2.46964, abs=1e-5)
  assert objectives.goodput(ROWS, [4, 4], cost) == pytest.approx(
    3.1751, abs=1e-4
  )


@pytest.mark.parametrize("seed", range(8))
def test_ragged_depths_are_the_best_of_all(seed):
  rng = np.random.default_rng(seed)
  rows = [Row(acceptance=float(a)) for a in rng.uniform(0.1, 0.95, 3)]
  weights = rng.uniform(0.5, 3, 3).tolist()
  a, b, c = rng.uniform(0.01, 0.3, 3)
  priced = lambda deepest, fed: a * deepest + 1 + b * fed + c * (fed > 6)
  value = lambda d: objectives.goodput(rows, d, priced, weights)
  best = max(itertools.product(range(5), repeat=3), key=value)
  assert value(objectives.ragged(rows, priced, 4, weights)) == (
    pytest.approx(value(best))
  )


@pytest.mark.parametrize("seed", range(8))
def test_objectives_come_first(seed):
  """No choice of depths misses them by less, but for what ends it early."""
  rng = np.random.default_rng(seed)
  rows = [
    Row(acceptance=float(a), objective=float(o))
    for a, o in zip(
      rng.uniform(0.2, 0.95, 2), rng.uniform(0.3, 1.2, 2), strict=True
    )
  ]
  depths = objectives.decide(rows, cost, 6)
  # Those that no depth keeps, the other row not drafting, are given up.
  kept = [
    row
    if row.objective >= min(cost(k, k + 2) / row.tokens(k) for k in range(7))
    else Row(acceptance=row.acceptance)
    for row in rows
  ]
  missed = lambda d: objectives.shortfall(kept, d, cost)
  least = min(map(missed, itertools.product(range(7), repeat=2)))
  assert missed(depths) <= least + 0.02
  if least == 0:
    assert missed(depths) == 0


def test_what_is_waited_for_leaves_less_for_the_rest():
  """Ten tokens at 2 s each after the first are 18 s."""
  on_time = dict(elapsed=6.0, emitted=4, budget=10)
  assert objectives.left(2.0, **on_time) == pytest.approx(2.0)
  late = on_time | dict(elapsed=15.0)
  assert objectives.left(2.0, **late) == pytest.approx(3 / 6)
  assert objectives.left(2.0, elapsed=1.0, emitted=10, budget=10) > 0


def test_an_objective_that_is_lost_costs_the_others_nothing():
  lost = Row(acceptance=0.5, objective=0.2)
  assert objectives.decide([ROWS[0], lost], cost, 10) == [6, 2]
  kept = Row(acceptance=0.5, objective=0.95)
  assert objectives.decide([ROWS[0], kept], cost, 10) != [6, 2]


def test_others_for_comparison():
  flat = lambda deepest, fed: 0.1 * deepest + 1
  good = [Row(acceptance=0.8)] * 3
  assert objectives.adaspec(good, flat, 12) == [6] * 3
  assert objectives.smartspec(good, flat, 12) == [6] * 3
  # Gates look one step ahead: a cheap width behind a dear one is not found.
  steps = lambda deepest, fed: {0: 1.0, 1: 1.2, 2: 2.0}.get(deepest, 2.0)
  assert objectives.adaspec(good, steps, 8) == [1] * 3
  assert objectives.decide(good, steps, 8) == [8] * 3
  # Below .3 SmartSpec assumes .65.
  hopeless = [Row(acceptance=0.05)]
  assert objectives.smartspec(hopeless, flat, 5)[0] > 1
  assert objectives.decide(hopeless, flat, 5) == [0]


def test_what_is_learned_from_rounds():
  seen = Seen()
  assert seen.estimate(0.7) == 0.7
  seen.learn([0, 0, 0, 50], 3)  # all accepted: nothing was rejected
  assert seen.tried == seen.accepted == 150
  seen = Seen()
  for _ in range(100):
    seen.learn([2, 1, 1, 0, 0], 3)  # 3 accepted, 4 rejected
  assert seen.estimate(0.7) == pytest.approx(3 / 7, abs=0.02)
  seen.learn([0, 0, 0, 64, 0], 3)  # it changed: most of it counts
  assert seen.estimate(0.7) > 0.8
  for _ in range(1000):
    seen.forget()
  assert seen.estimate(0.7) == pytest.approx(0.7, abs=1e-3)


def ticket(**more):
  asked = served.requests(1, vocab=5)[0]
  return Ticket(asked=asked, deliver=lambda news: None, **more)


SECONDS = {0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}


def controller_of(policy=objectives.decide):
  return Controller(policy, tuple(SECONDS), SECONDS.__getitem__)


def test_the_controller_follows_what_is_accepted():
  controller, one = controller_of(), ticket(accept_counts=[0] * 5)
  depth = controller([one, None], [], 4)
  for _ in range(40):
    one.accept_counts[0] += 4  # nothing is accepted
    depth = controller([one, None], [], depth)
  assert depth == 0
  for _ in range(2000):  # nothing is seen of it any more: it is tried again
    depth = controller([one, None], [], depth)
    if depth:
      break
  assert depth > 0
  for _ in range(40):
    one.accept_counts[depth] += 4  # everything is
    depth = controller([one, None], [], depth)
  assert depth == 4


def test_requests_of_a_single_iteration_teach_too():
  """Each ends before the controller is asked again."""
  controller, depth = controller_of(), 4
  for _ in range(40):
    over = ticket(accept_counts=[4, 0, 0, 0, 0])  # nothing was accepted
    depth = controller([ticket(), None], [over], max(depth, 1))
  assert depth == 0


def test_the_controller_counts_what_a_row_has_waited_for():
  heard = []

  def policy(rows, cost, depth):
    heard.append([row.objective for row in rows])
    return [0] * len(rows)

  new = ticket(objective=2.0)
  late = ticket(objective=2.0, first=10.0, last=25.0, num_tokens=4)
  late.asked = dataclasses.replace(late.asked, max_new_tokens=10)
  controller_of(policy)([new, late, ticket()], [], 4)
  assert heard == [[2.0, pytest.approx(0.5), None]]


def test_a_seeded_row_is_always_drafted_whole():
  controller = controller_of(lambda rows, cost, depth: [0] * len(rows))
  assert controller([ticket(), None], [], 4) == 0
  assert controller([ticket(), ticket(seeded=True)], [], 0) == 4


# ------------------------------------------------------------ on the device


@pytest.fixture(scope="module")
def slots(quick_to_compile):
  decoders = {
    depth: specjax.make_decoder(
      decoding.MODEL,
      drafter=specjax.drafters.model(
        decoding.MODEL,
        tree=specjax.tree.chain(depth),
        vocab_size=decoding.VOCAB,
      ),
    )
    for depth in (1, 3)
  }
  actual = Slots(
    decoders, decoding.PARAMS, num_slots=3, widths=(8, 16),
    max_length=served.MAX_LENGTH, stop_tokens=served.STOP, max_rounds=4,
  )  # fmt: skip
  served.compile_all(actual)
  return actual


def test_greedy_tokens_are_the_same_at_any_depth(slots):
  """Depths, drafts and accepted tokens change at every iteration."""
  rng = random.Random(0)
  seen = []

  def choose_depth(rows, over, drafted):
    del rows, over, drafted
    seen.append(rng.choice([1, 3]))
    return seen[-1]

  asked = [
    dataclasses.replace(one, temperature=0.0)
    for one in served.requests(12, vocab=decoding.VOCAB, seed=4)
  ]
  scheduler, _ = served.make_scheduler(slots, choose_depth=choose_depth)
  heard = [served.Heard(one) for one in asked]
  scheduler.submit([h.ticket for h in heard])
  scheduler.start()
  actual = [h.wait().tokens for h in heard]
  scheduler.close()
  assert scheduler.join(served.PATIENCE)
  decoder = decoding.make("model", "token")
  assert actual == [served.alone(decoder, one) for one in asked]
  assert {*seen} == {1, 3}


def test_a_drafter_whose_state_has_its_depth_is_refused():
  wrong = {0: decoding.make("plain"), 3: decoding.make()}
  with pytest.raises(ValueError, match="cannot draft 0 tokens"):
    builder.check_alike(wrong, decoding.PARAMS)
  builder.check_alike(
    {1: decoding.make("model1"), 3: decoding.make()}, decoding.PARAMS
  )
