"""Draft lengths for objectives: the best there are, and the controller's."""

import dataclasses
import itertools

import numpy as np
import pytest
import served

from launch.serving import objectives
from launch.serving.objectives import Controller, Row
from launch.serving.scheduler import Ticket

DEPTHS = range(9)


def cost(depth):
  return 0.1 * depth + 1


@pytest.mark.parametrize("seed", range(8))
def test_shared_draft_length_is_as_good_as_per_row_lengths(seed):
  """Objectives that can be kept come first, then tokens a second."""
  rng = np.random.default_rng(seed)
  rows = [
    Row(acceptance=float(a), objective=float(o))
    for a, o in zip(
      rng.uniform(0.1, 0.95, 3), rng.uniform(0.3, 1, 3), strict=True
    )
  ]
  can = [
    any(cost(k) / row.tokens(k) <= row.objective for k in range(5))
    for row in rows
  ]

  def worth(ks):
    seconds = cost(max(ks))
    tokens = [row.tokens(k) for row, k in zip(rows, ks, strict=True)]
    missed = sum(
      max(0.0, seconds / count / row.objective - 1) * kept
      for row, count, kept in zip(rows, tokens, can, strict=True)
    )
    return round(missed, 9), -sum(tokens) / seconds

  best = min(itertools.product(range(5), repeat=3), key=worth)
  shared = objectives.decide(rows, cost, range(5))
  assert worth([shared] * 3) == pytest.approx(worth(best))


def test_policies_pick_the_goodput_optimum_without_objectives():
  """Acceptance .8, draft .1, verification 1: 2.4696 at depth 6."""
  row = [Row(acceptance=0.8)]
  assert objectives.goodput(row, 6, cost) == pytest.approx(2.46964, abs=1e-5)
  for policy in objectives.POLICIES.values():
    assert policy(row * 3, cost, DEPTHS) == 6


def test_decide_avoids_smartspecs_over_and_under_drafting():
  # Below .3 SmartSpec assumes .65, and not to draft is worth a tenth more.
  hopeless = [Row(acceptance=0.05)]
  assert objectives.smartspec(hopeless, cost, DEPTHS) > 1
  assert objectives.decide(hopeless, cost, DEPTHS) == 0
  dear = lambda depth: 1 + 0.6 * depth
  assert objectives.smartspec([Row(acceptance=0.7)], dear, [0, 1]) == 0
  assert objectives.decide([Row(acceptance=0.7)], dear, [0, 1]) == 1


def ticket(**more):
  request = served.requests(1, vocab=5)[0]
  return Ticket(request=request, deliver=lambda news: None, **more)


SECONDS = {0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}


def controller_of(policy=objectives.decide):
  return Controller(policy, tuple(SECONDS), SECONDS.__getitem__)


def test_controller_adapts_draft_length_to_acceptance():
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


def test_remaining_objective_accounts_for_elapsed_time():
  """Ten tokens at 2 s each after the first are 18 s."""
  heard = []

  def policy(rows, cost, depths):
    heard.append([row.objective for row in rows])
    return depths[0]

  rows = [
    ticket(objective=2.0, first=10.0, last=10 + seconds, num_tokens=tokens)
    for seconds, tokens in ((6, 4), (15, 4), (17, 10))
  ]
  for one in rows:
    one.request = dataclasses.replace(one.request, max_new_tokens=10)
  controller = controller_of(policy)
  assert controller([ticket(objective=2.0), *rows, ticket()], [], 4) == 0
  assert heard == [[2.0, 2.0, 0.5, 3.0, None]]
  # A seeded row is always drafted whole.
  assert controller([ticket(), ticket(seeded=True)], [], 0) == 4
