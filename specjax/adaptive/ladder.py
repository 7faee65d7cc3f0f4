"""Draft lengths, a program each, among which the host chooses between rounds.

A depth policy (`specjax.adaptive.policies`) saves passes of the draft; the
target's pass has the width of the tree, whatever is in it. Whether a long draft
pays depends on how much the batch fills the device, and that changes seldom: so
chains of a few lengths are compiled, from none to the longest, and the host
climbs or descends between calls of `Rungs.steps`, from how often drafted tokens
stood in the rounds that are finished and from what rounds of each length were
measured to take.

All of them work on one state, that of the longest. A length that is chosen from
finished rounds knows nothing of the tokens to come: nothing is lost by it. But
clocks and the other rows of the batch have a say in it, so that where a row
draws, its text is not the same in every run.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.adaptive.rungs import LENGTHS, Loop, check
from specjax.state import DecodeState, StopReason
from specjax.types import Params


@dataclasses.dataclass(kw_only=True)
class Ladder:
  """How lengths are chosen, and what finished rounds have shown for it.

  Of a drafted token at place k (from 1) the chance that it stands if those
  before it do is counted as rounds go by. Places that are seldom reached lean
  on the one before: `(stood[k] + m a[k-1]) / (reached[k] + m)`. A round of
  n drafted tokens then gives `1 + a[1] + a[1] a[2] + ...` of n + 1 terms, and
  the fastest length gives most of them in a second.

  Attributes:
    lengths: drafted tokens a row that there is a program for; rising.
    margin: by how much another length has to seem faster to be taken.
    every: rounds until the next choice, at least, within a batch. A call from
      the host starts cold, and takes half a round or so.
    patience: choices without a draft after which one is tried for a quarter of
      `every`, since rounds that draft nothing say nothing of what would be
      accepted.
    keep: of what is known, after every round of a row: old ones fade.
    supposed: a[0], what is supposed before anything is known.
    reached, stood: `f64[G]`, rounds in which the token before the place stood
      and one was drafted there, and of them those in which it stood. A round
      that the end of its answer cut counts as if the token after the cut had
      been refused, one round of an answer: a little too few are thought to
      stand.
    occupied: `f64[2]`, of the rows that began a batch the share that was still
      at work, over its rounds: in batches without drafts and with. Rows of
      which some are accepted more come to their ends earlier, and leave the
      batch half empty.
    rounds: that were made, by length, of all batches.
  """

  lengths: tuple[int, ...] = LENGTHS
  margin: float = 0.01
  every: int = 64
  patience: int = 16
  keep: float = 0.998
  supposed: float = 0.7
  reached: np.ndarray = dataclasses.field(init=False)
  stood: np.ndarray = dataclasses.field(init=False)
  occupied: np.ndarray = dataclasses.field(init=False)
  rounds: dict[int, int] = dataclasses.field(init=False)

  def __post_init__(self):
    check(self.lengths)
    if self.margin < 0 or self.patience < 1 or self.every < 1:
      raise ValueError(
        "margin must be >= 0, patience and every >= 1, got "
        f"{self.margin}, {self.patience} and {self.every}"
      )
    if not (0 < self.keep <= 1 and 0 <= self.supposed <= 1):
      raise ValueError(
        "keep must be in (0, 1] and supposed in [0, 1], got "
        f"{self.keep} and {self.supposed}"
      )
    self.reached = np.zeros(self.lengths[-1])
    self.stood = np.zeros(self.lengths[-1])
    self.occupied = np.ones(2)
    self._of_rounds = np.full(2, 8.0)  # rounds that `occupied` is a mean of
    self.rounds = dict.fromkeys(self.lengths, 0)

  @property
  def acceptances(self) -> np.ndarray:
    """`f64[G]`: of each place, given that those before it stand."""
    found, last = [], self.supposed
    for reached, stood in zip(self.reached, self.stood, strict=True):
      last = (stood + _LEANS * last) / (reached + _LEANS)
      found.append(last)
    return np.array(found)

  def saw(self, accept_counts: np.ndarray) -> None:
    """Learns of rounds.

    Args:
      accept_counts: `i[n + 1]`, rounds of a row by how many of their n drafted
        tokens stood; where none was drafted there is nothing to learn.
    """
    counts = np.asarray(accept_counts, np.float64)
    at_least = np.cumsum(counts[::-1])[::-1]  # rounds by their fewest tokens
    places = len(counts) - 1
    fading = self.keep ** at_least[0] if places else 1.0
    self.reached *= fading
    self.stood *= fading
    self.reached[:places] += at_least[:-1]
    self.stood[:places] += at_least[1:]

  def saw_batch(self, *, drafts: bool, rounds: int, share: float) -> None:
    """Learns how full a batch was.

    Args:
      drafts: whether all its rounds drafted; False if none did.
      rounds: that it took.
      share: of its rows that were at work, over all rounds.
    """
    kind = int(drafts)
    moved = rounds / (rounds + self._of_rounds[kind])
    self.occupied[kind] += moved * (share - self.occupied[kind])
    self._of_rounds[kind] = min(self._of_rounds[kind] + rounds, _REMEMBERED)

  def rates(self, seconds: Mapping[int, float]) -> dict[int, float]:
    """Tokens per second of a batch's row at each length.

    Args:
      seconds: of a round, by its length.
    """
    tokens = np.cumprod(self.acceptances)
    return {
      n: self.occupied[int(n > 0)] * (1 + float(np.sum(tokens[:n]))) / taken
      for n, taken in seconds.items()
    }


_LEANS = 4.0  # rounds that the place before counts for
_REMEMBERED = 512.0  # rounds that `Ladder.occupied` is a mean of, at most


class Climb:
  """A loop like any other, of rounds whose length the host chooses.

  It takes the length that may be the fastest: of those that few rounds were
  timed of it thinks better than what was measured, by `0.6 / sqrt(rounds)`, so
  that lengths of about the same speed are all tried until it is known which is
  which, and others are left alone. (The optimism of a bandit's upper confidence
  bound; its size was chosen, and follows from no law of the timings.)

  A machine's speed changes from minute to minute by more than lengths differ.
  So what a piece of rounds takes is laid to the drift of all lengths first, as
  it is while the length stays, and then to its own price, which shows when the
  length changes. Rounds that are asked for singly, as where the host looks at
  every token for a stop string, are not timed, and what their calls take is in
  no price.

  A draft that was not needed for a while may have to read what it lacks of the
  text before it goes on. The first round after rounds without one is made by
  itself, and is in no price.

  What is known here is of one shape of batch, on this machine; what answers
  showed, of all shapes, is the ladder's, so that prices may be shared where
  answers are of another kind (another temperature).

  Args:
    loops: compiled, by length, on one state.
    seconds: of a round of each length, to begin with (`measured`).
  """

  def __init__(self, loops: Mapping[int, Loop], seconds: Mapping[int, float]):
    if sorted(loops) != sorted(seconds):
      raise ValueError(
        f"there are loops of {sorted(loops)} drafted tokens, and seconds of "
        f"{sorted(seconds)}"
      )
    if min(seconds.values()) <= 0:
      raise ValueError(f"seconds must be positive, got {dict(seconds)}")
    self._loops = loops
    self.seconds = dict(seconds)
    self._timed = dict.fromkeys(seconds, _FIRST)  # rounds that they are of
    self._drift = 0.0  # logarithm of what all take by what they took at first
    self._now = -1
    self._idle = 0  # choices since a draft was tried
    self._left = 0  # rounds until the next choice
    self._lags = False  # whether the draft may lack some of the text
    self._piece = 0  # rounds of a call at least: a call costs time
    self._batch = _Batch(rows=0)

  def begin(self, ladder: Ladder) -> int:
    """The length that a batch begins with, by what is known now.

    Args:
      ladder: how it chooses.
    """
    length, _ = self._next(ladder)
    self._lags = not length
    return length

  def __call__(
    self, params: Params, state: DecodeState, num_rounds: Any, *, ladder: Ladder
  ) -> DecodeState:
    """As `Decoder.steps`: at most so many rounds.

    Args:
      params: parameters of both models.
      state: of one batch until it ends; it is donated.
      num_rounds: the most to make.
      ladder: how it chooses, and what learns from the rounds.

    Raises:
      ValueError: if the ladder has other lengths.
    """
    if sorted(self._loops) != list(ladder.lengths):
      raise ValueError(
        f"the ladder has lengths {ladder.lengths}, and there are loops of "
        f"{tuple(sorted(self._loops))}"
      )
    rest, (before, first, running) = int(num_rounds), _counted(state)
    if not first:
      self._left = 0
      self._batch = _Batch(
        rows=int(np.sum(jax.device_get(state.max_length > state.prompt_length)))
      )
    while running and rest > 0:
      if self._left <= 0:
        self._choose(ladder)
      # A text that ends soon is not cut for a choice.
      some = min(rest, max(self._left, self._piece))
      if self._now and self._lags:
        some = 1
      self._lags = not self._now
      start = time.perf_counter()
      state = self._loops[self._now](params, state, np.int32(some))
      counts, after, running = _counted(state)
      seconds, made = time.perf_counter() - start, after - first
      seen = (counts - before)[: self._now + 1]
      ladder.saw(seen)
      ladder.rounds[self._now] += made
      self._batch.saw(self._now, made, int(np.sum(seen)))
      if made >= _LEAST:
        self._learn_time(made, seconds)
      self._left -= made
      rest, before, first = rest - made, counts, after
    if not running:
      self._batch.teach(ladder)
    return state

  def _choose(self, ladder: Ladder) -> None:
    """Sets the length of the next rounds, and how many they are."""
    self._now, is_trial = self._next(ladder)
    self._idle = 0 if self._now else self._idle + 1
    self._piece = max(ladder.every // 4, 1) if is_trial else ladder.every
    self._left = self._piece

  def _next(self, ladder: Ladder) -> tuple[int, bool]:
    """The length of the next rounds, and whether it is a trial."""
    rates = ladder.rates(self.seconds)
    hoped = {
      n: rates[n] * (1 + _DOUBT / rounds**0.5)
      for n, rounds in self._timed.items()
    }
    fastest = lambda lengths: max(lengths, key=lambda n: (hoped[n], -n))
    if self._idle >= ladder.patience:
      return fastest([n for n in ladder.lengths if n]), True
    length = fastest(ladder.lengths)
    near = hoped.get(self._now, 0.0) * (1 + ladder.margin)
    if self._now < 0 or hoped[length] > near:
      return length, False
    return self._now, False

  def _learn_time(self, rounds: int, seconds: float) -> None:
    """Learns what some rounds of the present length took."""
    known, timed = self.seconds[self._now], self._timed
    off = math.log(seconds / rounds / known) - self._drift
    off = min(max(off, -_FAR), _FAR)  # what held it up once is no price
    of_all = rounds / (rounds + _DRIFTS)
    of_own = (1 - of_all) * rounds / (rounds + timed[self._now])
    self._drift += of_all * off
    self.seconds[self._now] = known * math.exp(of_own * off)
    for length in timed:
      timed[length] *= _FADES**rounds
    timed[self._now] += rounds


@dataclasses.dataclass(kw_only=True)
class _Batch:
  """A batch's rounds so far, and its rows that began with something to do."""

  rows: int
  rounds: int = 0
  at_work: int = 0  # rounds of its rows
  drafts: set[bool] = dataclasses.field(default_factory=set)

  def saw(self, length: int, rounds: int, at_work: int) -> None:
    """Counts some rounds."""
    self.rounds += rounds
    self.at_work += at_work
    if rounds:
      self.drafts.add(length > 0)

  def teach(self, ladder: Ladder) -> None:
    """Tells how full it was, once: of mixed rounds nobody knows the cause."""
    if len(self.drafts) == 1:
      share = self.at_work / (self.rounds * self.rows)
      (drafts,) = self.drafts
      ladder.saw_batch(drafts=drafts, rounds=self.rounds, share=share)
    self.drafts = set()


