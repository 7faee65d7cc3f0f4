"""Seconds of a system's rounds and passes, timed separately from the answers.

The ratio of two rounds, and the number of rounds of the answers, predict the
speed-up (`summary`).

Passes are timed in the middle of real runs: the turn of a median group is
decoded in two pieces, and between them, at a different place every time, passes
are timed on copies of the run's caches. Contexts are thus realistic, and
machine drift affects rounds and passes alike: each part is expressed as a share
of the round in the same run, and the median share is used.
"""

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from launch.assembly.pair import Pair
from launch.evaluation import timing
from launch.evaluation.timing import Passes, timed
from specjax import recurrent
from specjax.cache import Cache
from specjax.runtime.engine import Engine
from specjax.runtime.requests import Batch
from specjax.state import DecodeState
from specjax.types import LanguageModel, no_state

# Tokens of the target passes that `--timing=passes` times.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_PLACES = (0.25, 0.5, 0.75)  # fractions of a run at which passes are timed
# On a quiet machine, repeated timings agree within this share of a round, ...
_SLACK = 0.05
# ... and timings of the same pass in two kinds of runs within this share.
_DRIFT = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Seconds of a decoding round and of its parts.

  Attributes:
    depth: levels of the draft.
    step, plain_step: one whole round, speculative and autoregressive.
    target, draft: {T: one pass over T tokens}; empty without a draft model.
    draft_passes: T of each draft pass of a round, in order.
    nodes: T of the target pass of a round.
    one_width: whether all rounds use that pass, never a narrower one.
    proposal: all of drafting, including sampling, for a head, whose passes are
      not timed individually (`draft` is empty). None for other drafters, and on
      a mesh.
    again: one target pass over one token, timed between speculative rounds;
      `target[1]` is timed between plain ones.
    prefill, plain_prefill: prefill of the prompts.
  """

  depth: int
  step: float
  plain_step: float
  target: Mapping[int, float]
  draft: Mapping[int, float]
  draft_passes: tuple[int, ...]
  nodes: int
  one_width: bool
  proposal: float | None
  again: float
  prefill: float
  plain_prefill: float

  @classmethod
  def of(cls, record: Mapping) -> "Costs":
    """Reads the costs in a JSON record (`measure_costs`)."""
    seconds = record["seconds"]
    numbered = lambda name: {int(n): s for n, s in seconds[name].items()}
    return cls(
      **seconds | {name: numbered(name) for name in ("target", "draft")}
    )

  @property
  def drafting(self) -> float:
    """Seconds of a round's drafting, insofar as it was timed."""
    passes = sum(self.draft[t] for t in self.draft_passes)
    return passes + (self.proposal or 0.0)

  @property
  def forwards(self) -> float:
    """Seconds of a round's model passes, each timed alone."""
    return self.drafting + self.target[self.nodes]

  @property
  def rest(self) -> float:
    """Seconds of a plain round outside its passes, at most this round's."""
    plain = max(self.plain_step - self.target[1], 0.0)
    return min(plain, max(self.step - self.forwards, 0.0))

  @property
  def level(self) -> float:
    """Seconds per level of the draft: its passes, and a share of overhead."""
    left = max(self.step - self.forwards, 0.0) - self.rest
    return (self.drafting + left) / self.depth

  @property
  def doubts(self) -> list[str]:
    """Contradictions among the timings; empty if they are consistent.

    On a busy machine, a whole may seem to take less time than its part, or the
    same pass may take different times in speculative and plain runs.
    """
    ms = lambda seconds: f"{1e3 * seconds:.2f} ms"
    one, wide = self.target[1], self.target[self.nodes]
    wholes = [
      (self.plain_step, one, "the pass of a plain round", "the round"),
      (wide, one, "a target pass over one token", f"one over {self.nodes}"),
      (self.step, one, "a target pass over one token", "a drafted round"),
    ]
    if self.one_width:
      passes = "the passes of a drafted round"
      wholes.append((self.step, self.forwards, passes, "the round"))
    doubts = [
      f"{part} took {ms(more)}, {whole} {ms(less)}"
      for less, more, part, whole in wholes
      if less < more - _SLACK * self.plain_step
    ]
    gap = max(self.again, one) / min(self.again, one) - 1
    if gap > _DRIFT:
      doubts.append(
        f"two timings of a target pass over one token, {ms(one)} and "
        f"{ms(self.again)}, disagree by {gap:.0%}: the machine is busy, or "
        "the model too small"
      )
    return doubts


