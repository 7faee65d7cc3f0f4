"""Timing of decoding rounds, and of the passes that they are made of.

Passes are timed in the middle of real runs (`Pieces`): a batch is decoded once
more, by the same program but in two pieces, and between them, at another place
every time, the passes are timed on copies of the run's own caches. So they are
timed at contexts that runs have, and a machine's drift falls on rounds and
passes alike. Every part is a share of the round beside which it was timed; the
median of the shares counts, times the mean round.

The parts of a round, from the inside out:

- its model passes, each timed in a loop of its own, weights warm;
- `out_of_cache`: the further time of the same passes in the order of a round,
  where the target's weights drive the draft's out of the processor's cache;
- `laws`: every distribution of it is warped, and the drafted tokens drawn;
- `bookkeeping`: verification, the two draws, writing and counting.

And a run: its prompt's pass, `dispatch` (a call from the host that finds
nothing to do), and its rounds.

On a busy machine a whole may come out shorter than its part, or one pass take
different times beside drafted rounds and beside plain ones: such seconds are
impossible, `StepCosts.doubts` says so, and nothing should be predicted of them.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax import recurrent
from specjax.cache import Cache
from specjax.runtime.engine import Engine
from specjax.runtime.requests import Batch
from specjax.runtime.timed_loops import (
  Passes,
  laws_loop,
  passes_loop,
  proposals_loop,
)
from specjax.state import DecodeState
from specjax.types import LanguageModel, no_state

_PLACES = (0.25, 0.5, 0.75)  # of a run, where passes are timed
_REPEATS = 12  # passes in one timing
_WIDTHS_A_TURN = 2
# Timings on a quiet machine repeat to within this much of a round, ...
_SLACK = 0.05
# ... and those of one pass in two kinds of runs to within this much of it.
_DRIFT = 0.25

_T = TypeVar("_T")


def timed(part: Callable[..., _T], *arguments) -> tuple[float, _T]:
  """Seconds until a function's result is ready, and the result."""
  start = time.perf_counter()
  result = jax.block_until_ready(part(*arguments))
  return time.perf_counter() - start, result


def per_repeat(
  loop, params, carry, *more, repeats: int = _REPEATS
) -> tuple[float, Any]:
  """Seconds of one repeat of a loop, its call from the host taken off."""
  call, carry = timed(loop, params, carry, 0, *more)
  whole, carry = timed(loop, params, carry, repeats, *more)
  return _taken_off(call, whole) / repeats, carry


def _taken_off(calls: float, whole: float) -> float:
  """`whole - calls`, or the whole where that would not be positive.

  An empty call may be held up for longer than all the work takes.
  """
  return whole - calls if calls < whole else whole


def _copy(tree):
  return jax.block_until_ready(jax.tree.map(jnp.copy, tree))


