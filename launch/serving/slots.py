"""Slots: rows of one running state that get new prompts as they end.

All programs are compiled before the first request: one that begins, one that
reads for each width, one that makes rounds for each depth. They are called with
arrays of those shapes alone, so that nothing is compiled later.

A prompt that is wider than the widest program is read in chunks. Where other
rows decode, an iteration makes one round, and reads as much of prompts beside
it as keeps it within a bound, by passes that are timed at the start: no row
waits for a whole prompt of another's.
The common prefix with another row's text is copied and not read (`prefixes`).
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch import processes
from launch.serving import programs
from launch.serving.control import (
  MOST_LIKELIEST,
  Asked,
  Control,
  Report,
  Scores,
)
from launch.serving.prefixes import Texts
from launch.serving.scoring import Scorer
from specjax import random
from specjax.decode import Decoder
from specjax.runtime import compilation
from specjax.runtime.engine import everywhere
from specjax.runtime.mesh import MeshDecoder
from specjax.state import StopReason
from specjax.types import Params

_SMALLEST = 8  # of the widths that prompts are padded to
_WIDEST = 256  # read at once where no row decodes


def _agreed(seconds: Sequence[float]) -> float:
  """The chief's shortest of some times, on all processes.

  All decide by it alike: one that timed a width more would wait in it for the
  others.
  """
  return processes.gather(min(seconds))[0]


def widths_to(longest: int) -> tuple[int, ...]:
  """Widths of programs that read: powers of two, up to 256 or the longest.

  Args:
    longest: tokens of the longest prompt.
  """
  longest = min(longest, _WIDEST)
  widths, width = {longest}, _SMALLEST
  while width < longest:
    widths.add(width)
    width *= 2
  return tuple(sorted(widths))


class Slots:
  """Fixed rows on the device. One thread calls it.

  Attributes:
    num_slots: B.
    widths: of programs that read, ascending.
    longest: tokens of the longest prompt.
    gap: the longest iteration in which rows decode and prompts are read, in
      rounds of all rows. The narrowest program reads in any case.
    max_length: tokens that prompt and completion may have together.
    depth: G, of the deepest draft.
    depths: those that there are programs of, ascending.
    max_rounds: of one iteration.
    scores: whether prompts can be scored (`Asked.scored`).
    seconds_of_round: what a round takes at each of the depths, with all rows
      at work (`measure`).
    seconds_of_pass: by how much reading at each of the widths, to the end of
      the longest prompt, makes an iteration longer, and by 0 how long one of
      one round is. What is not there is never within `gap`.
  """

  def __init__(
    self,
    decoders: Mapping[int, Decoder],
    params: Params,
    *,
    num_slots: int,
    widths: Sequence[int],
    longest: int | None = None,
    gap: float = 2.5,
    max_length: int,
    stop_tokens: Sequence[int],
    max_rounds: int = 8,
    share_prefixes: bool = True,
    mesh: Mesh | None = None,
    cache_specs: tuple[P, P] | None = None,
    scores: bool = False,
  ):
    """Compiles nothing yet.

    Args:
      decoders: by the depth of their drafts, all of one target and one way to
        draft; the deepest makes the state.
      params: of them all.
      num_slots: B.
      widths: see `widths_to`.
      longest: see above; None for the last of the widths.
      gap: see above; infinite if no row minds.
      max_length: see above.
      stop_tokens: ids that end a row.
      max_rounds: of one iteration.
      share_prefixes: whether a prompt may begin as another row's text.
      mesh: the devices, or None for one without a mesh.
      cache_specs: how caches lie on it, see `compilation.compile_both`.
      scores: whether prompts are to be scored; not on a mesh.

    Raises:
      ValueError: for sizes that do not fit each other.
    """
    if num_slots < 1 or max_rounds < 1:
      raise ValueError(
        f"slots and rounds must be >= 1, got {num_slots} and {max_rounds}"
      )
    longest = widths[-1] if longest is None else longest
    if longest >= max_length:
      raise ValueError(
        f"a prompt of {longest} tokens leaves no room for a completion: "
        f"both share {max_length} positions"
      )
    if not gap >= 1:
      raise ValueError(f"gap must be >= 1, got {gap}")
    self.num_slots, self.widths = num_slots, tuple(widths)
    self.longest = longest
    self.gap = gap
    self.max_length, self.max_rounds = max_length, max_rounds
    self.depths = tuple(sorted(decoders))
    self.depth = self.depths[-1]
    self.seconds_of_round: dict[int, float] = {}
    self.seconds_of_pass: dict[int, float] = {}
    self._decoders = {
      depth: dataclasses.replace(
        one,
        with_log_probs=True,
        num_likeliest=min(MOST_LIKELIEST, one.vocab_size),
      )
      for depth, one in decoders.items()
    }
    self._params, self._stop_tokens = params, tuple(stop_tokens)
    self._mesh, self._cache_specs = mesh, cache_specs
    self._window = max_rounds * (self.depth + 1)
    self._admit: dict[int, Any] = {}
    # Rows whose prompts are being read, who came first first.
    self._reading: dict[int, Asked] = {}
    groups = 1 if mesh is None else mesh.shape["data"]
    deepest = decoders[self.depth]
    kept_whole = deepest.target.has_states or deepest.drafter.has_states
    self._texts = Texts(
      num_slots, max_length, groups, share=share_prefixes, whole=kept_whole
    )
    # Prompts are scored in a cache of their own, whose shapes must not change.
    self.scores = scores and mesh is None
    whole = self._decoders[self.depth]
    self._scorer = Scorer(
      whole.target,
      params,
      vocab_size=whole.vocab_size,
      longest=longest,
      widths=sorted({widths[0], widths[-1]}),
    )
    self._scores: dict[int, Scores] = {}  # that this iteration has ended
    self._running = np.zeros(num_slots, bool)
    # Rows whose likeliest tokens are wanted, once they decode.
    self._wanted = np.zeros(num_slots, bool)
    self._rounds: dict[int, Any] = {}
    self._state: Any = None

  @property
  def num_programs(self) -> int:
    """Programs that `compile` says."""
    scoring = self._scorer.widths if self.scores else ()
    return len(self.depths) + len(self.widths) + len(scoring)

  def compile(self, say: Callable[[str], None] = lambda text: None) -> None:
    """Compiles all programs, and runs them so that no request is the first.

    Args:
      say: is told what is being compiled.
    """
    decoder = self._mapped(self.depth)
    with self._on_mesh():
      say(f"rounds of {self.num_slots} slots, drafts of {self.depth}")
      first, options = self._nobody()
      both = compilation.compile_both(
        decoder,
        functools.partial(
          decoder.init,
          buffer_length=self.max_length,
          stop_tokens=self._stop_tokens,
        ),
        (self._params, *first),
        options,
        cache_specs=self._cache_specs,
        loop=functools.partial(programs.rounds, decoder, self._window),
        more=self._orders(),
      )
      self._rounds[self.depth] = both.loop
      for depth in self.depths[:-1]:
        say(f"rounds with drafts of {depth}")
        self._check_shallow(depth, both)
        self._rounds[depth] = self._compiled(
          functools.partial(
            programs.shallow_rounds, self._mapped(depth), self._window
          ),
          both,
          self._orders(),
          reports=True,
        )
      for width in self.widths:
        say(f"prompts of up to {width} tokens")
        admit = functools.partial(programs.admit, decoder)
        self._admit[width] = self._compiled(
          admit, both, self._request(width), reports=False
        )
    self._state = both.prefill(self._params, *first, **options)
    for width in self.widths:
      for keep in (0, width):  # behind no text, and behind some
        request = self._request(width, keep=keep, new=[0] * (width - keep or 1))
        self._state = self._admit[width](self._params, self._state, *request)
    for depth in self.depths:
      self._fill()
      self._make_rounds(depth, self._orders(rounds=1))
    self._empty()
    if self.scores:
      self._scorer.compile(say)

  def measure(self, rounds: int = 8, repeats: int = 3) -> None:
    """Times rounds, and passes as wide as `gap` allows; ends all rows.

    Args:
      rounds: of one measurement.
      repeats: of which the fastest counts: what else runs meanwhile only adds.
    """
    rounds = min(rounds, self.max_rounds)
    for depth in self.depths:
      seen = []
      for _ in range(repeats):
        self._fill()
        jax.block_until_ready(self._state)
        start = time.perf_counter()
        report = self._make_rounds(depth, self._orders(rounds=rounds))
        seen.append((time.perf_counter() - start) / max(report["rounds"], 1))
      self.seconds_of_round[depth] = _agreed(seen)
    self.seconds_of_pass[0] = alone = self._timed(0, repeats)
    for width in self.widths if math.isfinite(self.gap) else ():
      longer = max(self._timed(width, repeats) - alone, 0.1 * alone)
      self.seconds_of_pass[width] = longer
      if longer > (self.gap - 1) * alone:
        break
    self._empty()

  def _timed(self, width: int, repeats: int) -> float:
    """Seconds of a round behind a pass of a width, or 0 for none."""
    seen = []
    keep, new = self.longest - width, [0] * width
    request = self._request(width, keep=keep, new=new) if width else ()
    self._fill()
    for _ in range(repeats):
      start = time.perf_counter()
      if width:
        self._state = self._admit[width](self._params, self._state, *request)
      self._make_rounds(self.depth, self._orders(rounds=1))
      seen.append(time.perf_counter() - start)
    return _agreed(seen)

  def _fill(self) -> None:
    """Fills all rows with a dummy text."""
    for row in range(self.num_slots):
      asked = Asked(
        token_ids=(0,), seed=row, max_new_tokens=self.max_length - 1,
        temperature=1.0,
      )  # fmt: skip
      self._begin(row, asked)
    self._read_within(self.widths[-1] * self.num_slots, float)

  def _empty(self) -> None:
    """Ends all rows."""
    self._make_rounds(self.depth, self._orders(ended=True))
    self._running[:] = False
    self.forget()

  def place(self, free: Sequence[int], asked: Asked) -> int:
    """The free row that a request is given, see `Texts.place`."""
    return self._texts.place(free, asked)

  def forget(self) -> None:
    """Forgets all cached texts, so that prompts are read anew."""
    self._texts.forget(range(self.num_slots))

  def iterate(self, control: Control) -> Report:
    """Runs an iteration by its orders, and reads the results."""
    start = time.perf_counter()
    for row in np.flatnonzero(control.ended):
      self._reading.pop(int(row), None)
      self._scorer.drop(int(row))
      self._running[row] = False
    for row, asked in control.admissions:
      self._begin(row, asked)
    deepest = int(control.max_depth.max(initial=0))
    depth = next(d for d in self.depths if d >= min(deepest, self.depth))
    if self._running.any():  # rows wait for their next tokens
      self._read_within(
        (self.gap - 1) * self.seconds_of_pass.get(0, 1.0),
        lambda width: self.seconds_of_pass.get(width, math.inf),
      )
    else:
      self._read_within(
        self.widths[-1] * max(1, len(control.admissions)), float
      )
    rounds = min(control.rounds, 1) if self._reading else control.rounds
    scored = {
      row: one
      for row, one in self._scores.items()
      if row not in self._reading and not self._running[row]
    }
    reading = np.isin(np.arange(self.num_slots), [*self._reading, *scored])
    # A row that has read nothing yet may still hold a text that was cut off.
    arrays = self._make_rounds(
      depth,
      self._orders(control.ended | reading, control.max_depth, rounds),
    )
    running = arrays["reason"] == StopReason.RUNNING
    for name in ("num_drafts", "num_drafted", "accept_counts"):
      arrays[name] = np.where(
        reading.reshape(-1, *[1] * (arrays[name].ndim - 1)), 0, arrays[name]
      )  # those of the request before
    arrays["reason"] = np.where(reading, StopReason.RUNNING, arrays["reason"])
    for row, one in scored.items():  # requests of no new tokens
      broken = np.isnan(one.log_probs).any()
      arrays["reason"][row] = (
        StopReason.NAN_LOGITS if broken else StopReason.LENGTH
      )
    report = Report(
      **arrays,
      cached=self._texts.cached.copy(),
      scores=self._scores,
      seconds=time.perf_counter() - start,
    )
    self._scores = {}
    self._texts.hear(report, self._running)
    self._running = running & ~reading
    return report

  def idle(self) -> Control:
    """An iteration that does nothing."""
    return Control(
      ended=np.zeros(self.num_slots, bool),
      max_depth=np.full(self.num_slots, self.depth, np.int32),
      rounds=0,
    )

  def _begin(self, row: int, asked: Asked) -> None:
    """Gives a row a prompt, of which it has read nothing."""
    self._reading.pop(row, None)  # it is the last in line
    self._running[row] = False
    self._reading[row] = asked
    self._wanted[row] = asked.num_likeliest > 0
    self._scorer.drop(row)
    if asked.scored:
      self._scorer.begin(row)
    self._texts.begin(row)

  def _read_within(self, budget: float, cost: Callable[[int], float]) -> None:
    """Reads prompts in line for as long as the budget has room for a pass.

    One pass of the narrowest program is made in any case.

    Args:
      budget: of all passes together.
      cost: of a pass of a width.
    """
    spent, least = 0.0, self.widths[0]
    while self._reading:
      fits = [width for width in self.widths if spent + cost(width) <= budget]
      spent += cost(self._read_on(max(fits, default=least)))
      if spent + cost(least) > budget:
        break

  def _read_on(self, most: int) -> int:
    """Reads more of the prompt that is the first in line, in one pass.

    Args:
      most: of the widths.

    Returns:
      The width of the pass, at most `most`.
    """
    row, asked = next(iter(self._reading.items()))
    if self._scorer.waits(row):
      width, scores = self._scorer.read_on(row, asked, most)
      if scores is not None:
        self._scores[row] = scores
        if not asked.max_new_tokens:
          del self._reading[row]
      return width or self.widths[0]
    source, keep = self._texts.source(row, asked)
    new = asked.token_ids[keep : keep + most]
    is_last = keep + len(new) == len(asked.token_ids)
    width = next(w for w in self.widths if w >= len(new))
    self._state = self._admit[width](
      self._params, self._state,
      *self._request(width, row, source, keep, new, asked, is_last),
    )  # fmt: skip
    self._texts.read(row, asked, keep + len(new))
    if is_last:
      del self._reading[row]
      self._running[row] = True
    return width

  def _make_rounds(self, depth: int, orders) -> dict[str, Any]:
    self._state, arrays = self._rounds[depth](
      self._params, self._state, *orders
    )
    likeliest = arrays.pop("likeliest")
    arrays = jax.device_get(arrays)
    if (self._wanted & self._running).any():  # else they stay where they are
      likeliest = jax.device_get(likeliest)
      arrays["likeliest"], arrays["likeliest_log_probs"] = likeliest
    return arrays

  # ------------------------------------------------- arguments of the programs

  def _nobody(self):
    """Rows of one token that end at once."""
    ones = np.ones(self.num_slots, np.int32)
    args = (ones[:, None] * 0, ones, self._keys())
    options = dict(
      max_new_tokens=ones * 0, sampling=programs.sampling(self.num_slots)
    )
    return everywhere(self._mesh, (args, options))

  def _keys(self):
    seeds = jnp.zeros(self.num_slots, jnp.uint32)
    return random.seeded_keys(seeds, seeds)

  def _orders(self, ended=False, max_depth=None, rounds=0):
    count = self.num_slots
    max_depth = self.depth if max_depth is None else max_depth
    orders = (
      np.array(np.broadcast_to(ended, count), bool),
      np.array(np.broadcast_to(max_depth, count), np.int32),
      np.int32(min(rounds, self.max_rounds)),
      self._wanted.copy(),
    )
    return everywhere(self._mesh, orders)

  def _request(
    self, width: int, row=0, source=0, keep=0, new=(0,),
    asked: Asked | None = None, is_last: bool = False,
  ):  # fmt: skip
    # A request for warm-up alone, which ends before it began. So does a
    # prompt that is not read to its end.
    asked = asked or Asked(
      token_ids=(0,), seed=0, max_new_tokens=1, temperature=1.0
    )
    tokens = np.zeros(width, np.int32)
    tokens[: len(new)] = new
    request = (
      np.int32(row),
      np.int32(source),
      np.int32(keep),
      tokens,
      np.int32(len(new)),
      np.array([asked.seed, asked.stream], np.uint32),
      np.int32(asked.max_new_tokens if is_last else 0),
      np.int32(asked.top_k),
      np.bool_(asked.ignore_stop),
      asked.warp(),
      np.int32(asked.min_tokens),
      *asked.lists(),
    )
    return everywhere(self._mesh, request)

  # --------------------------------------------------------------- the devices

  def _mapped(self, depth: int) -> Decoder | MeshDecoder:
    decoder = self._decoders[depth]
    if self._mesh is None:
      return decoder
    return MeshDecoder(decoder=decoder, mesh=self._mesh)

  def _check_shallow(self, depth: int, both: compilation.Programs) -> None:
    """Raises ValueError if a drafter's state has the form of its depth."""
    drafter = self._decoders[depth].drafter
    shapes = lambda tree: (
      jax.tree.structure(tree),
      [(x.shape, x.dtype) for x in jax.tree.leaves(tree)],
    )
    expected = shapes(
      jax.eval_shape(lambda state: state.drafter_state, both.state)
    )
    forms = shapes(
      jax.eval_shape(
        lambda params: drafter.init(
          params,
          self.num_slots,
          self.max_length + self._decoders[self.depth].drafter.tree.num_fed,
          None,
        ),
        self._params,
      )
    )
    if forms != expected:
      raise ValueError(
        f"drafter {drafter.name!r} cannot draft {depth} tokens with the state "
        f"that it has for {self.depth}"
      )

  def _on_mesh(self):
    return jax.set_mesh(self._mesh) if self._mesh else contextlib.nullcontext()

  def _compiled(self, function, both: compilation.Programs, more, *, reports):
    of_params = jax.tree.map(lambda x: x.sharding, self._params)
    here = jax.tree.leaves(of_params)[0]
    if self._mesh is not None:
      here = NamedSharding(self._mesh, P())
    with compilation.without_call_stacks():
      lowered = jax.jit(
        function,
        donate_argnums=1,
        in_shardings=(of_params, both.formats, *(here for _ in more)),
        out_shardings=(both.formats, here) if reports else both.formats,
      ).lower(self._params, both.state, *more)
    return lowered.compile()