class Run(NamedTuple):
  """Timings of a batch: prefill, all rounds, and passes by name."""

  prefill: float
  seconds: float
  rounds: int
  parts: dict[str, float]


class Pieces:
  """Decodes a batch in pieces, and times the passes between them.

  Args:
    speculative, plain: compiled engines of one pair.
    draft: the draft model or None. Its passes are timed on the drafter's state
      if that is a cache and the model has its own parameters, and on the
      target's cache if it has none or the drafter keeps no state.
    batch: the prompts.
    widths: tokens of additional target passes to time, if the cache has room.
  """

  def __init__(
    self,
    speculative: Engine,
    plain: Engine,
    *,
    draft: LanguageModel | None,
    batch: Batch,
    widths: tuple[int, ...] = (),
  ):
    self._speculative, self._plain, self._batch = speculative, plain, batch
    params, decoder = speculative.params, speculative.decoder
    drafter, has_params = decoder.drafter, params.draft is not None
    # A drafter without state drafts on the target's cache (`quantized_self`).
    self._own_cache = (
      draft is not None and has_params and drafter.init is not no_state
    )
    self._params = {"target": params.target}
    models = {"target": (decoder.target, "target")}
    if draft is not None:
      models["draft"] = (draft, "draft" if self._own_cache else "target")
      self._params["draft"] = params.draft if has_params else params.target
    self._loop = functools.cache(functools.partial(timing.passes_loop, models))
    self._passes = () if draft is None else drafter.passes
    self._nodes, self._depth = drafter.tree.num_fed, drafter.tree.max_depth
    self._one_width = not decoder.widths
    room = batch.width + plain.max_new_tokens
    self._widths = sorted({w for w in widths if w <= room} - {1, self._nodes})
    self._proposals = None
    if draft is None and drafter.passes and speculative.mesh is None:
      self._proposals = timing.proposals_loop(decoder)
    self._turn = 0
    self._runs: tuple[list[Run], list[Run]] = ([], [])

  def add(self, rounds: int, plain_rounds: int) -> None:
    """Decodes the batch, given its numbers of rounds; first as a warm-up."""
    share = _PLACES[self._turn % len(_PLACES)]
    for runs, engine, count, parts in (
      (self._runs[0], self._speculative, rounds, self._of_a_round),
      (self._runs[1], self._plain, plain_rounds, self._of_target),
    ):
      with engine.on_mesh():
        place = math.ceil(count * share)
        run = _in_pieces(engine, self._batch, place=place, parts=parts)
      if self._turn:
        runs.append(run)
    self._turn += 1

  def _of_a_round(self, state: DecodeState) -> dict[str, float]:
    """Seconds of a speculative round's passes."""
    verify = ("target", self._nodes)
    caches = {"target": state.target_cache}
    if self._own_cache:
      inner = state.drafter_state
      while hasattr(inner, "inner"):  # it may be wrapped (`online`)
        inner = inner.inner
      if isinstance(inner, Cache):
        caches["draft"] = inner
      else:  # another kind of drafter, whose passes are not timed
        self._passes = ()
    drafts = tuple(("draft", fed) for fed in self._passes)
    orders: dict[str, Passes] = {
      f"{who} {fed}": ((who, fed),) for who, fed in (*drafts, verify)
    }
    orders["again"] = (("target", 1),)
    seconds = self._time(orders, caches)
    if self._proposals is not None:
      carry = (state.tokens, state.drafter_state, state.target_cache)
      without = dict.fromkeys(("tokens", "drafter_state", "target_cache"))
      rest = dataclasses.replace(state, **without)
      params = self._speculative.params
      seconds["proposal"], _ = timing.per_repeat(
        self._proposals, params, _copy(carry), rest
      )
    return seconds

  def _of_target(self, state: DecodeState) -> dict[str, float]:
    """Seconds of target passes over one token and over each of `widths`."""
    orders = {f"target {t}": (("target", t),) for t in (1, *self._widths)}
    return self._time(orders, {"target": state.target_cache})

  def _time(self, orders: Mapping[str, Passes], caches) -> dict[str, float]:
    caches, seconds = _copy(caches), {}
    for name, order in orders.items():
      # Recurrent states need room for the tokens of a pass.
      widest = max(fed for _, fed in order)
      caches = {
        who: cache.replace(recurrent=recurrent.widen(cache.recurrent, widest))
        for who, cache in caches.items()
      }
      seconds[name], caches = timing.per_repeat(
        self._loop(order), self._params, caches
      )
    return seconds

  def costs(self) -> Costs:
    """Seconds of a round and of its parts."""
    drafted, plain = self._runs
    step, plain_step = _mean_round(drafted), _mean_round(plain)
    seconds = {**_scaled(plain, plain_step), **_scaled(drafted, step)}
    passes: dict[str, dict[int, float]] = {"target": {}, "draft": {}}
    for name in [name for name in seconds if " " in name]:
      who, fed = name.split()
      passes[who][int(fed)] = seconds.pop(name)
    return Costs(
      depth=self._depth,
      step=step,
      plain_step=plain_step,
      **{who: dict(sorted(some.items())) for who, some in passes.items()},
      draft_passes=self._passes,
      nodes=self._nodes,
      prefill=statistics.fmean(run.prefill for run in drafted),
      plain_prefill=statistics.fmean(run.prefill for run in plain),
      one_width=self._one_width,
      **{"proposal": None} | seconds,
    )


