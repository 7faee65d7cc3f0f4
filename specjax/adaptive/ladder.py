"""The ladder: draft lengths, one program each, chosen on the host by speed.

A depth policy (`specjax.adaptive.policies`) saves passes of the draft; the
target's pass has the width of the tree, whatever is in it. Whether a long draft
pays depends on how much the batch fills the device, and that changes seldom. So
chains of a few lengths are compiled, from none to the longest, and the host
chooses between calls of `Rungs.steps`, by the acceptance in finished rounds and
by the measured seconds of a round of each length.

All programs share one state, that of the longest. A length that is chosen from
finished rounds does not depend on the tokens to come, so decoding stays
lossless. But the choice depends on clocks and on the other rows of the batch,
so that sampled text is not the same in every run.
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
  """Settings of the choice of lengths, and its statistics.

  a[k] is the probability that the k-th drafted token (from 1) is accepted if
  those before it are, estimated from finished rounds. Seldom reached places
  lean on the one before: `(accepted[k] + m a[k-1]) / (reached[k] + m)`. A round
  of n drafted tokens then emits `1 + a[1] + a[1] a[2] + ...` (n + 1 terms)
  tokens on average, and the fastest length emits most of them a second.

  Attributes:
    lengths: drafted tokens a row, one program each; rising.
    margin: share by which another length must seem faster to be taken.
    every: rounds until the next choice, at least, within a batch. A call from
      the host starts cold, and takes half a round or so.
    patience: choices without a draft after which one is tried for a quarter of
      `every`, since rounds that draft nothing say nothing of what would be
      accepted.
    keep: factor on the counts after every round of a row: old rounds fade.
    supposed: a[0], the acceptance before anything is known.
    reached, accepted: `f64[G]`, rounds that drafted a token at the place with
      all before it accepted, and those of them that accepted it. The last round
      of an answer, cut at its end, counts as if the token after the cut had
      been rejected, so acceptance is estimated a little too low.
    occupied: `f64[2]`, share of a batch's rows that are still running, as a
      mean over its rounds: in batches without drafts and with drafts. Rows of
      high acceptance end earlier, and leave the batch half empty.
    rounds: number of rounds by length, over all batches.
  """

  lengths: tuple[int, ...] = LENGTHS
  margin: float = 0.01
  every: int = 64
  patience: int = 16
  keep: float = 0.998
  supposed: float = 0.7
  reached: np.ndarray = dataclasses.field(init=False)
  accepted: np.ndarray = dataclasses.field(init=False)
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
    self.accepted = np.zeros(self.lengths[-1])
    self.occupied = np.ones(2)
    self._of_rounds = np.full(2, 8.0)  # rounds that `occupied` is a mean of
    self.rounds = dict.fromkeys(self.lengths, 0)

  @property
  def acceptances(self) -> np.ndarray:
    """`f64[G]`: acceptance at each place, given that those before are."""
    acceptances, last = [], self.supposed
    for reached, accepted in zip(self.reached, self.accepted, strict=True):
      last = (accepted + _LEANS * last) / (reached + _LEANS)
      acceptances.append(last)
    return np.array(acceptances)

  def saw(self, accept_counts: np.ndarray) -> None:
    """Learns from finished rounds.

    Args:
      accept_counts: `i[n + 1]`, rounds of a row by how many of their n drafted
        tokens were accepted; where none was drafted nothing is learned.
    """
    counts = np.asarray(accept_counts, np.float64)
    at_least = np.cumsum(counts[::-1])[::-1]  # rounds by their fewest tokens
    places = len(counts) - 1
    fading = self.keep ** at_least[0] if places else 1.0
    self.reached *= fading
    self.accepted *= fading
    self.reached[:places] += at_least[:-1]
    self.accepted[:places] += at_least[1:]

  def saw_batch(self, *, drafts: bool, rounds: int, share: float) -> None:
    """Learns how full a batch was.

    Args:
      drafts: whether all its rounds drafted; False if none did.
      rounds: number of rounds of the batch.
      share: mean share of its rows that were running.
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
  """A decoding loop whose draft length the host chooses.

  It takes the length of the highest upper confidence bound: the measured speed,
  raised by the share `0.6 / sqrt(rounds)` for the rounds that were timed. So
  lengths of similar speed are all tried until they can be told apart, and slow
  ones are left alone. (The constant was chosen by hand and follows from no law
  of the timings.)

  A machine's speed drifts from minute to minute by more than lengths differ.
  So most of a timing's deviation is put down to the drift, which all lengths
  share, and the rest to the length's own price; changes of length tell the two
  apart. Rounds that are asked for singly, as where the host looks at every
  token for a stop string, are not timed.

  A draft that was not used for a while may first have to read the text it
  lacks. The first round after rounds without a draft is made by itself, and is
  not timed either.

  Prices are of batches of so many rows, with buffers of one length, on this
  machine, whatever the widths of their prompts. Acceptance is kept in the
  `Ladder`, for all shapes, so that prices can be shared between kinds of
  answers (another temperature).

  Args:
    loops: compiled loops on one state, by length.
    seconds: of a round of each length, at first (`measured`).
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
    """The length that a batch begins with, by the present estimates.

    Args:
      ladder: settings and statistics of the choice.
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
      ladder: settings of the choice; it learns from the rounds.

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
    """The length of the next rounds, and True if it is a trial."""
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
    """Learns the seconds of some rounds of the present length."""
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
  """A batch's rounds so far, and its rows that had any work at first."""

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
    """Tells the ladder how full it was, unless its rounds were mixed."""
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
  """Rounds of a row by accepted tokens, rounds of the batch, if it goes on."""
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
  """Seconds of a round at every length, starting from a given state.

  Args:
    loops: compiled, by length.
    params: parameters of both models.
    state: with room for the tokens of these rounds. It is copied, and for that
      time held twice in memory.
    rounds: of one timing at most, with its call from the host.
    repeats: timings that count, all lengths in turn; their median does.
    copy: makes the copies, in the memory layout that the loops want.

  Raises:
    ValueError: if no row of the state is running.
  """
  if np.all(jax.device_get(state.done)):
    raise ValueError("a round cannot be timed on rows that are all done")
  first = int(state.num_steps)
  copy = copy or (lambda state: jax.tree.map(jnp.copy, state))
  timings: list[dict[int, float]] = []
  for _ in range(repeats + 1):  # the first one warms up
    timings.append({})
    for length, loop in loops.items():
      fresh = jax.block_until_ready(copy(state))
      start = time.perf_counter()
      after = jax.block_until_ready(loop(params, fresh, np.int32(rounds)))
      seconds = time.perf_counter() - start
      timings[-1][length] = seconds / max(int(after.num_steps) - first, 1)
  # A machine's speed changes: lengths are compared within a turn.
  mean = lambda turn: statistics.geometric_mean(turn.values())
  typical = statistics.median(map(mean, timings[1:]))
  return {
    n: typical * statistics.median(turn[n] / mean(turn) for turn in timings[1:])
    for n in loops
  }
