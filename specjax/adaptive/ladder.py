"""The ladder: several draft lengths, of which the host picks the fastest.

A depth policy (`specjax.adaptive.policies`) saves draft passes, but the
target's pass keeps the width of the tree. So the ladder compiles chains of a
few lengths on one state. Between calls of the loop the host picks one, based on
acceptance in finished rounds and on measured seconds per round.

A length chosen from finished rounds does not depend on future tokens, so
decoding stays lossless. But it depends on clocks and on the other rows of the
batch: sampled text differs between runs.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import Decoder
from specjax.runtime import compilation, sized
from specjax.runtime.mesh import MeshDecoder
from specjax.runtime.sized import Loop
from specjax.state import DecodeState, StopReason
from specjax.tree import Tree, chain
from specjax.types import Draft, Drafter, LanguageModel, Params, Rule

LENGTHS = (0, 1, 2, 4, 8)
_PRIOR = 0.7  # prior acceptance of the first token
_SMOOTHING = 4.0  # rounds that the position before counts for
_KEEP = 0.998  # factor on the counts after every round of a row
_MARGIN = 0.01  # a length must seem faster by this share to be switched to
_MAX_AVERAGED = 512.0  # the most rounds that `Ladder.occupancy` averages over
_MIN_ROUNDS = 8  # the fewest rounds to time: fewer are too cold
_FIRST_WEIGHT = 100.0  # rounds that a first timing counts for
_EXPLORATION = 0.6  # of the upper confidence bound
_DECAY = 0.9997  # factor per round on the weight of older timings
_DRIFT_ROUNDS = 64.0  # rounds in which the machine's speed may change
_MAX_DEVIATION = math.log(1.5)  # of a timing; more is clipped
_ROUNDS, _REPETITIONS = 16, 4  # rounds and repetitions of the first timings


def check(lengths: Sequence[int]) -> None:
  """Raises ValueError unless these lengths make a ladder."""
  rising = all(a < b for a, b in itertools.pairwise(lengths))
  if len(lengths) < 2 or lengths[0] < 0 or not rising:
    raise ValueError(
      f"a ladder needs two or more increasing lengths, got {tuple(lengths)}"
    )


@dataclasses.dataclass(kw_only=True)
class Ladder:
  """Decoders of several draft lengths, and statistics of their rounds.

  a[k] is the probability that the k-th drafted token (from 1) is accepted if
  those before it are, estimated from finished rounds. Rarely reached positions
  are smoothed towards the one before: `(accepted[k] + m a[k-1]) / (reached[k] +
  m)`. A round of n drafted tokens then emits `1 + a[1] + a[1] a[2] + ...` (n +
  1 terms) tokens on average; the best length emits most per second.

  Attributes:
    decoders: by increasing length; they share one state.
    interval: the fewest rounds between choices: calls from the host start cold.
    patience: after this many choices not to draft, a draft is tried, for
      interval / 4 rounds.
    reached, accepted: `f64[G]`, rounds that drafted a token at the position
      with all before it accepted, and those that accepted it; old rounds fade.
    occupancy: `f64[2]`, mean share of a batch's rows still running, without and
      with drafts: rows with high acceptance end earlier and leave the batch
      partly empty.
  """

  decoders: Mapping[int, Decoder]
  interval: int = 64
  patience: int = 16
  reached: np.ndarray = dataclasses.field(init=False)
  accepted: np.ndarray = dataclasses.field(init=False)
  occupancy: np.ndarray = dataclasses.field(init=False)

  def __post_init__(self):
    places = max(self.decoders)
    self.reached, self.accepted = np.zeros(places), np.zeros(places)
    self.occupancy = np.ones(2)
    self._of_rounds = np.full(2, 8.0)  # rounds that `occupancy` is a mean of

  @property
  def longest(self) -> Decoder:
    """The decoder with the longest drafts, whose state all use."""
    return self.decoders[max(self.decoders)]

  def acceptances(self) -> np.ndarray:
    """`f64[G]`: acceptance at each position if those before are accepted."""
    acceptances, last = [], _PRIOR
    for reached, accepted in zip(self.reached, self.accepted, strict=True):
      last = (accepted + _SMOOTHING * last) / (reached + _SMOOTHING)
      acceptances.append(last)
    return np.array(acceptances)

  def count_rounds(self, accept_counts: np.ndarray) -> None:
    """Counts finished rounds.

    Args:
      accept_counts: `i[n + 1]`, row rounds by number of accepted tokens, of n
        drafted ones; nothing changes if n is 0.
    """
    counts = np.asarray(accept_counts, np.float64)
    at_least = np.cumsum(counts[::-1])[::-1]  # rounds with n tokens or more
    places = len(counts) - 1
    fading = _KEEP ** at_least[0] if places else 1.0
    self.reached *= fading
    self.accepted *= fading
    self.reached[:places] += at_least[:-1]
    self.accepted[:places] += at_least[1:]

  def count_batch(self, lengths: set[int], rounds: int, share: float) -> None:
    """Counts a batch's occupancy, if it drafted in all rounds or in none.

    Args:
      lengths: draft lengths of its rounds.
      rounds: number of rounds.
      share: mean share of its rows that were running.
    """
    if len({n > 0 for n in lengths}) != 1:
      return
    kind = int(max(lengths) > 0)
    moved = rounds / (rounds + self._of_rounds[kind])
    self.occupancy[kind] += moved * (share - self.occupancy[kind])
    self._of_rounds[kind] = min(self._of_rounds[kind] + rounds, _MAX_AVERAGED)

  def rates(self, seconds: Mapping[int, float]) -> dict[int, float]:
    """Tokens per second and row at each length, given seconds per round."""
    tokens = np.cumprod(self.acceptances())
    return {
      n: self.occupancy[int(n > 0)] * (1 + float(np.sum(tokens[:n]))) / taken
      for n, taken in seconds.items()
    }


def make_ladder(
  target: LanguageModel,
  draft: Callable[[Tree], Drafter],
  *,
  rule: Rule,
  vocab_size: int,
  lengths: Sequence[int] = LENGTHS,
  **options: Any,
) -> Ladder:
  """Decoders of several draft lengths on the state of the longest.

  Args:
    target, rule, vocab_size, options: as in `Decoder`.
    draft: makes the drafter of a chain. With a length of 0 its state must
      survive rounds without it (`accepts_foreign_drafts` or `catches_up` of
      `Drafter`).
    lengths: drafted tokens, increasing; 0 drafts nothing.

  Raises:
    ValueError: if lengths do not increase, or the drafter does not support 0.
  """
  check(lengths)
  made = {n: draft(chain(n)) for n in lengths if n}
  long = made[lengths[-1]]
  if 0 in lengths:
    if not (long.accepts_foreign_drafts or long.catches_up):
      raise ValueError(
        f"the state of {long.name!r} does not survive rounds without a draft, "
        "which a ladder with length 0 has"
      )
    made[0] = _no_draft(long)
  decoders = {
    n: Decoder(
      target=target,
      drafter=dataclasses.replace(
        long, name=made[n].name, tree=made[n].tree, propose=made[n].propose,
        passes=made[n].passes,
      ),
      rule=rule, vocab_size=vocab_size, **options,
    )
    for n in lengths
  }  # fmt: skip
  return Ladder(decoders=decoders)


def _no_draft(long: Drafter) -> Drafter:
  """A drafter that drafts nothing and keeps another's state."""
  tree = chain(0)

  def propose(params, state, cache, context):
    del params
    draft = Draft(
      tree=tree, siblings=long.siblings, tokens=context.root, log_probs=None
    )
    return draft, state, cache

  return dataclasses.replace(
    long, name="nothing", tree=tree, propose=propose, passes=()
  )