def _copy(tree):
  return jax.block_until_ready(jax.tree.map(jnp.copy, tree))


def _in_pieces(
  engine: Engine,
  batch: Batch,
  *,
  place: int,
  parts: Callable[[DecodeState], dict[str, float]],
) -> Run:
  """Decodes in two pieces; times parts on copies in between, less the calls."""
  prefill, state = timed(engine.prefill, batch)
  first, state = timed(engine.generate, batch, state, place)
  of_parts = parts(state)
  second, state = timed(engine.generate, batch, state)
  idle, state = timed(engine.generate, batch, state)  # nothing is left to do
  return Run(
    prefill=prefill,
    seconds=timing.without_calls(2 * idle, first + second),
    rounds=int(state.num_steps),
    parts=of_parts,
  )


def _mean_round(runs: list[Run]) -> float:
  return sum(run.seconds for run in runs) / sum(run.rounds for run in runs)


def _scaled(runs: list[Run], step: float) -> dict[str, float]:
  """Seconds of every part: its median share of a round in the same run."""
  shares: dict[str, list[float]] = {}
  for run in runs:
    for name, seconds in run.parts.items():
      shares.setdefault(name, []).append(seconds * run.rounds / run.seconds)
  return {name: step * statistics.median(s) for name, s in shares.items()}


def measure_costs(
  engine: Engine,
  plain: Engine,
  pair: Pair,
  batch: Batch,
  numbers: Mapping[str, Any],
  plain_numbers: Mapping[str, Any],
  *,
  widths: tuple[int, ...] = (),
) -> dict:
  """Times the rounds of a system and of plain decoding, and their passes.

  Returns:
    `seconds`, the `Costs`; `round_cost` and `draft_cost`, the cost of a round
    and of its draft passes in plain rounds; `round_fed`, the mean tokens of a
    target pass; `fed_cost`, the cost of one more such token; and `doubts`, the
    reasons why nothing is predicted, if any.
  """
  # An online draft is timed with its initial parameters, without updates.
  engine = dataclasses.replace(engine, learner=None)
  for one in (engine, plain):
    one.compile(batch)
  pieces = Pieces(engine, plain, draft=pair.draft, batch=batch, widths=widths)
  rounds = numbers["rounds"]
  for _ in range(1 + len(_PLACES)):
    pieces.add(rounds, plain_numbers["rounds"])
  costs = pieces.costs()
  nodes, drafts = costs.nodes, costs.drafting / costs.plain_step
  # On a mesh a head's drafting is not timed.
  unknown = pair.draft is None and pair.params.draft is not None
  wider = costs.target[nodes] - costs.target[1]
  return {
    "depth": costs.depth,
    "prompt_tokens": batch.width,
    "round_cost": costs.step / costs.plain_step,
    "round_fed": numbers["fed"] / max(rounds, 1),
    "fed_cost": wider / max(nodes - 1, 1) / costs.plain_step,
    "draft_cost": None if unknown and costs.proposal is None else drafts,
    "doubts": costs.doubts,
    "seconds": json.loads(json.dumps(dataclasses.asdict(costs))),
  }
