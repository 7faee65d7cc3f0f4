"""Jobs that ask for completions in turn, in slots that refill."""

import types

import numpy as np
import pytest

from launch.serving import jobs
from launch.serving.control import Asked
from specjax.state import StopReason


class Echo:
  """Slots that emit a prompt's tokens, some each iteration, and count them."""

  def __init__(self, num_slots, max_rounds=2):
    self.num_slots, self.depth, self.max_rounds = num_slots, 0, max_rounds
    self.iterations, self.admitted = 0, []
    self._left = [()] * num_slots

  def iterate(self, control):
    """Emits up to `rounds` tokens of each row that has any left."""
    self.iterations += 1
    assert not control.ended.any()
    assert len(control.max_depth) == self.num_slots
    for row, asked in control.admissions:
      assert not self._left[row], "a row was given away before its end"
      self._left[row] = asked.token_ids
      self.admitted.append((row, asked.stream))
    said = [left[: control.rounds] for left in self._left]
    self._left = [left[control.rounds :] for left in self._left]
    tokens = np.zeros((self.num_slots, control.rounds), np.int32)
    for row, ids in enumerate(said):
      tokens[row, : len(ids)] = ids
    return types.SimpleNamespace(
      start=np.zeros(self.num_slots, np.int32),
      length=np.array([len(ids) for ids in said], np.int32),
      tokens=tokens,
      reason=np.array(
        [
          int(StopReason.RUNNING if left else StopReason.LENGTH)
          for left in self._left
        ]
      ),
    )


def asked(token_ids, stream=0):
  return Asked(
    token_ids=tuple(token_ids), seed=0, stream=stream, max_new_tokens=9,
    temperature=1.0,
  )  # fmt: skip


def repeated(number, lengths):
  """A job that asks for completions of so many tokens, one after another."""
  results = []
  for length in lengths:
    done = yield asked(range(1, length + 1), stream=number)
    results.append(done.token_ids)
    assert done.reason == StopReason.LENGTH
  return number, results


@pytest.mark.parametrize("num_slots", [1, 2, 3, 9])
def test_every_job_gets_the_completions_that_it_asked_for(num_slots):
  lengths = [[3, 1], [5], [], [1, 1, 4], [2, 2], [7, 3]]
  slots = Echo(num_slots)
  work = (repeated(i, each) for i, each in enumerate(lengths))
  actual = dict(jobs.done(slots, work))
  assert actual == {
    i: [tuple(range(1, n + 1)) for n in each] for i, each in enumerate(lengths)
  }


def test_a_slot_is_one_jobs_until_it_ends():
  slots = Echo(2)
  list(jobs.done(slots, (repeated(i, [2, 2]) for i in range(4))))
  owners = {}
  for row, number in slots.admitted:
    owners.setdefault(number, set()).add(row)
  assert all(len(rows) == 1 for rows in owners.values())
  assert len(owners) == 4


def test_a_free_slot_is_filled_in_the_next_iteration():
  """One long job and many short ones: no iteration waits for the long one."""
  slots = Echo(2)
  work = [repeated(0, [20]), *(repeated(i, [2]) for i in range(1, 10))]
  ended = [number for number, _ in jobs.done(slots, work)]
  assert ended == [*range(1, 10), 0]
  assert slots.iterations == 10


def test_jobs_are_begun_when_there_is_a_slot_for_them():
  begun = []

  def work():
    for i in range(5):
      begun.append(i)
      yield repeated(i, [2])

  done = jobs.done(Echo(2), work())
  next(done)
  assert begun == [0, 1]
  assert len(list(done)) == 4
  assert begun == [*range(5)]


def test_without_jobs_no_iteration_is_made():
  slots = Echo(2)
  assert list(jobs.done(slots, [])) == []
  assert list(jobs.done(slots, [repeated(0, [])])) == [(0, [])]
  assert slots.iterations == 0
