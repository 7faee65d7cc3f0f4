"""Runs batches of prompts through a decoder, compiled once per shape."""

import contextlib
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.decoding import programs as programs_lib
from launch.decoding.pair import Pair
from launch.decoding.prompts import Batch
from specjax import metrics
from specjax import sampling as sampling_lib
from specjax.decode import Decoder
from specjax.mesh import MeshDecoder
from specjax.types import DecodeState, StopReason
from specjax.warp import make_sampling

_NO_END = 2**30  # more rounds than any buffer has room for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """What one prompt became.

  Attributes:
    token_ids: emitted tokens, a stop token included.
    origins: an `Origin` for each.
    stop_reason: "stop_token", "length" or "nan_logits".
    num_target_calls, num_drafted, num_accepted, expected_accepted,
      total_variation, accept_counts: see `specjax.types.Counters`.
  """

  token_ids: list[int]
  origins: list[int]
  stop_reason: str
  num_target_calls: int
  num_drafted: int
  num_accepted: int
  expected_accepted: float
  total_variation: float
  accept_counts: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """One decoder with fixed settings.

  Attributes:
    pair: what to decode with.
    decoder: `pair.decoder` or `pair.baseline`.
    max_new_tokens: budget of every row.
    temperature, top_k, top_p, min_p: the warp.
    seed: a prompt draws from `fold_in(key(seed), prompt.stream)`.
    programs: compiled prefill and loop of each `(rows, width)`.
  """

  pair: Pair
  decoder: Decoder
  max_new_tokens: int
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  seed: int
  programs: dict = dataclasses.field(default_factory=dict)

  def compile(self, batch: Batch) -> float:
    """Compiles for a batch's shape; seconds it took (0 if done before)."""
    shape = (batch.rows, batch.width)
    if shape in self.programs:
      return 0.0
    start = time.perf_counter()
    init = functools.partial(
      self.mapped.init,
      buffer_length=batch.width + self.max_new_tokens,
      stop_tokens=self.pair.stop_tokens,
    )
    tokens, lengths, row_ids = batch.arrays()
    args, options = self._put(
      (
        (tokens, lengths, self._keys(row_ids)),
        dict(
          max_new_tokens=np.zeros(batch.rows, np.int32),
          sampling=self._sampling(batch.rows),
        ),
      )
    )
    args = (self.pair.params, *args)
    with self.on_mesh():
      both = programs_lib.compile_both(
        self.mapped, init, self.pair.layout, args, options, in_pieces=True
      )
    self.programs[shape] = (both.prefill, both.loop)
    seconds = time.perf_counter() - start
    # One run with no budget, so that the first timed one starts warm.
    jax.block_until_ready(self.generate(batch, self.prefill(batch, budget=0)))
    return seconds

  @property
  def mapped(self) -> Decoder | MeshDecoder:
    """What runs: the decoder, its rows over the mesh if there is one."""
    if self.pair.mesh is None:
      return self.decoder
    return MeshDecoder(decoder=self.decoder, mesh=self.pair.mesh)

  def on_mesh(self):
    """A context in which the pair's models are laid out on its mesh."""
    return (
      jax.set_mesh(self.pair.mesh)
      if self.pair.mesh
      else contextlib.nullcontext()
    )

  def _put(self, arguments):
    """Arguments on all devices of the mesh, if there is one."""
    if self.pair.mesh is None:
      return arguments
    whole = NamedSharding(self.pair.mesh, P())

    def put(x):  # of other processes' devices too, to which nothing is sent
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(x)))
      x = np.asarray(x)
      return jax.make_array_from_callback(x.shape, whole, lambda i: x[i])

    return jax.tree.map(put, arguments)

  def _keys(self, row_ids):
    return sampling_lib.row_keys(jax.random.key(self.seed), row_ids)

  def _sampling(self, rows):
    return make_sampling(
      rows,
      temperature=self.temperature,
      # None where nothing is truncated: a smaller program.
      top_k=self.top_k or None,
      top_p=self.top_p if self.top_p < 1 else None,
      min_p=self.min_p or None,
    )

  def prefill(self, batch: Batch, budget: int | None = None) -> DecodeState:
    """The state before the first step; `budget` replaces max_new_tokens."""
    tokens, lengths, row_ids = batch.arrays()
    budgets = np.full(batch.rows, self.max_new_tokens, np.int32)
    if budget is not None:
      budgets[:] = budget
    budgets[len(batch.prompts) :] = 0  # filling rows are done at once
    prefill, _ = self.programs[batch.rows, batch.width]
    args, options = self._put(
      (
        (tokens, lengths, self._keys(row_ids)),
        dict(max_new_tokens=budgets, sampling=self._sampling(batch.rows)),
      )
    )
    return prefill(self.pair.params, *args, **options)

  def generate(
    self, batch: Batch, state: DecodeState, num_rounds: int = _NO_END
  ) -> DecodeState:
    """Decodes a batch to its end, or so many rounds; the state is donated."""
    _, loop = self.programs[batch.rows, batch.width]
    return loop(self.pair.params, state, self._put(np.int32(num_rounds)))

  def run(self, batch: Batch) -> tuple[list[Completion], float]:
    """Decodes a batch; also the seconds it took, compilation excluded."""
    self.compile(batch)
    start = time.perf_counter()
    state = jax.block_until_ready(self.generate(batch, self.prefill(batch)))
    seconds = time.perf_counter() - start
    return completions(state, len(batch.prompts)), seconds


