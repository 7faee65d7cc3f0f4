"""Offline jobs that ask for completions one after another, in shared slots.

A job is a generator: it yields what it asks for, is sent the completion, and
returns what it made of them all. A slot is one job's until that job ends, and
then the next one's, so that all slots decode for as long as there is work:

  def translated_back(text):
    english = yield asking(f"In English: {text}")
    return (yield asking(f"In German: {english}"))
"""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from launch.serving.control import Asked, Control, Report
from specjax.state import StopReason

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed:
  """A completion.

  Attributes:
    token_ids: what was emitted, a stop token included.
    reason: why it ended.
  """

  token_ids: tuple[int, ...]
  reason: StopReason


Job = Generator[Asked, Completed, T]


class Rows(Protocol):
  """The part of `slots.Slots` that jobs use."""

  num_slots: int
  depth: int
  max_rounds: int

  def iterate(self, control: Control) -> Report:
    """Runs an iteration by its orders, and reads the results."""


def done(slots: Rows, jobs: Iterable[Job[T]]) -> Iterator[T]:
  """Runs all jobs, and yields their results as they end.

  Args:
    slots: used by nothing else meanwhile; all rows idle before and afterwards.
    jobs: taken one by one, as slots are free.
  """
  waiting = iter(jobs)
  working: dict[int, tuple[Job[T], list[int]]] = {}
  admissions: list[tuple[int, Asked]] = []
  free = list(range(slots.num_slots))
  while True:
    while free and (job := next(waiting, None)) is not None:
      try:
        asked = next(job)
      except StopIteration as end:
        yield end.value
        continue
      row = free.pop()
      working[row] = (job, [])
      admissions.append((row, asked))
    if not working:
      return
    report = slots.iterate(
      Control(
        admissions=admissions,
        ended=np.zeros(slots.num_slots, bool),
        max_depth=np.full(slots.num_slots, slots.depth, np.int32),
        rounds=slots.max_rounds,
      )
    )
    admissions = []
    for row, (job, tokens) in list(working.items()):
      count = int(report.length[row] - report.start[row])
      tokens.extend(report.tokens[row, :count].tolist())
      reason = StopReason(int(report.reason[row]))
      if reason == StopReason.RUNNING:
        continue
      try:
        asked = job.send(Completed(token_ids=tuple(tokens), reason=reason))
      except StopIteration as end:
        del working[row]
        free.append(row)
        yield end.value
      else:
        working[row] = (job, [])
        admissions.append((row, asked))


def in_groups(
  complete: Callable[[Sequence[Asked]], Sequence[Completed]],
  size: int,
  jobs: Iterable[Job[T]],
) -> Iterator[T]:
  """Runs all jobs, `size` at a time, completing their requests together.

  No slot refills, but prompts are read together: faster where a device reads
  thousands of tokens in the time of one.

  Args:
    complete: completes all that is asked for.
    size: jobs at work.
    jobs: taken one by one, as others end.
  """
  waiting = iter(jobs)
  working: list[tuple[Job[T], Asked]] = []
  while True:
    while len(working) < size and (job := next(waiting, None)) is not None:
      try:
        working.append((job, next(job)))
      except StopIteration as end:
        yield end.value
    if not working:
      return
    completions = complete([asked for _, asked in working])
    going = []
    for (job, _), completed in zip(working, completions, strict=True):
      try:
        going.append((job, job.send(completed)))
      except StopIteration as end:
        yield end.value
    working = going
