"""Completes prompts with a decoder, compiling once per batch shape.

  engine = specjax.Engine(decoder=decoder, params=params, max_new_tokens=64)
  for completion in engine.complete(prompts): ...
  for token in engine.stream(prompts): ...

Prompt widths with the same buffer length share a compiled loop.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import penalties, random
from specjax.adaptive import ladder as ladder_lib
from specjax.adaptive.ladder import Ladder
from specjax.decode import Decoder
from specjax.runtime import compilation, sized
from specjax.runtime.completions import Completion, Token, completions
from specjax.runtime.mesh import MeshDecoder
from specjax.runtime.requests import (
  Batch,
  Settings,
  batch_of_tokens,
  input_ids_of,
)
from specjax.runtime.stopping import Stopping, Watch, fetch
from specjax.state import DecodeState, Origin, StopReason
from specjax.types import Params
from specjax.warp import make_sampling

_WARM = 2  # tokens decoded to warm up
_NO_END = 2**30  # more rounds than any buffer has room for
# Neutral truncations: if all rows have one, the program omits it.
_NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
# Neutral penalties, likewise.
_NO_PENALTIES: dict[str, Any] = {
  "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1,
  "logit_bias": (), "min_tokens": 0, "stop_token_ids": (),
}  # fmt: skip


class Learner(Protocol):
  """Trains the draft between rounds."""

  @property
  def params(self) -> Params:
    """Current parameters of both models."""

  @property
  def rounds(self) -> int:
    """Rounds until the next update, 1 or more."""

  def compile(self, state: DecodeState) -> None:
    """Called with a state of each batch shape before timing starts."""

  def begin(self, state: DecodeState) -> DecodeState:
    """Maps a batch's state right after prefill to the one to decode."""

  def learn(self, state: DecodeState, rounds: int) -> None:
    """Called after this many rounds, 1 or more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """The compiled programs of one batch shape.

  Attributes:
    prefill: prefills both models.
    loop: runs rounds; shared by prompt widths with the same buffer length.
    formats: the state's layout in memory, `Programs.formats`.
  """

  prefill: Callable[..., DecodeState]
  loop: Callable[..., DecodeState]
  formats: DecodeState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """Completes prompts with a decoder and default settings for requests.

  Attributes:
    decoder: the decoder.
    params: parameters of target and draft.
    stop_tokens: ids that end a row.
    max_new_tokens: a row's default budget, and the most a request may ask for.
    max_length: the most tokens of a text (prompt and completion); None for as
      many as the models have positions. Buffer lengths are powers of two up to
      this, so that few loops are compiled.
    temperature, top_k, top_p, min_p: the warp.
    seed: a prompt draws from `fold_in(key(seed), prompt.stream)`.
    watch: `request -> Watch | None`, which reads the tokens after every round
      and may end the row (`specjax.runtime.stopping`). None costs nothing.
    ladder: the same decoder at several draft lengths, `decoder` being the
      longest. The host switches between them by speed, so sampled texts depend
      on earlier batches and on clocks. None for one length.
    learner: trains the draft between rounds, or None. It then holds the
      parameters, and a prompt's text depends on earlier batches.
    mesh: the devices, or None for a single one.
    cache_specs: how caches are split over the mesh, see
      `compilation.compile_both`.
    programs: compiled programs, keyed by all static settings; engines may share
      them.
  """

  decoder: Decoder
  params: Params
  stop_tokens: tuple[int, ...] = ()
  max_new_tokens: int = 128
  max_length: int | None = None
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0
  watch: Callable[[Any], Watch | None] = lambda request: None
  ladder: Ladder | None = None
  learner: Learner | None = None
  mesh: Mesh | None = None
  cache_specs: tuple[P, P] | None = None
  programs: dict[tuple, Compiled] = dataclasses.field(default_factory=dict)

  def complete(
    self,
    prompts: Sequence[Sequence[int]],
    settings: Settings | Sequence[Settings] | None = None,
  ) -> list[Completion]:
    """Completes prompts of any lengths, in one batch.

    Args:
      prompts: the tokens of each, one or more.
      settings: for all prompts, or one for each; prompt i draws from
        `fold_in(key(seed), i)`.

    Returns:
      The completions, in the prompts' order.

    Raises:
      ValueError: for a prompt without tokens or with unknown ones, a wrong
        number of settings, or a setting beyond the engine's.
      TypeError: for a prompt that is text.
    """
    return self.run(self._batch_of(prompts, settings))[0]

  def stream(
    self,
    prompts: Sequence[Sequence[int]],
    settings: Settings | Sequence[Settings] | None = None,
  ) -> Iterator[Token]:
    """Like `complete`, but yields each token after the round that emits it."""
    batch = self._batch_of(prompts, settings)
    self.compile(batch)
    state = self.prefill(batch)
    sent = np.array(fetch(state.prompt_length))
    stopping = self.stopping(batch, state)
    while True:
      state = self.generate(batch, state, 1)
      if stopping:
        state = stopping.end_rows(state)
      tokens, origins, length, reason = fetch(
        (state.tokens, state.origins, state.length, state.stop_reason)
      )
      for row in range(len(prompts)):
        for place in range(sent[row], length[row]):
          yield Token(
            prompt=row,
            token_id=int(tokens[row, place]),
            origin=Origin(int(origins[row, place])),
          )
      sent = np.array(length)
      if (reason != StopReason.RUNNING).all():
        return

  def _batch_of(self, prompts, settings) -> Batch:
    return batch_of_tokens(
      prompts, settings, vocab_size=self.decoder.vocab_size,
      max_width=self._longest - self.max_new_tokens,
    )  # fmt: skip

  def compile(self, batch: Batch) -> float:
    """Compiles for a batch's shape; returns seconds taken (0 if cached)."""
    shape = self._shape(batch)
    if shape in self.programs:
      return 0.0
    reads = self.decoder.target.encode is not None
    if any(bool(input_ids_of(p)) != reads for p in batch.prompts):
      raise ValueError(
        "requests need inputs if the target is an encoder-decoder, and must "
        "have none if it is decoder-only"
      )
    start = time.perf_counter()
    init = functools.partial(
      self._mapped.init,
      buffer_length=self._buffer(batch.width),
      stop_tokens=self.stop_tokens,
    )
    args, options = self._arguments(batch, self._budgets(batch))
    args = (self.params, *args)
    loop: Callable[..., DecodeState]
    with self.on_mesh():
      # Programs of another width that share the loop.
      of_loop = lambda rows, width, *more: (rows, self._buffer(width), *more)
      same = [k for k in self.programs if of_loop(*k) == of_loop(*shape)]
      if same:
        other = self.programs[same[0]]
        loop, formats = other.loop, other.formats
        prefill = compilation.compile_prefill(init, args, options, formats)
      else:
        both = compilation.compile_both(
          self._mapped, init, args, options, in_pieces=True,
          cache_specs=self.cache_specs,
        )  # fmt: skip
        prefill, formats = both.prefill, both.formats
        if self.ladder is None:
          loop = sized.loop(
            self._mapped, self.params, both, both.loop, text=batch.width
          )
        else:
          state = prefill(*args, **options)
          loop = ladder_lib.compiled(
            self.ladder, both, self.params, state, mesh=self.mesh
          )
    self.programs[shape] = Compiled(prefill=prefill, loop=loop, formats=formats)
    if self.learner is not None:
      self.learner.compile(self.prefill(batch, budget=0))
    seconds = time.perf_counter() - start
    # Run a round, so that the first timed one starts warm (touched memory).
    # A learner and a ladder must not learn from it: rows get no budget.
    learns = self.learner is not None or self.ladder is not None
    few = 0 if learns else min(_WARM, self.max_new_tokens)
    args, options = self._arguments(batch, np.full(batch.rows, few, np.int32))
    state = prefill(self.params, *args, **options)
    jax.block_until_ready(self.generate(batch, state, 1))
    return seconds

  @property
  def _mapped(self) -> Decoder:
    """The decoder, with its rows over the mesh if there is one."""
    if self.mesh is None:
      return self.decoder
    return MeshDecoder.of(self.decoder, mesh=self.mesh)

  def _buffer(self, width: int) -> int:
    """The buffer length for prompts of a width."""
    least = width + self.max_new_tokens
    rounded = 1 << (least - 1).bit_length()
    return min(rounded, max(self._longest, least))

  @property
  def _longest(self) -> int:
    """The most tokens of a text that engine and models allow."""
    decoder = self.decoder
    limits = (
      self.max_length,
      decoder.target.max_positions,
      decoder.drafter.max_positions,
    )
    return min([x for x in limits if x is not None], default=_NO_END)

  def _arguments(self, batch: Batch, budgets: np.ndarray) -> tuple[tuple, dict]:
    """Prefill's arguments for a batch, without the parameters."""
    tokens, lengths, row_ids = batch.arrays()
    seeds = jnp.array(self._each(batch, "seed"), jnp.uint32)
    return everywhere(
      self.mesh,
      (
        (tokens, lengths, random.seeded_keys(seeds, jnp.asarray(row_ids))),
        dict(
          max_new_tokens=budgets,
          sampling=make_sampling(
            batch.rows,
            temperature=self._each(batch, "temperature"),
            **self._truncations(batch),  # the others are None: no code for them
            **self._penalties(batch),
          ),
          ignore_stop=np.array(
            [bool(r.settings.ignore_eos) for r in batch.row_requests()]
          ),
          inputs=batch.inputs(),
        ),
      ),
    )

  def on_mesh(self):
    """A context that uses the mesh, if there is one."""
    return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

  def _each(self, batch, name) -> list:
    """A setting of every row: the request's, else the engine's."""
    wanted = [getattr(row.settings, name) for row in batch.row_requests()]
    return [getattr(self, name) if x is None else x for x in wanted]

  def _truncations(self, batch) -> dict[str, list]:
    """Every row's truncations, of the kinds that any row uses."""
    rows = {name: self._each(batch, name) for name in _NEUTRAL}
    return {k: v for k, v in rows.items() if set(v) != {_NEUTRAL[k]}}

  def _penalties(self, batch) -> dict[str, list]:
    """Every row's penalties, of the kinds that any row uses."""
    rows = {
      name: [
        none if (value := getattr(request.settings, name)) is None else value
        for request in batch.row_requests()
      ]
      for name, none in _NO_PENALTIES.items()
    }
    return {k: v for k, v in rows.items() if set(v) != {_NO_PENALTIES[k]}}

  def _budgets(self, batch) -> np.ndarray:
    """`i32[rows]`; ValueError if one is larger than the engine's."""
    budgets = np.array(self._each(batch, "max_new_tokens"), np.int32)
    if budgets.min() < 0 or budgets.max() > self.max_new_tokens:
      raise ValueError(
        f"requests ask for {budgets.min()} to {budgets.max()} new tokens, the "
        f"engine has max_new_tokens={self.max_new_tokens}"
      )
    budgets[len(batch.prompts) :] = 0  # spare rows are done at once
    return budgets

  def _shape(self, batch):
    """The static settings of a batch's programs, its key in `programs`."""
    sizes = (batch.rows, batch.width, batch.input_width)
    ends = (tuple(self.stop_tokens), self.max_new_tokens, self._longest)
    shape = (*sizes, self.decoder, *ends, *self._truncations(batch))
    if some := self._penalties(batch):
      lists = (
        map(dict, some.get("logit_bias", ())),
        some.get("stop_token_ids", ()),
      )
      most = (max(map(len, rows), default=0) for rows in lists)
      shape += ("penalties", *map(penalties.width, most))
    return shape

  def prefill(self, batch: Batch, budget: int | None = None) -> DecodeState:
    """The state before the first step; `budget` replaces max_new_tokens."""
    budgets = self._budgets(batch)
    if budget is not None:
      budgets = np.minimum(budgets, budget)
    prefill = self.programs[self._shape(batch)].prefill
    args, options = self._arguments(batch, budgets)
    if self.learner is None:
      return prefill(self.params, *args, **options)
    state = prefill(self.learner.params, *args, **options)
    return self.learner.begin(state) if budget is None else state

  def generate(
    self, batch: Batch, state: DecodeState, num_rounds: int = _NO_END
  ) -> DecodeState:
    """Decodes a batch to its end, or `num_rounds` rounds; donates the state."""
    loop = self.programs[self._shape(batch)].loop
    if self.ladder is not None:
      loop = functools.partial(loop, ladder=self.ladder)
    if self.learner is None:
      return loop(
        self.params, state, everywhere(self.mesh, np.int32(num_rounds))
      )
    while True:
      some, before = min(num_rounds, self.learner.rounds), int(state.num_steps)
      state = loop(
        self.learner.params, state, everywhere(self.mesh, np.int32(some))
      )
      made = int(state.num_steps) - before
      if made:  # not when warming up
        self.learner.learn(state, made)
      num_rounds -= made
      if made < some or not num_rounds:
        return state

  def run(self, batch: Batch) -> tuple[list[Completion], float]:
    """Decodes a batch; also returns the seconds taken, without compilation."""
    self.compile(batch)
    start = time.perf_counter()
    state = self.prefill(batch)
    if stopping := self.stopping(batch, state):
      while not stopping.done:
        state = stopping.end_rows(self.generate(batch, state, 1))
    else:
      state = self.generate(batch, state)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    return completions(state, len(batch.prompts)), seconds

  def stopping(self, batch: Batch, state: DecodeState) -> Stopping | None:
    """The watches of a batch's rows, or None if there are none."""
    watches = [self.watch(request) for request in batch.prompts]
    return Stopping(watches, state) if any(watches) else None


def everywhere(mesh: Mesh | None, arguments: Any) -> Any:
  """Replicates arguments on all devices of the mesh, if there is one."""
  if mesh is None:
    return arguments
  whole = NamedSharding(mesh, P())

  def put(x):  # each process fills its own devices: nothing is sent
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jax.random.wrap_key_data(put(jax.random.key_data(x)))
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, whole, lambda i: x[i])

  return jax.tree.map(put, arguments)