_LEAST = 8  # rounds of a piece that is timed: fewer start too cold
_FIRST = 100.0  # rounds that a first timing counts for
_DOUBT = 0.6
_FADES = 0.9997  # of the rounds that a timing is of, with every round
_DRIFTS = 64.0  # rounds in which the machine's speed may change
_FAR = math.log(1.5)


def _counted(state: DecodeState) -> tuple[np.ndarray, int, bool]:
  """Rounds of a row by accepted tokens, those of the batch, if it goes on."""
  counts, rounds, reasons = jax.device_get(
    (state.counters.accept_counts, state.num_steps, state.stop_reason)
  )
  counts = np.sum(np.asarray(counts, np.int64), axis=0)
  return counts, int(rounds), bool(np.any(reasons == StopReason.RUNNING))


def measured(
  loops: Mapping[int, Loop],
  params: Params,
  state: DecodeState,
  *,
  rounds: int = 16,
  repeats: int = 4,
  copy: Callable[[DecodeState], DecodeState] | None = None,
) -> dict[int, float]:
  """Seconds of a round at every length, from where a state stands.

  Args:
    loops: compiled, by length.
    params: parameters of both models.
    state: with room for as many tokens. It is copied: for so long there are
      two of it in memory.
    rounds: of one timing at most, with its call from the host.
    repeats: timings that count, all lengths in turn; their median does.
    copy: makes the copies, if loops want states laid out as it does.

  Raises:
    ValueError: if no row of the state is running.
  """
  if np.all(jax.device_get(state.done)):
    raise ValueError("a round cannot be timed on rows that are all done")
  first = int(state.num_steps)
  copy = copy or (lambda state: jax.tree.map(jnp.copy, state))
  found: list[dict[int, float]] = []
  for _ in range(repeats + 1):  # the first one warms up
    found.append({})
    for length, loop in loops.items():
      fresh = jax.block_until_ready(copy(state))
      start = time.perf_counter()
      after = jax.block_until_ready(loop(params, fresh, np.int32(rounds)))
      seconds = time.perf_counter() - start
      found[-1][length] = seconds / max(int(after.num_steps) - first, 1)
  # A machine's speed changes: lengths are compared within a turn.
  mean = lambda turn: statistics.geometric_mean(turn.values())
  typical = statistics.median(map(mean, found[1:]))
  return {
    n: typical * statistics.median(turn[n] / mean(turn) for turn in found[1:])
    for n in loops
  }
