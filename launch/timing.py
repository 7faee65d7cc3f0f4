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

from launch.engine import Engine
from launch.pair import Pair
from launch.prompts import Batch
from specjax.cache import Cache
from specjax.types import DecodeState, LanguageModel


def alternate(
  parts: dict[str, Callable[[], object]], *, rounds: int
) -> dict[str, float]:
  """Runs the parts in turn; the median seconds of each.

  Args:
    parts: name to a function that blocks until its work is done.
    rounds: counted rounds, after one that is not.

  Returns:
    Name to median seconds.
  """
  seconds = {name: [] for name in parts}
  for index in range(rounds + 1):
    for name, part in parts.items():
      start = time.perf_counter()
      part()
      if index:
        seconds[name].append(time.perf_counter() - start)
  return {name: statistics.median(s) for name, s in seconds.items()}


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
    plain_cache: shapes and dtypes of the target's cache in `plain_step`.
  """

  step: float
  plain_step: float
  target: dict[int, float]
  draft: dict[int, float]
  draft_passes: tuple[int, ...]
  plain_cache: Cache

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


def measure_step(
  speculative: Engine,
  baseline: Engine,
  batch: Batch,
  *,
  drafter_name: str,
  rounds: int,
  repeats: int = 16,
) -> StepCosts:
  """Times whole steps and their parts from the middle of a real decode.

  Args:
    speculative, baseline: compiled engines.
    batch: the prompts to start from.
    drafter_name: `config.drafter`.
    rounds: timed rounds of every part.
    repeats: steps or passes inside one timing.

  Returns:
    The medians.
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
    run = jax.jit(engine.decoder.steps)
    state = engine.prefill(batch)
    state = dataclasses.replace(state, stop_tokens=state.stop_tokens[:0])
    return lambda: jax.block_until_ready(
      run(pair.params, state, repeats).tokens
    )

  def forwards_of(model, params, cache, fed):
    loop = forward_loop(model, fed, repeats)
    tokens = jnp.zeros((batch.rows, fed), jnp.int32)
    return lambda: jax.block_until_ready(loop(params, tokens, cache))

  state: DecodeState = speculative.prefill(batch)
  plain_state = baseline.prefill(batch)
  parts = {
    "step": steps_of(speculative),
    "plain_step": steps_of(baseline),
  }
  for fed in sorted({1, nodes}):
    cache = plain_state.target_cache if fed == 1 else state.target_cache
    parts[f"target {fed}"] = forwards_of(
      pair.target, pair.params.target, cache, fed
    )
  passes = draft_passes(pair, drafter_name)
  for fed in sorted(set(passes)):
    own = drafter_name == "model"
    parts[f"draft {fed}"] = forwards_of(
      pair.draft,
      pair.params.draft if own else pair.params.target,
      state.drafter_state if own else state.target_cache,
      fed,
    )
  seconds = {
    name: total / repeats
    for name, total in alternate(parts, rounds=rounds).items()
  }
  pick = lambda kind: {
    int(name.split()[1]): s
    for name, s in seconds.items()
    if name.startswith(kind + " ")
  }
  return StepCosts(
    step=seconds["step"],
    plain_step=seconds["plain_step"],
    target=pick("target"),
    draft=pick("draft"),
    draft_passes=passes,
    plain_cache=jax.eval_shape(lambda cache: cache, plain_state.target_cache),
  )


def verify_curve(
  engine: Engine, batch: Batch, *, widths: tuple[int, ...], rounds: int
) -> dict[int, float]:
  """Median seconds of one target pass over each number of tokens.

  Widths that do not fit the batch's buffer are left out.
  """
  pair = engine.pair
  cache = engine.prefill(batch).target_cache
  room = cache.slots - int(cache.length.max())
  parts = {}
  for fed in widths:
    if fed > room:
      continue
    loop = forward_loop(pair.target, fed, 8)
    tokens = jnp.zeros((batch.rows, fed), jnp.int32)
    parts[str(fed)] = lambda loop=loop, tokens=tokens: jax.block_until_ready(
      loop(pair.params.target, tokens, cache)
    )
  return {int(fed): s / 8 for fed, s in alternate(parts, rounds=rounds).items()}
