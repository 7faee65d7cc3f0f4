"""Times the parts of a decoding step, each in a loop on the device.

A part is run many times inside one jitted `fori_loop`, so that a timing holds
no dispatch from the host; parts take turns, and the median over rounds is
reported, so that a machine's drift falls on all of them alike.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from launch.decoding.engine import Engine
from launch.decoding.pair import Pair
from launch.decoding.prompts import Batch
from specjax.types import DecodeState, LanguageModel


def alternate(
  parts: dict[str, Callable[[], object]],
  *,
  rounds: int,
  average: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
  """Runs the parts in turn; the median seconds of each.

  Args:
    parts: name to a function that blocks until its work is done.
    rounds: counted rounds, after one that is not.
    average: over the rounds. Where what is timed in short parts is compared
      with a long one, the mean: interruptions are rare and long, and the median
      of the short parts has none of them.

  Returns:
    Name to seconds.
  """
  seconds = {name: [] for name in parts}
  for index in range(rounds + 1):
    for name, part in parts.items():
      start = time.perf_counter()
      part()
      if index:
        seconds[name].append(time.perf_counter() - start)
  return {name: average(s) for name, s in seconds.items()}


def forward_loop(model: LanguageModel, fed: int, repeats: int):
  """A jitted loop of `repeats` forward passes over `fed` tokens.

  Args:
    model: what to run.
    fed: T, tokens fed each time, always into the same slots.
    repeats: passes.

  Returns:
    `(params, tokens i32[B, T], cache) -> i32[B, T]`; every pass feeds tokens
    that depend on all logits of the pass before, so none can be left out.
  """

  @jax.jit
  def run(params, tokens, cache):
    start = cache.length

    def body(_, carry):
      tokens, cache = carry
      output, cache = model.apply(params, tokens, cache.replace(length=start))
      change = jnp.max(output.logits, axis=-1) > 0
      return (tokens + change) % 2, cache

    return lax.fori_loop(0, repeats, body, (tokens[:, :fed], cache))[0]

  return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
  """Median seconds of a decoding step and of its parts.

  Attributes:
    step: one whole speculative step.
    plain_step: one whole autoregressive step.
    target: {T: one target pass over T tokens}.
    draft: {T: one draft pass over T tokens}; empty without a draft model.
    draft_passes: T of each draft pass of a step, in order.
  """

  step: float
  plain_step: float
  target: dict[int, float]
  draft: dict[int, float]
  draft_passes: tuple[int, ...]

  @property
  def forwards(self) -> float:
    """Seconds of a step's model passes alone."""
    passes = sum(self.draft[fed] for fed in self.draft_passes)
    return passes + self.target[max(self.target)]


def draft_passes(pair: Pair, drafter_name: str) -> tuple[int, ...]:
  """Tokens fed in each draft pass of one step."""
  tree = pair.decoder.drafter.tree
  if pair.draft is None:
    return ()
  first = 2 if drafter_name == "model" else 1
  return (first, *(len(level) for level in tree.levels[1:-1]))