# ------------------------------------------------------------- runs in pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run of one batch in pieces, timed.

  Attributes:
    prefill: seconds of the prompts' passes, and of the host's part in them.
    seconds: of its rounds, the calls from the host that made them taken off.
    rounds: how many.
    dispatch: seconds of such a call that finds nothing left to do.
    parts: seconds of a pass, by name; empty where none was timed.
  """

  prefill: float
  seconds: float
  rounds: int
  dispatch: float
  parts: dict[str, float]

  @property
  def round(self) -> float:
    """Mean seconds of a round."""
    return self.seconds / max(self.rounds, 1)

  @property
  def whole(self) -> float:
    """Seconds that the run should take in one piece."""
    return self.prefill + self.dispatch + self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
  """Seconds of a decoding round and of what it is made of.

  Attributes:
    step: one whole speculative round.
    plain_step: one whole autoregressive round.
    target: {T: one target pass over T tokens}.
    draft: {T: one draft pass over T tokens}; empty without a draft model.
    draft_passes: T of each draft pass of a round, in order.
    nodes: T of the target's pass of a round.
    in_order: a round's passes, in its order; None where rounds choose among
      passes of several widths, so that none is every round's.
    with_laws: a round without verification and what follows; None on a mesh,
      and where `in_order` is.
    dispatch: a call from the host that makes no round.
    proposal: drafting as a whole, draws and distributions too, where a head
      drafts, whose passes are not timed one by one; then `draft` is empty, and
      `in_order` the target's pass alone. None for other drafters, and on a
      mesh.
    again: one target pass over one token, timed beside drafted rounds, where
      `target[1]` is timed beside plain ones; None where it was not.
    prefill, plain_prefill: the prompts' passes.
  """

  step: float
  plain_step: float
  target: dict[int, float]
  draft: dict[int, float]
  draft_passes: tuple[int, ...]
  nodes: int
  in_order: float | None
  with_laws: float | None
  dispatch: float
  prefill: float
  plain_prefill: float
  proposal: float | None = None
  again: float | None = None

  @property
  def drafting(self) -> float:
    """Seconds of a round's drafting, as far as it was timed."""
    passes = sum(self.draft[t] for t in self.draft_passes)
    return passes + (self.proposal or 0.0)

  @property
  def forwards(self) -> float:
    """Seconds of a round's model passes, each timed alone."""
    return self.drafting + self.target[self.nodes]

  @property
  def attribution(self) -> dict[str, float | None]:
    """Seconds of each part of a round; they add up to `step`.

    None is unknown. A part that comes out negative by less than the noise of
    two timings is 0, and the part before it is smaller by as much.
    """
    names = ("passes", "out_of_cache", "laws", "bookkeeping")
    if self.in_order is None:
      return dict.fromkeys(names)
    in_order = self.in_order + (self.proposal or 0.0)
    every = (self.forwards, in_order, self.with_laws, self.step)
    known = {n: s for n, s in zip(names, every, strict=True) if s is not None}
    marks = list(known.values())
    for i in reversed(range(len(marks) - 1)):
      if 0 < marks[i] - marks[i + 1] <= _SLACK * self.step:
        marks[i] = marks[i + 1]
    parts: dict[str, float | None] = dict.fromkeys(names)
    for name, mark, before in zip(known, marks, [0.0, *marks], strict=False):
      parts[name] = mark - before
    return parts

  @property
  def doubts(self) -> list[str]:
    """Contradictions among these seconds, in words; empty where they agree."""
    ms = lambda seconds: f"{1e3 * seconds:.2f} ms"
    doubts = [
      f"{name.replace('_', ' ')} took {ms(seconds)} of a round"
      for name, seconds in self.attribution.items()
      if seconds is not None and seconds < 0
    ]
    one, wide = self.target[1], self.target[self.nodes]
    for less, more, part, whole in (
      (self.plain_step, one, "the pass of a plain round", "the round"),
      (wide, one, "a target pass over one token", f"one over {self.nodes}"),
      (self.step, one, "a target pass over one token", "a drafted round"),
    ):
      if less < more - _SLACK * self.plain_step:
        doubts.append(f"{part} took {ms(more)}, {whole} {ms(less)}")
    if self.again is not None and not (
      1 / (1 + _DRIFT) <= self.again / one <= 1 + _DRIFT
    ):
      apart = max(self.again, one) / min(self.again, one) - 1
      doubts.append(
        f"two timings of a target pass over one token, {ms(one)} and "
        f"{ms(self.again)}, disagree by {apart:.0%}: the machine is busy, or "
        "the model too small"
      )
    return doubts


