"""Slots: rows of one running state, refilled with new prompts as they finish.

There is a program for the rounds of each draft depth and number of rows, and a
prefill program for each width; on GPUs also for each number of cache slots
(`specjax.runtime.sized`). Some are compiled before the first request
(`compile`), the others alongside requests (`compile_rest`): until then, rows
draft deeper, prompts are prefilled in other pieces, and passes compute all rows
and read all slots.

While rows decode, an iteration runs one round and prefills as much as
`Control.shares` allows: no row waits for another's whole prompt, unless that
prompt is scored. A prefix shared with another row's text is copied, not
prefilled (`prefixes`).
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from launch.serving import programs
from launch.serving.control import MAX_TOP, Control, CostModel, Report, Request
from launch.serving.prefixes import Texts
from specjax import random
from specjax.decode import Decoder
from specjax.runtime import compilation, sized
from specjax.runtime.engine import everywhere
from specjax.runtime.mesh import MeshDecoder
from specjax.state import StopReason
from specjax.types import Params

_SMALLEST = 8  # smallest width that prompts are padded to
_FIRST = 32  # largest width compiled before the first request
_WIDEST = 256  # tokens prefilled at once
_COUNTS = (1, 2, 4, 8)  # rows of a program

_EMPTY = Request(
  token_ids=(0,), seed=0, max_new_tokens=0, temperature=1.0, ignore_stop=True
)
_NO_LOG = lambda text: None


def widths_to(longest: int) -> tuple[int, ...]:
  """Widths of prefill programs for prompts up to `longest`: powers of two."""
  longest = min(longest, _WIDEST)
  widths, width = {longest}, _SMALLEST
  while width < longest:
    widths.add(width)
    width *= 2
  return tuple(sorted(widths))


class Slots:
  """Fixed rows on the device. Use from one thread, except `compile_rest`.

  Attributes:
    num_slots: B.
    widths: widths of prefill programs, ascending.
    longest: maximum tokens of a prompt.
    max_length: maximum tokens of prompt and completion.
    depth: G, the maximum draft length.
    depths: all draft lengths, ascending.
    max_rounds: maximum rounds of one iteration.
    scores: whether prompts can be scored (`Request.scored`); not on a mesh.
    texts: the texts in the rows' caches.
  """

  def __init__(
    self,
    decoders: Mapping[int, Decoder],
    params: Params,
    *,
    num_slots: int,
    widths: Sequence[int],
    longest: int,
    max_length: int,
    stop_tokens: Sequence[int],
    max_rounds: int = 8,
    share_prefixes: bool = True,
    by_running: bool = False,
    mesh: Mesh | None = None,
    cache_specs: tuple[P, P] | None = None,
  ):
    """Compiles nothing yet; for the other arguments see the attributes.

    Args:
      decoders: by draft length, with the same target and kind of drafter; the
        deepest makes the state.
      params: parameters of all decoders.
      stop_tokens: ids that end a row.
      share_prefixes: whether a prompt may reuse another row's prefix.
      by_running: whether a round computes only as many rows as decode, rounded
        up to a power of two, or all if that exceeds eight. Not with a mesh.
      mesh: the devices; None for one device without a mesh.
      cache_specs: specs of caches, see `compilation.compile_both`.
    """
    self.num_slots, self.widths = num_slots, tuple(widths)
    self.longest = longest
    self.max_length, self.max_rounds = max_length, max_rounds
    self.depths = tuple(sorted(decoders))
    self.depth = self.depths[-1]
    full = decoders[self.depth]
    recorded = dict(
      with_log_probs=True, num_likeliest=min(MAX_TOP, full.vocab_size)
    )
    self._decoders = {
      depth: replace(one, **recorded)
      if mesh is None
      else MeshDecoder.of(replace(one, **recorded), mesh=mesh)
      for depth, one in decoders.items()
    }
    self._params, self._stop_tokens = params, tuple(stop_tokens)
    self._mesh, self._cache_specs = mesh, cache_specs
    self._window = max_rounds * (self.depth + 1)
    fewer = [rows for rows in _COUNTS if by_running and rows < num_slots]
    self._counts = [num_slots, *fewer]  # rows of programs
    self.texts = Texts(
      num_slots, max_length, 1 if mesh is None else mesh.shape["data"],
      share=share_prefixes,
      only_whole=full.target.has_states or full.drafter.has_states,
    )  # fmt: skip
    self.scores = mesh is None
    self._score = programs.Scorer(
      full.target, params, vocab_size=full.vocab_size, longest=longest,
      width=widths[-1],
    )  # fmt: skip
    # Rows whose prompts are being prefilled, in order of arrival.
    self._queue: dict[int, Request] = {}
    self._running = np.zeros(num_slots, bool)
    # Rows that need top log-probabilities once they decode.
    self._wanted = np.zeros(num_slots, bool)
    # Compiled programs, by depth and rows or by width, and by slots that they
    # read.
    self._rounds: dict[tuple[int, int], dict[int | None, Any]] = {}
    self._admit: dict[int, dict[int | None, Any]] = {}
    self._state: Any = None
    self._compiled: Any = None  # what later programs need
    self._fed = num_slots * full.drafter.tree.num_fed
    self._first_round = 1.0

  # -------------------------------------------------------------- compilation

  def compile(self, log: Callable[[str], None] = _NO_LOG) -> None:
    """Compiles the programs for the first request, and runs them once."""
    decoder, rows = self._decoders[self.depth], range(self.num_slots)
    init = functools.partial(
      decoder.init, buffer_length=self.max_length, stop_tokens=self._stop_tokens
    )
    log(f"rounds of {self.num_slots} slots, drafts of {self.depth}")
    empty, options = self._empty_rows()
    with self._on_mesh():
      self._compiled = compilation.compile_both(
        decoder,
        init,
        (self._params, *empty),
        options,
        cache_specs=self._cache_specs,
        loop=functools.partial(programs.rounds, decoder, self._window),
        more=self._orders(),
      )
    self._rounds[self.depth, self.num_slots] = {None: self._compiled.loop}
    self._state = self._compiled.prefill(self._params, *empty, **options)
    first = max((w for w in self.widths if w <= _FIRST), default=self.widths[0])
    self._compile_width(first, log)
    busy = replace(_EMPTY, max_new_tokens=self.max_length - 1)
    all_rows = [(row, busy) for row in rows]
    self.iterate(Control(admissions=all_rows, depth=self.depth, rounds=1))
    report = self.iterate(Control(depth=self.depth, rounds=1))
    self._first_round = report.seconds
    self.iterate(Control(ended=rows, depth=self.depth, rounds=0))
    self.texts.forget(rows)

  def compile_rest(
    self,
    log: Callable[[str], None] = _NO_LOG,
    stop: threading.Event | None = None,
  ) -> None:
    """Compiles all other programs except for scoring; from any thread."""
    keys = [(depth, rows) for rows in self._counts for depth in self.depths]
    for slots in self._slot_counts():
      jobs: list[tuple[Any, dict, Any]] = [
        *((self._compile_width, self._admit, width) for width in self.widths),
        *((self._compile_rounds, self._rounds, key) for key in keys),
      ]
      for job, made, one in jobs:
        if stop is not None and stop.is_set():
          return
        if slots not in made.get(one, ()):
          job(one, log, slots)

  def _slot_counts(self) -> list[int | None]:
    """Numbers of slots that programs read; None means all."""
    if not sized.reads_fixed_slots(self._params):
      return [None]
    texts = (1 << i for i in range(self.max_length.bit_length()))
    return [*dict.fromkeys([None, *map(self._slots_for, texts)])]

  def _slots_for(self, text: int) -> int | None:
    full = self._decoders[self.depth]
    return full.slots_for(self._compiled.state, text)

  def _compile_width(self, width: int, log, slots: int | None = None) -> None:
    log(f"prompts of up to {width} tokens")
    make = functools.partial(programs.admit, self._decoders[self.depth])
    more = (self._values(width),)
    self._compile(self._admit, width, make, more, slots, reports=False)

  def _compile_rounds(
    self, key: tuple[int, int], log, slots: int | None = None
  ) -> None:
    depth, rows = key
    log(f"rounds of {rows} slots, drafts of {depth}")
    make = functools.partial(
      programs.rounds, self._decoders[depth], self._window
    )
    more = (*self._orders(), *self._rows_for(rows))
    self._compile(self._rounds, key, make, more, slots, reports=True)

  def _compile(self, made: dict, key, make, more, slots, *, reports: bool):
    with self._on_mesh():
      program = compilation.compile_loop(
        functools.partial(make, slots=slots), self._params,
        self._compiled.state, self._compiled.formats, more, reports=reports,
      )  # fmt: skip
    made[key] = {**made.get(key, {}), slots: program}  # atomic for readers

  def _smallest(self, made: dict[int | None, Any], text: int) -> Any:
    """The program that reads the fewest slots sufficient for a text."""
    if len(made) == 1:
      return made[None]
    return made[sized.smallest(made, self._slots_for(text))]

  def _on_mesh(self):
    return jax.set_mesh(self._mesh) if self._mesh else contextlib.nullcontext()

  def cost_model(self, **more) -> CostModel:
    """The initial estimates of durations, after `compile`."""
    usual = dict(fed=self._fed, seconds=self._first_round)
    return CostModel(widths=self.widths, depths=self.depths, **usual | more)

  # ------------------------------------------------------------- an iteration

  def iterate(self, control: Control) -> Report:
    """Runs an iteration and returns its results."""
    for row in control.ended:
      self._begin(row, None)
    scores = {}
    for row, request in control.admissions:
      if request.scored:
        scores[row] = self._score(request.token_ids)
      self._begin(row, request)
    over = [row for row in scores if row not in self._queue]
    start = time.perf_counter()
    widths: list[int] = []
    if not self._running.any():  # no row waits for its next tokens
      most = self.widths[-1] * max(1, len(control.admissions))
      widths = self._prefill({width: width / most for width in self.widths})
    elif control.shares:
      widths = self._prefill(control.shares)
    idle = np.isin(np.arange(self.num_slots), [*self._queue, *over])
    depth = min(d for d, _ in list(self._rounds) if d >= control.depth)
    # A row without prefill so far may still be running an ended text.
    arrays = self._decode(
      depth,
      ended=[*control.ended, *np.flatnonzero(idle)],
      rounds=min(control.rounds, 1) if self._queue else control.rounds,
    )
    arrays["rounds"] = int(arrays["rounds"])
    running = arrays["reason"] == StopReason.RUNNING
    for name in ("num_drafts", "num_drafted", "accept_counts"):
      arrays[name][idle] = 0  # left by the row's previous request
    arrays["reason"][idle] = StopReason.RUNNING
    for row in over:
      broken = np.isnan(scores[row].log_probs).any()
      arrays["reason"][row] = (
        StopReason.NAN_LOGITS if broken else StopReason.LENGTH
      )
    report = Report(
      **arrays,
      cached=self.texts.cached.copy(),
      scores=scores,
      widths=widths,
      depth=depth,
      seconds=time.perf_counter() - start,
    )
    self.texts.extend(report, self._running)
    self._running = running
    return report

  def _begin(self, row: int, request: Request | None) -> None:
    """Queues a row's prompt for prefill, or removes it."""
    self._queue.pop(row, None)
    self._running[row] = False
    if request is not None:
      self._wanted[row] = request.num_likeliest > 0
      self.texts.begin(row)
      if request.max_new_tokens:
        self._queue[row] = request

  def _prefill(self, shares: Mapping[int, float]) -> list[int]:
    """Prefills prompts in order, by passes within the budget, at least one.

    Returns the widths of the passes.
    """
    widths = sorted(self._admit)
    share = lambda width: shares.get(width, 2.0)
    spent, made = 0.0, []
    while self._queue:
      fits = [width for width in widths if spent + share(width) <= 1]
      if made and not fits:
        break
      made.append(self._prefill_next(max(fits, default=widths[0])))
      spent += share(made[-1])
    return made

  def _prefill_next(self, most: int) -> int:
    """Prefills up to `most` tokens of the first prompt; returns the width."""
    row, request = next(iter(self._queue.items()))
    source, keep = self.texts.source(row, request)
    new = request.token_ids[keep : keep + most]
    is_last = keep + len(new) == len(request.token_ids)
    width = min(w for w in list(self._admit) if w >= len(new))
    admit = self._smallest(self._admit[width], keep + len(new))
    self._state = admit(
      self._params,
      self._state,
      self._values(
        width, request, row=row, source=source, keep=keep, new=new,
        budget=request.max_new_tokens if is_last else 0,
      ),
    )  # fmt: skip
    self.texts.record(row, request, keep + len(new))
    if is_last:
      del self._queue[row]
      self._running[row] = True
    return width

  def _decode(self, depth: int, **orders) -> dict[str, Any]:
    longest, count = self.texts.longest(self._running), self._running.sum()
    made = [rows for d, rows in list(self._rounds) if d == depth]
    rows = min(rows for rows in made if rows >= count)
    self._state, arrays = self._smallest(self._rounds[depth, rows], longest)(
      self._params, self._state, *self._orders(**orders), *self._rows_for(rows)
    )
    if not (self._wanted & self._running).any():
      arrays["likeliest"] = None  # not copied to the host
    return jax.tree.map(np.array, jax.device_get(arrays))

  # ------------------------------------------------- arguments of the programs

  def _empty_rows(self):
    """Rows with one token that end at once."""
    ones = np.ones(self.num_slots, np.int32)
    seeds = jnp.zeros(self.num_slots, jnp.uint32)
    args = (ones[:, None] * 0, ones, random.seeded_keys(seeds, seeds))
    sampling = programs.sampling([_EMPTY] * self.num_slots)
    options = dict(max_new_tokens=ones * 0, sampling=sampling)
    return everywhere(self._mesh, (args, options))

  def _orders(self, ended: Sequence[int] = (), rounds: int = 0):
    rows = np.isin(np.arange(self.num_slots), [*ended])
    most = np.int32(min(rounds, self.max_rounds))
    return everywhere(self._mesh, (rows, most, self._wanted.copy()))

  def _rows_for(self, rows: int) -> tuple[np.ndarray, ...]:
    """Running rows, and others up to `rows`; nothing for all."""
    if rows == self.num_slots:
      return ()
    return (np.argsort(~self._running, kind="stable")[:rows].astype(np.int32),)

  def _values(
    self, width: int, request: Request = _EMPTY, *, row=0, source=0, keep=0,
    new=(0,), budget=0,
  ):  # fmt: skip
    tokens = np.zeros(width, np.int32)
    tokens[: len(new)] = new
    values = {
      "row": np.int32(row),
      "source": np.int32(source),
      "keep": np.int32(keep),
      "tokens": tokens,
      "length": np.int32(len(new)),
      "seed": np.array([request.seed], np.uint32),
      "stream": np.array([request.stream], np.uint32),
      "budget": np.int32(budget),
      "ignore_stop": np.bool_(request.ignore_stop),
      "sampling": programs.sampling([request]),
    }
    return everywhere(self._mesh, values)