def step_parts(
  speculative: Engine,
  baseline: Engine,
  batch: Batch,
  *,
  drafter_name: str,
  repeats: int = 16,
) -> dict[str, Callable[[], object]]:
  """Whole steps and their passes, from the middle of a real decode.

  Args:
    speculative, baseline: compiled engines.
    batch: the prompts to start from.
    drafter_name: `config.drafter`.
    repeats: steps or passes inside one timing.

  Returns:
    Functions for `alternate`, whose result `step_costs` reads.
  """
  pair = speculative.pair
  tree = speculative.decoder.drafter.tree
  nodes = tree.num_nodes
  # Every timing starts from the same state and stays inside its buffer.
  need = (repeats + 1) * (tree.max_depth + 1)
  if batch.width + need > pair.max_length:
    raise ValueError(
      f"timing {repeats} steps takes {batch.width + need} positions, but the "
      f"pair has {pair.max_length}"
    )
  speculative, baseline = (
    dataclasses.replace(
      one, max_new_tokens=max(need, one.max_new_tokens), programs={}
    )
    for one in (speculative, baseline)
  )
  for one in (speculative, baseline):
    one.compile(batch)

  def steps_of(engine):
    run = jax.jit(engine.mapped.steps)
    state = engine.prefill(batch)
    state = dataclasses.replace(state, stop_tokens=state.stop_tokens[:0])

    def part():
      with engine.on_mesh():
        jax.block_until_ready(run(pair.params, state, repeats).tokens)

    return part

  state: DecodeState = speculative.prefill(batch)
  plain_state = baseline.prefill(batch)
  parts = {"step": steps_of(speculative), "plain_step": steps_of(baseline)}
  for fed in sorted({1, nodes}):
    cache = plain_state.target_cache if fed == 1 else state.target_cache
    parts[f"target {fed}"] = _passes(
      baseline, pair.target, pair.params.target, cache, fed, repeats
    )
  for fed in sorted(set(draft_passes(pair, drafter_name))):
    own = drafter_name == "model"
    parts[f"draft {fed}"] = _passes(
      speculative,
      pair.draft,
      pair.params.draft if own else pair.params.target,
      state.drafter_state if own else state.target_cache,
      fed,
      repeats,
    )
  return parts


def _passes(engine, model, params, cache, fed, repeats):
  """A function that makes `repeats` passes over `fed` tokens, and waits."""
  loop = forward_loop(model, fed, repeats)
  tokens = jnp.zeros((len(cache.length), fed), jnp.int32)

  def part():
    with engine.on_mesh():
      jax.block_until_ready(loop(params, tokens, cache))

  return part


def step_costs(
  seconds: dict[str, float], passes: tuple[int, ...], *, repeats: int = 16
) -> StepCosts:
  """Costs of one step and one pass.

  Args:
    seconds: by part, of `step_parts` (others are ignored).
    passes: from `draft_passes`.
    repeats: as for `step_parts`.
  """
  pick = lambda kind: {
    int(name.split()[1]): total / repeats
    for name, total in seconds.items()
    if name.startswith(kind + " ")
  }
  return StepCosts(
    step=seconds["step"] / repeats,
    plain_step=seconds["plain_step"] / repeats,
    target=pick("target"),
    draft=pick("draft"),
    draft_passes=passes,
  )


def measure_step(
  speculative: Engine,
  baseline: Engine,
  batch: Batch,
  *,
  drafter_name: str,
  rounds: int,
) -> StepCosts:
  """Times the parts of a step; see `step_parts`.

  Args:
    speculative, baseline, batch, drafter_name: as for `step_parts`.
    rounds: timed rounds of every part.

  Returns:
    The medians.
  """
  parts = step_parts(speculative, baseline, batch, drafter_name=drafter_name)
  return step_costs(
    alternate(parts, rounds=rounds),
    draft_passes(speculative.pair, drafter_name),
  )


def curve_parts(
  engine: Engine, batch: Batch, *, widths: tuple[int, ...], repeats: int = 16
) -> dict[str, Callable[[], object]]:
  """Target passes over each number of tokens, for `alternate`.

  Widths that do not fit the batch's buffer are left out.
  """
  pair = engine.pair
  cache = engine.prefill(batch).target_cache
  room = cache.slots - int(cache.length.max())
  return {
    f"verify {fed}": _passes(
      engine, pair.target, pair.params.target, cache, fed, repeats
    )
    for fed in widths
    if fed <= room
  }


def curve_of(
  seconds: dict[str, float], *, repeats: int = 16
) -> dict[int, float]:
  """Seconds of one pass by the tokens fed, of `curve_parts`."""
  return {
    int(name.split()[1]): total / repeats
    for name, total in seconds.items()
    if name.startswith("verify ")
  }


def verify_curve(
  engine: Engine, batch: Batch, *, widths: tuple[int, ...], rounds: int
) -> dict[int, float]:
  """Median seconds of one target pass over each number of tokens.

  Widths that do not fit the batch's buffer are left out.
  """
  return curve_of(
    alternate(curve_parts(engine, batch, widths=widths), rounds=rounds)
  )
