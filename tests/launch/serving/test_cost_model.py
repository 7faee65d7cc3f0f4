"""Running medians: what a server measured while it was busy does not stay."""

import types

import pytest

from launch.serving.control import CostModel

WIDTHS, FED, ROUND, GAP = (8, 16, 32, 64), 16, 0.5, 2.5
SECONDS_A_TOKEN = ROUND / FED / 2  # prompts are read twice as fast as guessed


def report(widths=(), *, depth=4, rounds=1, slow=1.0):
  seconds = rounds * ROUND + sum(widths) * SECONDS_A_TOKEN
  return types.SimpleNamespace(
    widths=widths, depth=depth, rounds=rounds, seconds=slow * seconds
  )


def cost_model(**more):
  usual = dict(widths=WIDTHS, depths=(1, 4), fed=FED, seconds=ROUND)
  return CostModel(**usual | more)


def widths_within(shares):
  """The passes over a long prompt, as `Slots` makes them."""
  widths, spent = [], 0.0
  while fits := [w for w in WIDTHS if spent + shares[w] <= 1]:
    widths.append(max(fits))
    spent += shares[widths[-1]]
  return widths or [WIDTHS[0]]


@pytest.mark.parametrize("busy", ["guess", "rounds", "passes", "everything"])
def test_cost_model_recovers_from_slow_initial_timings(busy):
  """Streams, and from the tenth iteration on a prompt without end.

  Of the first 20 iterations all, or those with or without reading, take ten
  times as long as they will.
  """
  actual, tokens = cost_model(seconds=10 * ROUND), []
  for number in range(400):
    widths = []
    if number >= 10 and (shares := actual.shares(4)):
      widths = widths_within(shares)
    is_slow = number < 20 and busy in (
      "passes" if widths else "rounds", "everything"
    )  # fmt: skip
    actual.learn(report(widths, slow=10.0 if is_slow else 1.0))
    tokens.append(sum(widths))
  # Readings live for 128 iterations; every 17th iteration reads nothing, and
  # the lower median of five is right after three right ones.
  tokens = tokens[20 + 128 + 3 * 17 :]
  expected = (GAP - 1) * ROUND / SECONDS_A_TOKEN
  assert {*tokens} == {0, expected}
  assert tokens.count(0) == pytest.approx(len(tokens) / 17, abs=1)