class Pieces:
  """Decodes batches in pieces, and times the passes between them.

  Args:
    speculative, baseline: compiled engines of one pair.
    draft: the model that drafts, whose passes are timed on the drafter's state
      if that is a cache and the model has parameters of its own, on the
      target's cache if it has none or keeps no state; None where none drafts.
    typical: a batch; passes are timed for its shape only, since every shape has
      programs of its own.
    widths: tokens of further target passes to time; those that no cache of that
      shape could hold are left out.
  """

  def __init__(
    self,
    speculative: Engine,
    baseline: Engine,
    *,
    draft: LanguageModel | None,
    typical: Batch,
    widths: tuple[int, ...] = (),
  ):
    self._engines = {"speculative": speculative, "autoregressive": baseline}
    self._shape = (typical.rows, typical.width)
    params, target = speculative.params, speculative.decoder.target
    drafter = speculative.decoder.drafter
    has_params = params.draft is not None
    # A drafter without state drafts on the target's cache (`quantized_self`).
    self._own_cache = (
      draft is not None and has_params and drafter.init is not no_state
    )
    self._params = {"target": params.target}
    models = {"target": (target, "target")}
    if draft is not None:
      models["draft"] = (draft, "draft" if self._own_cache else "target")
      self._params["draft"] = params.draft if has_params else params.target
    # What no model drafts is timed with the distributions; of a head, drafting
    # as such.
    passes = drafter.passes
    self._passes = () if draft is None else passes
    self._proposals = None
    if draft is None and passes and speculative.mesh is None:
      self._proposals = proposals_loop(speculative.decoder)
    self._nodes = drafter.tree.num_fed
    self._one_width = not speculative.decoder.widths
    room = typical.width + baseline.max_new_tokens
    self._widths = sorted({w for w in widths if w <= room} - {1, self._nodes})
    self._loop = functools.cache(functools.partial(passes_loop, models))
    self._laws = None
    if speculative.mesh is None and self._one_width:
      self._laws = laws_loop(speculative.decoder)
    self._turn = 0
    # [rounds][batches], in the order in which they were decoded.
    self.runs: dict[str, list[list[Run]]] = {n: [] for n in self._engines}
    self._typical: dict[str, list[Run]] = {n: [] for n in self._engines}

  def add(
    self, batch: Batch, calls: dict[str, int], *, index: int, number: int
  ) -> None:
    """Decodes a batch in pieces, plainly and with drafts.

    Args:
      batch: the prompts.
      calls: rounds that each of the two is known to take.
      index: of the round of all batches; 0 warms up and does not count.
      number: of the batch.
    """
    typical = (batch.rows, batch.width) == self._shape
    parts = {}
    if typical and (index or not self._turn):
      parts = {
        "speculative": self._of_a_round,
        "autoregressive": self._of_target,
      }
    for name, one in self._engines.items():
      place = math.ceil(calls[name] * _PLACES[self._turn % len(_PLACES)])
      with one.on_mesh():
        run = _in_pieces(one, batch, place=place, parts=parts.get(name))
      if index:
        if not number:
          self.runs[name].append([])
        self.runs[name][-1].append(run)
        if typical:
          self._typical[name].append(run)
    self._turn += bool(parts)

  def _of_a_round(self, state: DecodeState) -> dict[str, float]:
    """Seconds of a speculative round's passes, alone and together."""
    verify = ("target", self._nodes)
    caches = {"target": state.target_cache}
    if self._own_cache:
      inner = state.drafter_state
      while hasattr(inner, "inner"):  # others may wrap it (`online`)
        inner = inner.inner
      if isinstance(inner, Cache):
        caches["draft"] = inner
      else:  # another kind of drafter: its passes are part of drafting
        self._passes = ()
    drafts = tuple(("draft", fed) for fed in self._passes)
    orders: dict[str, Passes] = {
      f"{who} {fed}": ((who, fed),) for who, fed in (*drafts, verify)
    }
    orders["again"] = (("target", 1),)
    if self._one_width:
      orders["in order"] = (*drafts, verify)
    seconds = self._time(orders, caches)
    carry = (state.tokens, state.drafter_state, state.target_cache)
    without = dict.fromkeys(("tokens", "drafter_state", "target_cache"))
    rest = dataclasses.replace(state, **without)  # type: ignore[arg-type]
    params = self._engines["speculative"].params
    for name, loop in (
      ("with distributions", self._laws),
      ("proposal", self._proposals),
    ):
      if loop is not None:
        seconds[name], _ = per_repeat(loop, params, _copy(carry), rest)
    return seconds

  def _of_target(self, state: DecodeState) -> dict[str, float]:
    """Seconds of a pass over one token, and of a few over more."""
    count = min(_WIDTHS_A_TURN, len(self._widths))
    first = self._turn * count
    widths = [1] + [
      self._widths[(first + i) % len(self._widths)] for i in range(count)
    ]
    if self._turn < 2:  # all once to compile, and once that counts
      widths = [1, *self._widths]
    orders = {f"target {fed}": (("target", fed),) for fed in widths}
    return self._time(orders, {"target": state.target_cache})

  def _time(self, orders: Mapping[str, Passes], caches) -> dict[str, float]:
    caches, seconds = _copy(caches), {}
    for name, order in orders.items():
      # Recurrent states have room for what a pass is over.
      widest = max(fed for _, fed in order)
      caches = {
        who: cache.replace(recurrent=recurrent.widened(cache.recurrent, widest))
        for who, cache in caches.items()
      }
      seconds[name], caches = per_repeat(
        self._loop(order), self._params, caches
      )
    return seconds

  def costs(self) -> StepCosts:
    """Seconds of a round and of its parts, for the typical shape."""
    step, plain_step = (_mean_round(runs) for runs in self._typical.values())
    seconds = {
      **_scaled(self._typical["autoregressive"], plain_step),
      **_scaled(self._typical["speculative"], step),
    }
    of = lambda who: {
      int(name.split()[1]): value
      for name, value in sorted(seconds.items())
      if name.startswith(who + " ")
    }
    mean = lambda name, field: statistics.fmean(
      getattr(run, field) for run in self._typical[name]
    )
    return StepCosts(
      step=step,
      plain_step=plain_step,
      target=dict(sorted(of("target").items())),
      draft=of("draft"),
      draft_passes=self._passes,
      nodes=self._nodes,
      in_order=seconds.get("in order"),
      again=seconds["again"],
      with_laws=seconds.get("with distributions"),
      proposal=seconds.get("proposal"),
      dispatch=statistics.median(
        run.dispatch for run in self._typical["speculative"]
      ),
      prefill=mean("speculative", "prefill"),
      plain_prefill=mean("autoregressive", "prefill"),
    )

  def round_seconds(self, name: str) -> float:
    """Seconds of all rounds that were made."""
    return sum(run.seconds for row in self.runs[name] for run in row)

  def predicted(self, name: str) -> np.ndarray:
    """Seconds that whole runs should take, `f64[rounds, batches]`."""
    return np.array([[run.whole for run in row] for row in self.runs[name]])


def _in_pieces(
  engine: Engine,
  batch: Batch,
  *,
  place: int,
  parts: Callable[[DecodeState], dict[str, float]] | None,
) -> Run:
  """Decodes a batch in two pieces; in between, `parts` times copies of it."""
  prefill, state = timed(engine.prefill, batch)
  first, state = timed(engine.generate, batch, state, place)
  of_parts = parts(state) if parts else {}
  second, state = timed(engine.generate, batch, state)
  dispatch, state = timed(engine.generate, batch, state)
  return Run(
    prefill=prefill,
    seconds=_taken_off(2 * dispatch, first + second),
    rounds=int(state.num_steps),
    dispatch=dispatch,
    parts=of_parts,
  )


def _mean_round(runs: list[Run]) -> float:
  rounds = sum(run.rounds for run in runs)
  return sum(run.seconds for run in runs) / max(rounds, 1)


def _scaled(runs: list[Run], step: float) -> dict[str, float]:
  """Seconds of every part: the median share of its own run's round."""
  shares: dict[str, list[float]] = {}
  for run in runs:
    for name, seconds in run.parts.items():
      shares.setdefault(name, []).append(seconds / run.round)
  return {name: step * statistics.median(s) for name, s in shares.items()}
