"""Widths of verification, one program each, chosen by the host between rounds.

A depth policy (`specjax.drafters.depth`) saves passes of the draft; the
target's pass has the width of the tree, whatever is in it. Whether a wide pass
pays depends on how much the batch fills the device, and that changes seldom: so
a few widths are compiled, from none to the widest, and the host climbs or
descends between calls of `Rungs.steps`, from how often drafted tokens stood in
the rounds that are finished and from what rounds of each width were measured to
take.

All widths work on one state, that of the widest. A width that is chosen from
finished rounds knows nothing of the tokens to come: nothing is lost by it.
"""

import dataclasses
import functools
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
from specjax.mesh import MeshDecoder
from specjax.state import DecodeState, StopReason
from specjax.tree import Tree, chain
from specjax.types import Context, Draft, Drafter, LanguageModel, Params, Rule

WIDTHS = (0, 1, 2, 4, 8)

# A compiled loop: parameters, a state that is donated, the most rounds to make.
Loop = Callable[[Params, DecodeState, Any], DecodeState]


@dataclasses.dataclass(kw_only=True)
class Ladder:
  """How widths are chosen, and what finished rounds have shown for it.

  Of a drafted token at place k (from 1) the chance that it stands if those
  before it do is counted as rounds go by. Places that are seldom reached lean
  on the one before: `(stood[k] + m a[k-1]) / (reached[k] + m)`. A round of
  width w then gives `1 + a[1] + a[1] a[2] + ...` tokens, and the fastest width
  gives most of them in a second.

  Attributes:
    widths: drafted tokens a row that there is a program for; rising.
    margin: by how much another width has to seem faster to be taken.
    every: rounds until the next choice, at least. A call from the host starts
      cold, and takes half a round or so.
    patience: choices without a draft after which one is tried for a quarter of
      `every`, since rounds that draft nothing say nothing of what would be
      accepted.
    keep: of what is known, after every round of a row: old ones fade.
    supposed: a[0], what is supposed before anything is known.
    reached, stood: `f64[G]`, rounds in which the token before the place stood
      and one was drafted there, and of them those in which it stood.
  """

  widths: tuple[int, ...] = WIDTHS
  margin: float = 0.01
  every: int = 64
  patience: int = 16
  keep: float = 0.998
  supposed: float = 0.7
  reached: np.ndarray = dataclasses.field(init=False)
  stood: np.ndarray = dataclasses.field(init=False)

  def __post_init__(self):
    check(self.widths)
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
    self.reached = np.zeros(self.widths[-1])
    self.stood = np.zeros(self.widths[-1])

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
      accept_counts: `i[w + 1]`, rounds of a row by how many of their w drafted
        tokens stood; of width 0 there is nothing to learn.
    """
    counts = np.asarray(accept_counts, np.float64)
    at_least = np.cumsum(counts[::-1])[::-1]  # rounds by their fewest tokens
    places = len(counts) - 1
    fading = self.keep ** at_least[0] if places else 1.0
    self.reached *= fading
    self.stood *= fading
    self.reached[:places] += at_least[:-1]
    self.stood[:places] += at_least[1:]

  def rates(self, seconds: Mapping[int, float]) -> dict[int, float]:
    """Tokens per second of a row at each width.

    Args:
      seconds: of a round, by its width.
    """
    tokens = np.cumprod(self.acceptances)
    return {w: (1 + float(np.sum(tokens[:w]))) / seconds[w] for w in seconds}


_LEANS = 4.0  # rounds that the place before counts for


def check(widths: Sequence[int]) -> None:
  """Raises ValueError unless programs of these widths make a ladder."""
  rising = all(a < b for a, b in itertools.pairwise(widths))
  if len(widths) < 2 or widths[0] < 0 or not rising:
    raise ValueError(
      "a ladder has two widths or more, of 0 drafted tokens and more, rising, "
      f"got {tuple(widths)}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rungs:
  """Decoders of several widths that go on with each other's state.

  Attributes:
    decoders: by width; prompts are read by that of the `widest`.
    mesh: over which rows lie as a `MeshDecoder` cuts them; None for one device.
  """

  decoders: Mapping[int, Decoder]
  mesh: jax.sharding.Mesh | None = None

  @property
  def widest(self) -> Decoder:
    """Whose state all work on."""
    return self.decoders[max(self.decoders)]

  def steps(
    self, width: int, params: Params, state: DecodeState, num_steps: Any
  ) -> DecodeState:
    """As `Decoder.steps`, at a width; to be jitted for each."""
    decoder, whole = self.decoders[width], state.counters
    tree = decoder.drafter.tree
    cut = dict(
      accept_counts=whole.accept_counts[:, : tree.max_depth + 1],
      rank_offered=whole.rank_offered[:, : tree.max_children],
      rank_accepted=whole.rank_accepted[:, : tree.max_children],
    )
    state = dataclasses.replace(
      state, counters=dataclasses.replace(whole, **cut)
    )
    if self.mesh is None:
      state = decoder.steps(params, state, num_steps)
    else:
      on_mesh = MeshDecoder(decoder=decoder, mesh=self.mesh)
      state = on_mesh.steps(params, state, num_steps)
    found = state.counters
    back = {
      name: getattr(whole, name)
      .at[:, : part.shape[1]]
      .set(getattr(found, name))
      for name, part in cut.items()
    }
    return dataclasses.replace(
      state, counters=dataclasses.replace(found, **back)
    )


def rungs(
  target: LanguageModel,
  draft: Callable[[Tree], Drafter],
  *,
  rule: Rule,
  vocab_size: int,
  widths: Sequence[int] = WIDTHS,
) -> Rungs:
  """Decoders of some widths.

  Args:
    target: the target.
    draft: makes the drafter of a chain. Its state must not depend on the
      chain's length, and it must catch up with rounds in which nothing was
      drafted: `drafters.model.drafter(..., depth=depth.fixed(depth=G))`,
      `drafters.layer_skip` likewise, or `drafters.ngram`. Not with a policy
      that learns, nor a head: their states are of one width.
    rule: what verifies.
    vocab_size: V.
    widths: drafted tokens, rising; 0 drafts nothing.

  Raises:
    ValueError: if they are no ladder.
  """
  check(widths)
  made = {w: draft(chain(w)) for w in widths if w}
  wide = made[max(made)]
  if 0 in widths:
    made[0] = _nothing(wide)
  return Rungs(
    decoders={
      w: Decoder(
        target=target, drafter=one, rule=rule, vocab_size=vocab_size
      )
      for w, one in made.items()
    }
  )  # fmt: skip


def _nothing(wide: Drafter) -> Drafter:
  """Drafts nothing, and keeps the state of one that does."""
  tree = chain(0)

  def propose(params, state, cache, context: Context):
    del params
    draft = Draft(
      tree=tree, siblings=wide.siblings, tokens=context.root, log_probs=None
    )
    return draft, state, cache

  return dataclasses.replace(
    wide, name="nothing", tree=tree, propose=propose, passes=()
  )


class Climb:
  """A loop like any other, of rounds whose width the host chooses.

  It takes the width that may be the fastest: of those that few rounds were
  timed of it thinks better than what was measured, by `0.6 / sqrt(rounds)`, so
  that widths of about the same speed are all tried until it is known which is
  which, and others are left alone.

  A machine's speed changes from minute to minute by more than widths differ.
  So what a piece of rounds takes is laid to the drift of all widths first, as
  it is while the width stays, and then to its own price, which shows when the
  width changes.

  Args:
    loops: compiled, by width, on one state.
    ladder: how it chooses; other loops may learn and have learned in it.
    seconds: of a round of each width, to begin with (`measured`).
  """

  def __init__(
    self,
    loops: Mapping[int, Loop],
    ladder: Ladder,
    seconds: Mapping[int, float],
  ):
    for name, found in (("loops", loops), ("seconds", seconds)):
      if sorted(found) != list(ladder.widths):
        raise ValueError(
          f"the ladder has widths {ladder.widths}, and there are {name} of "
          f"{tuple(sorted(found))}"
        )
    if min(seconds.values()) <= 0:
      raise ValueError(f"seconds must be positive, got {dict(seconds)}")
    self._loops, self._ladder = loops, ladder
    self.seconds = dict(seconds)
    self._timed = dict.fromkeys(seconds, _FIRST)  # rounds that they are of
    self._drift = 0.0  # logarithm of what all take by what they took at first
    # Share of rows at work, in rounds without drafts and with: rows that draft
    # come to their ends at different times, and leave the batch half empty.
    self._at_work, self._counted = [1.0, 1.0], [8.0, 8.0]  # of so many rounds
    self._now = -1
    self._left = self._idle = 0
    self.chosen: list[int] = []  # widths, in order

  def __call__(
    self, params: Params, state: DecodeState, num_rounds: Any
  ) -> DecodeState:
    """As `Decoder.steps`: at most so many rounds."""
    rest, (before, first, running) = int(num_rounds), _counted(state)
    while running and rest > 0:
      if self._left <= 0:
        self._choose()
      # A text that ends soon is not cut for a choice: a call costs time.
      some = min(rest, max(self._left, self._ladder.every))
      start = time.perf_counter()
      state = self._loops[self._now](params, state, np.int32(some))
      counts, after, running = _counted(state)
      seconds, made = time.perf_counter() - start, after - first
      self._left -= made
      seen = (counts - before)[: self._now + 1]
      self._ladder.saw(seen)
      if made:
        share = float(np.sum(seen)) / (made * len(state.length))
        drafts = self._now > 0
        known, rounds = self._at_work[drafts], self._counted[drafts]
        moved = made / (made + rounds) * (share - known)
        self._at_work[drafts] = known + moved
        self._counted[drafts] = min(rounds + made, _REMEMBERED)
      if made >= _LEAST:
        self._learn_time(made, seconds)
      rest, before, first = rest - made, counts, after
    return state

  def _choose(self) -> None:
    """Sets the width of the next rounds, and how many they are."""
    ladder, rates = self._ladder, self._ladder.rates(self.seconds)
    hoped = {
      w: rates[w] * self._at_work[w > 0] * (1 + _DOUBT / rounds**0.5)
      for w, rounds in self._timed.items()
    }
    fastest = lambda widths: max(widths, key=lambda w: (hoped[w], -w))
    if self._idle >= ladder.patience:
      width = fastest([w for w in ladder.widths if w])
      self._idle, left = 0, max(ladder.every // 4, 1)
    else:
      width, left = fastest(ladder.widths), ladder.every
      near = hoped.get(self._now, 0.0) * (1 + ladder.margin)
      if self._now >= 0 and hoped[width] <= near:
        width = self._now
      self._idle = 0 if width else self._idle + 1
    self._now, self._left = width, left
    self.chosen.append(width)

  def _learn_time(self, rounds: int, seconds: float) -> None:
    """Learns what some rounds of the present width took."""
    known, timed = self.seconds[self._now], self._timed
    off = math.log(seconds / rounds / known) - self._drift
    off = min(max(off, -_FAR), _FAR)  # what held it up once is no price
    of_all = rounds / (rounds + _DRIFTS)
    of_own = (1 - of_all) * rounds / (rounds + timed[self._now])
    self._drift += of_all * off
    self.seconds[self._now] = known * math.exp(of_own * off)
    for width in timed:
      timed[width] *= _FADES**rounds
    timed[self._now] += rounds


_LEAST = 8  # rounds of a piece that is timed: fewer start too cold
_FIRST = 100.0  # rounds that a first timing counts for
_REMEMBERED = 512.0  # rounds that the share of rows at work is a mean of
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
  """Seconds of a round at every width, from where a state stands.

  Args:
    loops: compiled, by width.
    params: parameters of both models.
    state: with room for as many tokens; it is copied.
    rounds: of one timing at most, with its call from the host.
    repeats: timings that count, all widths in turn; their median does.
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
    for width, loop in loops.items():
      fresh = jax.block_until_ready(copy(state))
      start = time.perf_counter()
      after = jax.block_until_ready(loop(params, fresh, np.int32(rounds)))
      seconds = time.perf_counter() - start
      found[-1][width] = seconds / max(int(after.num_steps) - first, 1)
  # A machine's speed changes: widths are compared within a turn.
  mean = lambda turn: statistics.geometric_mean(turn.values())
  typical = statistics.median(map(mean, found[1:]))
  return {
    w: typical * statistics.median(turn[w] / mean(turn) for turn in found[1:])
    for w in loops
  }


def programs(rungs: Rungs) -> dict[int, Loop]:
  """The loops of some decoders, compiled when they are first called."""
  return {
    w: jax.jit(functools.partial(rungs.steps, w), donate_argnums=1)
    for w in rungs.decoders
  }
