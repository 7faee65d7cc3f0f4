"""Optimal stopping: hand values, and brute force where there are few rules."""

import itertools

import numpy as np
import pytest

from specjax.theory import stopping, throughput
from specjax.theory.stopping import Costs, Process

TENTH = Costs(draft=0.1, verify=1.0)
CONSTANT = stopping.independent([0.8])
EVEN_ODDS = stopping.independent([1.0, 0.6], [0.5, 0.5])
# One token in five goes on for ever; the others stop at once.
REVEALING = Process(
  first=np.array([0.8, 0.2]),
  transition=np.eye(2),
  acceptance=np.array([0.0, 1]),
)


def test_constant_acceptance_converges_to_depth_six_in_two_steps():
  best = stopping.optimum(CONSTANT, TENTH, 12)
  assert best.rates == pytest.approx((1.0, 2.28525, 2.46964), abs=5e-6)
  assert best.depth == 6
  assert best.tokens == throughput.tokens_per_cycle(6, 0.8)
  assert stopping.myopic(CONSTANT, TENTH, 12).rate == best.rate
  assert stopping.best_static(CONSTANT, TENTH, 12).setting == {"depth": 6}


def test_even_odds_optimum_beats_best_static_depth():
  best = stopping.optimum(EVEN_ODDS, TENTH, 20)
  assert best.rate == pytest.approx(2.5850, abs=5e-5)
  static = stopping.best_static(EVEN_ODDS, TENTH, 20)
  assert (static.setting["depth"], round(static.rate, 4)) == (6, 2.4696)


def test_myopic_rule_misses_information_from_drafting():
  costs = Costs(draft=0.2, verify=1.0)
  best = stopping.optimum(REVEALING, costs, 11)
  assert best.rate == pytest.approx(2.0)
  assert (best.tokens, best.seconds) == pytest.approx((3.2, 1.6))
  assert stopping.best_static(REVEALING, costs, 11).rate == 1.0
  assert stopping.myopic(REVEALING, costs, 11).rate == 1.0


def test_stepped_verify_cost_favors_bucket_edges():
  verify = lambda fed: 1.0 if fed <= 8 else 1.3 if fed <= 16 else 1.8
  costs = Costs(draft=0.02, verify=verify)
  rates = {k: stopping.static(CONSTANT, costs, k).rate for k in range(20)}
  assert max(rates, key=rates.get) == 7
  for depth, rate in ((6, 3.528), (7, 3.650), (8, 2.965), (15, 3.037)):
    assert rates[depth] == pytest.approx(rate, abs=5e-4)
  assert stopping.optimum(CONSTANT, costs, 19).depth == 7


def random_process(rng, contexts: int) -> Process:
  return Process(
    first=rng.dirichlet(np.ones(contexts)),
    transition=rng.dirichlet(np.ones(contexts), contexts),
    acceptance=rng.random(contexts),
  )


def test_optimum_matches_exhaustive_search_over_rules():
  """Two contexts, depth three: seven cases in which to stop or to go on."""
  rng = np.random.default_rng(0)
  for _ in range(4):
    process = random_process(rng, 2)
    steps = np.cumsum(rng.random(4)) * 0.3
    costs = Costs(draft=0.05, verify=lambda n, s=steps: 1 + s[n - 1])
    # A history is the contexts so far; its case is the survival and the last.
    histories = [
      h for k in range(3) for h in itertools.product((0, 1), repeat=k)
    ]
    best = 0.0
    for chosen in itertools.product((False, True), repeat=len(histories)):
      continuing = dict(zip(histories, chosen, strict=True))
      tokens, seconds = 1.0, costs.of_round(0)
      stack = [((), 1.0, 1.0)]
      while stack:
        past, mass, alive = stack.pop()
        if len(past) == 3 or not continuing[past]:
          continue
        seconds += mass * costs.marginal(3)[len(past)]
        law = process.transition[past[-1]] if past else process.first
        for x in (0, 1):
          kept = alive * process.acceptance[x]
          tokens += mass * law[x] * kept
          stack.append(((*past, x), mass * law[x], kept))
      best = max(best, tokens / seconds)
    actual = stopping.optimum(process, costs, 3)
    assert actual.rate == pytest.approx(best, rel=1e-9)
    assert list(actual.rates) == sorted(actual.rates)
    for other in (stopping.best_static, stopping.myopic):
      assert other(process, costs, 3).rate <= best * (1 + 1e-9)


def test_invalid_processes_are_rejected():
  for first, most in ((1.0, 1.0), (0.5, 1.5)):
    with pytest.raises(ValueError, match=r"add up to 1|in \[0, 1\]"):
      Process(
        first=np.full(2, first), transition=np.eye(2),
        acceptance=np.array([0.5, most]),
      )  # fmt: skip
