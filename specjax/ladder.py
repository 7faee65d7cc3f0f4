"""Widths of verification, one program each, chosen by the host between rounds.

A depth policy (`specjax.drafters.depth`) saves passes of the draft; the
target's pass has the width of the tree, whatever is in it. Whether a wide pass
pays depends on how much the batch fills the device, and that changes seldom: so
a few widths are compiled, from none to the widest, and the host climbs or
descends between calls of `Rungs.steps`, from the acceptance of the rounds that
are finished and from what rounds of each width were measured to take.

All widths work on one state, that of the widest. A width that is chosen from
finished rounds knows nothing of the tokens to come: nothing is lost by it.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import Decoder
from specjax.state import Counters, DecodeState
from specjax.theory import throughput
from specjax.tree import Tree, chain
from specjax.types import Context, Draft, Drafter, LanguageModel, Params, Rule

WIDTHS = (0, 1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
  """When to change the width: only for a clear gain, and at times to look.

  Attributes:
    seconds: of a whole round by its width (drafted tokens a row), 0 too, at
      the batch at hand (`measured`).
    margin: by how much another width has to be faster.
    patience: choices without a draft after which one is tried, since rounds
      that draft nothing say nothing of acceptance.
  """

  seconds: Mapping[int, float]
  margin: float = 0.05
  patience: int = 16

  def __post_init__(self):
    if 0 not in self.seconds or min(self.seconds) < 0:
      raise ValueError(
        f"seconds must be given by widths >= 0, 0 too, got {dict(self.seconds)}"
      )
    if min(self.seconds.values()) <= 0 or self.margin < 0 or self.patience < 1:
      raise ValueError(
        "seconds must be positive, margin >= 0 and patience >= 1, got "
        f"{dict(self.seconds)}, {self.margin} and {self.patience}"
      )

  @property
  def widths(self) -> tuple[int, ...]:
    """In rising order."""
    return tuple(sorted(self.seconds))

  def rate(self, width: int, acceptance: float) -> float:
    """Tokens per second of a row, if each token is accepted so likely."""
    tokens = throughput.tokens_per_cycle(width, acceptance)
    return float(tokens) / self.seconds[width]

  def best(self, acceptance: float) -> int:
    """The fastest width, the narrowest of equals."""
    return max(self.widths, key=lambda w: (self.rate(w, acceptance), -w))

  def choose(self, now: int, acceptance: float, idle: int = 0) -> int:
    """The width of the next rounds.

    Args:
      now: that of the last.
      acceptance: of a drafted token, given that those before it stand.
      idle: choices since something was drafted.
    """
    best = self.best(acceptance)
    if now == 0 and idle >= self.patience:
      return min(w for w in self.widths if w)
    gain = self.rate(best, acceptance) / self.rate(now, acceptance)
    return best if gain > 1 + self.margin else now


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rungs:
  """Decoders of several widths that go on with each other's state.

  Attributes:
    decoders: by width; prompts are read by that of the `widest`.
  """

  decoders: Mapping[int, Decoder]

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
    state = decoder.steps(params, state, num_steps)
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
      drafted: `drafters.model.drafter(..., depth=depth.fixed(depth=G))`, or
      `drafters.layer_skip`. Not with a policy that learns, nor a head: their
      states are of one width.
    rule: what verifies.
    vocab_size: V.
    widths: drafted tokens; 0 drafts nothing.

  Raises:
    ValueError: if there is no width above 0.
  """
  if max(widths, default=0) < 1 or min(widths) < 0:
    raise ValueError(f"widths must be >= 0, one above 0, got {tuple(widths)}")
  made = {w: draft(chain(w)) for w in sorted(set(widths) - {0})}
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


def measured(
  rungs: Rungs,
  params: Params,
  state: DecodeState,
  *,
  rounds: int = 4,
  repeats: int = 5,
) -> dict[int, float]:
  """Seconds of a round at every width, from where a state stands.

  Args:
    rungs: the decoders.
    params: parameters of both models.
    state: with room for as many tokens; it is copied.
    rounds: of one timing; the call from the host is taken off.
    repeats: timings, all widths in turn; their median counts.

  Raises:
    ValueError: if no row of the state is running.
  """
  if np.all(jax.device_get(state.done)):
    raise ValueError("a round cannot be timed on rows that are all done")
  programs = _programs(rungs)
  first = int(state.num_steps)
  copy = lambda: jax.block_until_ready(jax.tree.map(jnp.copy, state))
  found: dict[int, list[float]] = {w: [] for w in programs}
  for repeat in range(repeats + 1):
    for width, program in programs.items():
      times = []
      for count in (0, rounds):
        fresh, start = copy(), time.perf_counter()
        after = program(params, fresh, jnp.int32(count))
        jax.block_until_ready(after)
        times.append(time.perf_counter() - start)
      made = max(int(after.num_steps) - first, 1)
      if repeat:  # the first one warms up
        # Noise may make the call from the host the longer one.
        found[width].append(max(times[1] - times[0], 1e-9) / made)
  return {w: statistics.median(each) for w, each in found.items()}


def _programs(rungs: Rungs) -> dict[int, Callable[..., DecodeState]]:
  return {
    w: jax.jit(functools.partial(rungs.steps, w), donate_argnums=1)
    for w in rungs.decoders
  }


def acceptance(before: Counters, after: Counters) -> float | None:
  """How likely a drafted token was accepted, given that it was reached.

  Args:
    before, after: of a state, some rounds apart.

  Returns:
    The expectation given the drafts, over all rows; None if nothing was
    drafted between.
  """
  total = lambda name: float(
    np.sum(np.asarray(getattr(after, name)) - np.asarray(getattr(before, name)))
  )
  offered = total("rank_offered")
  return total("rank_accepted") / offered if offered > 0 else None


def generate(
  rungs: Rungs,
  ladder: Ladder,
  params: Params,
  state: DecodeState,
  *,
  every: int = 8,
  supposed: float = 0.7,
  keep: float = 0.7,
) -> tuple[DecodeState, list[int]]:
  """Decodes to the end, the width chosen anew every few rounds.

  Args:
    rungs: the decoders, whose widths are the ladder's.
    ladder: what chooses.
    params: parameters of both models.
    state: from the widest decoder's `init`; donated.
    every: rounds between choices.
    supposed: acceptance before anything is known.
    keep: of the acceptance that was known, at each choice.

  Returns:
    The last state, and the widths that were chosen, in order.

  Raises:
    ValueError: if the ladder's widths are others.
  """
  if set(ladder.widths) != set(rungs.decoders):
    raise ValueError(
      f"the ladder has widths {ladder.widths}, and there are decoders of "
      f"{tuple(sorted(rungs.decoders))}"
    )
  programs = _programs(rungs)
  known, width, idle = supposed, ladder.best(supposed), 0
  chosen: list[int] = []
  while not np.all(jax.device_get(state.done)):
    before = jax.device_get(state.counters)
    state = programs[width](params, state, jnp.int32(every))
    chosen.append(width)
    found = acceptance(before, jax.device_get(state.counters))
    idle = idle + 1 if found is None else 0
    if found is not None:
      known = keep * known + (1 - keep) * found
    width = ladder.choose(width, known, idle)
  return state, chosen
