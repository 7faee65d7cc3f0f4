"""Runs batches of prompts through a decoder, compiled once per shape."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import compilation, drawing, metrics
from specjax.decode import Decoder
from specjax.mesh import MeshDecoder
from specjax.types import DecodeState, Params, StopReason
from specjax.warp import make_sampling

_MIN_WIDTH = 32
_NO_END = 2**30  # more rounds than any buffer has room for


class Request(Protocol):
  """What is asked of an engine: a prompt of one or more tokens.

  Its draws come from `fold_in(key(seed), stream)`, a `u32`, whatever is decoded
  beside it.
  """

  @property
  def token_ids(self) -> Sequence[int]:
    """Tokens of the prompt."""

  @property
  def stream(self) -> int:
    """What its draws are told apart by."""


@dataclasses.dataclass(frozen=True)
class Batch:
  """Prompts decoded together, padded to a shape that others share.

  Attributes:
    prompts: the real ones.
    rows: rows of the batch, `len(prompts)` or more.
    width: P, the padded prompt length.
  """

  prompts: tuple[Request, ...]
  rows: int
  width: int

  def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens `i32[rows, width]`, lengths `i32[rows]`, streams `u32[rows]`.

    Rows beyond the prompts are filled with the first prompt.
    """
    tokens = np.zeros((self.rows, self.width), np.int32)
    filled = [*self.prompts]
    filled += [self.prompts[0]] * (self.rows - len(filled))
    for row, prompt in enumerate(filled):
      tokens[row, : len(prompt.token_ids)] = prompt.token_ids
    lengths = np.array([len(p.token_ids) for p in filled], np.int32)
    return tokens, lengths, np.array([p.stream for p in filled], np.uint32)


def make_batches(
  prompts: Sequence[Request],
  *,
  batch_size: int,
  max_width: int,
  among: int | None = None,
) -> list[Batch]:
  """Groups prompts of similar length; widths are powers of two.

  Args:
    prompts: those to decode, in the order of the file.
    batch_size: rows of a batch; fewer if there are not as many prompts.
    max_width: longest prompt the buffer holds.
    among: all prompts of the run, if some are decoded already: it has as many
      rows, and, if whole batches are, the same batches, as if none were.

  Returns:
    The batches, short prompts first; every one has the same number of rows.
  """
  rows = min(batch_size, among or len(prompts))
  ordered = sorted(prompts, key=lambda p: len(p.token_ids))
  batches = []
  for start in range(0, len(ordered), rows):
    group = tuple(ordered[start : start + rows])
    width = max(_MIN_WIDTH, len(group[-1].token_ids))
    width = min(1 << (width - 1).bit_length(), max_width)
    batches.append(Batch(group, rows, width))
  return batches


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
    decoder: what decodes.
    params: its parameters.
    stop_tokens: ids that end a row.
    max_new_tokens: budget of every row.
    temperature, top_k, top_p, min_p: the warp.
    seed: a prompt draws from `fold_in(key(seed), prompt.stream)`.
    mesh: the devices, or None for one without a mesh.
    cache_specs: how caches lie on it, see `compilation.compile_both`.
    programs: compiled prefill and loop of each `(rows, width)`.
  """

  decoder: Decoder
  params: Params
  stop_tokens: tuple[int, ...]
  max_new_tokens: int
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  seed: int
  mesh: Mesh | None = None
  cache_specs: tuple[P, P] | None = None
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
      stop_tokens=self.stop_tokens,
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
    args = (self.params, *args)
    with self.on_mesh():
      both = compilation.compile_both(
        self.mapped,
        init,
        args,
        options,
        in_pieces=True,
        cache_specs=self.cache_specs,
      )
    self.programs[shape] = (both.prefill, both.loop)
    seconds = time.perf_counter() - start
    # One run with no budget, so that the first timed one starts warm.
    jax.block_until_ready(self.generate(batch, self.prefill(batch, budget=0)))
    return seconds

  @property
  def mapped(self) -> Decoder | MeshDecoder:
    """What runs: the decoder, its rows over the mesh if there is one."""
    if self.mesh is None:
      return self.decoder
    return MeshDecoder(decoder=self.decoder, mesh=self.mesh)

  def on_mesh(self):
    """A context in which the models are laid out on the mesh, if any."""
    return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

  def _put(self, arguments):
    """Arguments on all devices of the mesh, if there is one."""
    if self.mesh is None:
      return arguments
    whole = NamedSharding(self.mesh, P())

    def put(x):  # of other processes' devices too, to which nothing is sent
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(x)))
      x = np.asarray(x)
      return jax.make_array_from_callback(x.shape, whole, lambda i: x[i])

    return jax.tree.map(put, arguments)

  def _keys(self, row_ids):
    return drawing.row_keys(jax.random.key(self.seed), row_ids)

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
    return prefill(self.params, *args, **options)

  def generate(
    self, batch: Batch, state: DecodeState, num_rounds: int = _NO_END
  ) -> DecodeState:
    """Decodes a batch to its end, or so many rounds; the state is donated."""
    _, loop = self.programs[batch.rows, batch.width]
    return loop(self.params, state, self._put(np.int32(num_rounds)))

  def run(self, batch: Batch) -> tuple[list[Completion], float]:
    """Decodes a batch; also the seconds it took, compilation excluded."""
    self.compile(batch)
    start = time.perf_counter()
    state = jax.block_until_ready(self.generate(batch, self.prefill(batch)))
    seconds = time.perf_counter() - start
    return completions(state, len(batch.prompts)), seconds


def completions(state: DecodeState, count: int) -> list[Completion]:
  """Reads the first `count` rows of a final state."""
  small: dict[str, Any] = dict(target_cache=None, drafter_state=None, keys=None)
  state = dataclasses.replace(state, **small)
  where: Any = state.tokens.sharding
  if not state.tokens.is_fully_addressable:  # rows of other processes
    whole = NamedSharding(where.mesh, P())
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