class LadderLoop:
  """A decoding loop whose draft length the host chooses.

  It picks the length with the highest upper confidence bound: the measured
  speed, raised by the share `0.6 / sqrt(rounds)` over the timed rounds. So
  lengths of similar speed are all tried until they can be told apart. (The
  constant was chosen by hand, not derived from the timings' distribution.)

  A machine's speed drifts from minute to minute by more than lengths differ. So
  most of a timing's deviation is attributed to drift, common to all lengths,
  and the rest to the length's own cost; switching lengths tells them apart.
  Calls of few rounds are not timed, nor is the first round after rounds without
  a draft, in which the draft may have to catch up.

  Args:
    loops: compiled loops on one state, by length.
    seconds: initial seconds per round of each length (`measured`).
  """

  def __init__(self, loops: Mapping[int, Loop], seconds: Mapping[int, float]):
    self._loops = loops
    self.seconds = dict(seconds)
    self._timed = dict.fromkeys(seconds, _FIRST_WEIGHT)  # rounds timed
    self._drift = 0.0  # log of the common slow-down since the first timings
    self._now = -1
    self._idle = 0  # choices since a draft was tried
    self._left = 0  # rounds until the next choice
    self._may_lag = False  # whether the draft may lack some of the text
    self._piece = 0  # the fewest rounds of a call: a call costs time
    # The batch's rows with work at the start, their rounds, and lengths used.
    self._rows, self._at_work, self._made = 0, 0, set[int]()

  def __call__(
    self, params: Params, state: DecodeState, num_rounds: Any, *, ladder: Ladder
  ) -> DecodeState:
    """Like `Decoder.steps`; the ladder of the same lengths learns from it."""
    rest, (before, first, running) = int(num_rounds), _counted(state)
    if not first:
      self._left, self._at_work, self._made = 0, 0, set()
      work = state.max_length > state.prompt_length
      self._rows = int(np.sum(jax.device_get(work)))
    while running and rest > 0:
      if self._left <= 0:
        self._choose(ladder)
      # A text that ends soon is not interrupted for a choice.
      some = min(rest, max(self._left, self._piece))
      if self._now and self._may_lag:
        some = 1
      self._may_lag = not self._now
      start = time.perf_counter()
      state = self._loops[self._now](params, state, np.int32(some))
      counts, after, running = _counted(state)
      seconds, made = time.perf_counter() - start, after - first
      seen = (counts - before)[: self._now + 1]
      ladder.count_rounds(seen)
      self._at_work += int(np.sum(seen))
      self._made |= {self._now} if made else set()
      if made >= _MIN_ROUNDS:
        self._learn_time(made, seconds)
      self._left -= made
      rest, before, first = rest - made, counts, after
    if not running and self._made:
      ladder.count_batch(
        self._made, first, self._at_work / (first * self._rows)
      )
      self._made = set()
    return state

  def _choose(self, ladder: Ladder) -> None:
    """Sets the length and number of the next rounds."""
    rates = ladder.rates(self.seconds)
    bounds = {
      n: rates[n] * (1 + _EXPLORATION / rounds**0.5)
      for n, rounds in self._timed.items()
    }
    fastest = lambda lengths: max(lengths, key=lambda n: (bounds[n], -n))
    is_trial = self._idle >= ladder.patience
    length = fastest([n for n in bounds if n] if is_trial else bounds)
    near = bounds.get(self._now, 0.0) * (1 + _MARGIN)
    if is_trial or bounds[length] > near:
      self._now = length
    self._idle = 0 if self._now else self._idle + 1
    self._piece = max(ladder.interval // 4, 1) if is_trial else ladder.interval
    self._left = self._piece

  def _learn_time(self, rounds: int, seconds: float) -> None:
    """Learns the seconds of some rounds of the current length."""
    known, timed = self.seconds[self._now], self._timed
    off = math.log(seconds / rounds / known) - self._drift
    off = min(max(off, -_MAX_DEVIATION), _MAX_DEVIATION)  # no single hold-up
    of_all = rounds / (rounds + _DRIFT_ROUNDS)
    of_own = (1 - of_all) * rounds / (rounds + timed[self._now])
    self._drift += of_all * off
    self.seconds[self._now] = known * math.exp(of_own * off)
    for length in timed:
      timed[length] *= _DECAY**rounds
    timed[self._now] += rounds


def _counted(state: DecodeState) -> tuple[np.ndarray, int, bool]:
  """Row rounds by accepted tokens; the batch's rounds; whether any row runs."""
  counts, rounds, reasons = jax.device_get(
    (state.counters.accept_counts, state.num_steps, state.stop_reason)
  )
  counts = np.sum(np.asarray(counts, np.int64), axis=0)
  return counts, int(rounds), bool(np.any(reasons == StopReason.RUNNING))


def compiled(
  ladder: Ladder,
  programs: compilation.Programs,
  params: Params,
  state: DecodeState,
  *,
  mesh: jax.sharding.Mesh | None = None,
) -> LadderLoop:
  """The compiled loop of a ladder, each length timed on a batch.

  Args:
    ladder: the decoders.
    programs: the longest decoder's, in pieces; a mesh must be in use, if there
      is one.
    params: the parameters.
    state: a batch's state after prefill.
    mesh: the state's, in one process: several processes would choose by their
      own clocks and deadlock.
  """
  loops, text = {}, int(jnp.max(state.prompt_length))
  for length, one in ladder.decoders.items():
    mapped = MeshDecoder.of(one, mesh=mesh) if mesh else one
    whole = programs.loop
    if one is not ladder.longest:
      whole = compilation.compile_loop(
        mapped.steps, params, programs.state, programs.formats,
        (compilation.ROUNDS,),
      )  # fmt: skip
    loops[length] = sized.loop(mapped, params, programs, whole, text=text)
  copy = jax.jit(
    lambda state: jax.tree.map(jnp.copy, state), out_shardings=programs.formats
  )
  return LadderLoop(loops, measured(loops, params, state, copy))


def measured(
  loops: Mapping[int, Loop],
  params: Params,
  state: DecodeState,
  copy: Callable[[DecodeState], DecodeState],
) -> dict[int, float]:
  """Seconds per round at every length, starting from a given state.

  Args:
    loops: compiled loops, by length.
    params: parameters of both models.
    state: has room for the tokens of a few rounds; copied for each timing.
    copy: copies it, in the memory layout that the loops expect.
  """
  first = int(state.num_steps)
  timings: list[dict[int, float]] = []
  for _ in range(_REPETITIONS + 1):  # the first one warms up
    timings.append({})
    for length, loop in loops.items():
      fresh = jax.block_until_ready(copy(state))
      start = time.perf_counter()
      after = jax.block_until_ready(loop(params, fresh, np.int32(_ROUNDS)))
      seconds = time.perf_counter() - start
      timings[-1][length] = seconds / max(int(after.num_steps) - first, 1)
  # A machine's speed changes: compare lengths within a repetition.
  mean = lambda turn: statistics.geometric_mean(turn.values())
  typical = statistics.median(map(mean, timings[1:]))
  return {
    n: typical * statistics.median(turn[n] / mean(turn) for turn in timings[1:])
    for n in loops
  }
