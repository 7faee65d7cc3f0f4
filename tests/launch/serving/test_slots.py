"""Slots: long prompts are read in chunks, while other rows decode."""

import dataclasses

import decoding
import numpy as np
import pytest
import served

from launch.serving.control import Asked
from launch.serving.slots import Slots
from specjax.state import StopReason

DECODER = decoding.make("model", "token")


@pytest.fixture(scope="module")
def slots(quick_to_compile):
  found = Slots(
    {3: DECODER}, decoding.PARAMS, num_slots=2, widths=(4, 8), longest=30,
    chunk=4, max_length=served.MAX_LENGTH, stop_tokens=(), max_rounds=4,
  )  # fmt: skip
  found.compile()
  return found


def asked(length, *, seed=0, budget=16):
  tokens = np.random.default_rng(seed).integers(0, decoding.VOCAB, length)
  return Asked(
    token_ids=tuple(tokens.tolist()), seed=seed, max_new_tokens=budget,
    temperature=1.0,
  )  # fmt: skip


def visit(slots, **changes):
  """One visit, and what it emitted in each row."""
  control = dataclasses.replace(slots.idle(), rounds=4, **changes)
  report = slots.turn(control)
  ids = [
    report.tokens[row, : report.length[row] - report.start[row]].tolist()
    for row in range(slots.num_slots)
  ]
  return report, ids


def test_a_prompt_in_chunks_is_the_prompt_and_lets_others_go_on(slots):
  """Each visit reads four tokens of one prompt and makes one round."""
  short, long = asked(3, seed=1, budget=40), asked(29, seed=2)
  _, (begun, _) = visit(slots, admissions=[(0, short)])
  texts, visits = [begun, []], 0
  report, new = visit(slots, admissions=[(1, long)])
  while not new[1]:  # 4 tokens and 4 more in the first, then 4 a visit
    assert report.reason[1] == StopReason.RUNNING
    assert report.rounds == 1
    assert new[0]
    texts[0] += new[0]
    visits += 1
    report, new = visit(slots)
  assert visits == 6
  for _ in range(40):
    texts = [old + more for old, more in zip(texts, new, strict=True)]
    if (report.reason != StopReason.RUNNING).all():
      break
    report, new = visit(slots)
  without_stop = served.alone(DECODER, short, width=32, stop=())
  assert texts[0] == without_stop
  assert texts[1] == served.alone(DECODER, long, width=32, stop=())


def test_who_is_alone_has_a_prompt_read_as_fast_as_can_be(slots):
  long = asked(21, seed=3)
  _, (_, first) = visit(slots, admissions=[(1, long)])  # 8 and 8 of them
  assert not first
  text, reason = [], StopReason.RUNNING
  while reason == StopReason.RUNNING:
    report, (_, new) = visit(slots)
    assert new
    text, reason = text + new, report.reason[1]
  assert text == served.alone(DECODER, long, width=32, stop=())


def test_a_prompt_that_nobody_waits_for_is_read_no_further(slots):
  """And its row is free at once, for another that is read from its start."""
  visit(slots, admissions=[(0, asked(28, seed=4))])
  report, _ = visit(slots, ended=np.array([True, False]))
  assert report.reason[0] != StopReason.RUNNING
  other = asked(5, seed=5, budget=3)
  _, (text, _) = visit(slots, admissions=[(0, other)])
  assert text == served.alone(DECODER, other, width=32, stop=())


def test_prompts_that_come_together_are_read_in_turn(slots):
  first, second = asked(17, seed=6, budget=2), asked(27, seed=7, budget=2)
  texts = {0: [], 1: []}
  _, new = visit(slots, admissions=[(1, first), (0, second)])
  for _ in range(12):
    for row in texts:
      texts[row] += new[row]
    _, new = visit(slots)
  assert texts[1] == served.alone(DECODER, first, width=32, stop=())
  assert texts[0] == served.alone(DECODER, second, width=32, stop=())


def test_chunks_of_nothing_are_refused():
  with pytest.raises(ValueError, match="chunk must be >= 1, got 0"):
    Slots(
      {3: DECODER}, decoding.PARAMS, num_slots=1, widths=(4,), chunk=0,
      max_length=20, stop_tokens=(),
    )  # fmt: skip