def completions(state: DecodeState, count: int) -> list[Completion]:
  """Reads the first `count` rows of a final state."""
  state = dataclasses.replace(
    state, target_cache=None, drafter_state=None, keys=None
  )
  if not state.tokens.is_fully_addressable:  # rows of other processes
    whole = NamedSharding(state.tokens.sharding.mesh, P())
    state = jax.jit(lambda s: s, out_shardings=whole)(state)
  state = jax.device_get(state)
  c = state.counters
  done = []
  for row in range(count):
    part = slice(int(state.prompt_length[row]), int(state.length[row]))
    done.append(
      Completion(
        token_ids=state.tokens[row, part].tolist(),
        origins=state.origins[row, part].tolist(),
        stop_reason=StopReason(int(state.stop_reason[row])).name.lower(),
        num_target_calls=int(c.num_target_calls[row]),
        num_drafted=int(c.num_drafted[row]),
        num_accepted=int(c.num_accepted[row]),
        expected_accepted=float(c.expected_accepted[row]),
        total_variation=float(c.total_variation[row]),
        accept_counts=c.accept_counts[row].tolist(),
      )
    )
  return done


def unit_of(
  completions: list[Completion],
  seconds: float,
  baseline: tuple[list[Completion], float] | None,
) -> metrics.Unit:
  """The measured unit of a batch."""
  total = lambda name: sum(getattr(c, name) for c in completions)
  return metrics.Unit(
    num_tokens=sum(len(c.token_ids) for c in completions),
    num_target_calls=total("num_target_calls"),
    num_drafted=total("num_drafted"),
    num_accepted=total("num_accepted"),
    expected_accepted=total("expected_accepted"),
    total_variation=total("total_variation"),
    seconds=seconds,
    baseline_num_tokens=baseline and sum(len(c.token_ids) for c in baseline[0]),
    baseline_num_target_calls=baseline
    and sum(c.num_target_calls for c in baseline[0]),
    baseline_seconds=baseline and baseline[1],
  )


def from_config(config, pair: Pair, *, baseline: bool = False) -> Engine:
  """The engine of a config: speculative, or plain autoregressive."""
  return Engine(
    pair=pair,
    decoder=pair.baseline if baseline else pair.decoder,
    max_new_tokens=config.max_new_tokens,
    temperature=config.temperature,
    top_k=config.top_k,
    top_p=config.top_p,
    min_p=config.min_p,
    seed=config.seed,
  )
