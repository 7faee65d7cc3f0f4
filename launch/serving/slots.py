"""Rows of one running state that are given new prompts as they end.

All programs are compiled before the first request: one that begins, one that
admits a prompt for each width, one that makes rounds for each depth. They are
called with arrays of those shapes alone, so that nothing is compiled later.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.serving import programs
from launch.serving.control import Asked, Control, Report
from specjax import compilation, drawing
from specjax.decode import Decoder
from specjax.engine import everywhere
from specjax.mesh import MeshDecoder
from specjax.types import Params

_SMALLEST = 32  # of the widths that prompts are padded to


def widths_to(longest: int) -> tuple[int, ...]:
  """Widths that prompts are padded to: powers of two, then the longest."""
  widths, width = [], _SMALLEST
  while width < longest:
    widths.append(width)
    width *= 2
  return (*widths, longest)


class Slots:
  """Fixed rows on the device. One thread calls it.

  Attributes:
    num_slots: B.
    widths: of padded prompts, ascending.
    max_length: tokens that prompt and completion may have together.
    depth: G, of the deepest draft.
    depths: those that there are programs of, ascending.
    max_rounds: of one visit.
    seconds_of_round: what a round takes at each of the depths, with all rows
      at work; measured when the programs were compiled, if asked for.
  """

  def __init__(
    self,
    decoders: Mapping[int, Decoder],
    params: Params,
    *,
    num_slots: int,
    widths: Sequence[int],
    max_length: int,
    stop_tokens: Sequence[int],
    max_rounds: int = 8,
    mesh: Mesh | None = None,
    cache_specs: tuple[P, P] | None = None,
  ):
    """Compiles nothing yet.

    Args:
      decoders: by the depth of their drafts, all of one target and one way to
        draft; the deepest makes the state.
      params: of them all.
      num_slots: B.
      widths: see `widths_to`; the last is that of the longest prompt.
      max_length: see above.
      stop_tokens: ids that end a row.
      max_rounds: of one visit.
      mesh: the devices, or None for one without a mesh.
      cache_specs: how caches lie on it, see `compilation.compile_both`.

    Raises:
      ValueError: for sizes that do not fit each other.
    """
    if num_slots < 1 or max_rounds < 1:
      raise ValueError(
        f"slots and rounds must be >= 1, got {num_slots} and {max_rounds}"
      )
    if widths[-1] >= max_length:
      raise ValueError(
        f"a prompt of {widths[-1]} tokens leaves no room for a completion: "
        f"both share {max_length} positions"
      )
    self.num_slots, self.widths = num_slots, tuple(widths)
    self.max_length, self.max_rounds = max_length, max_rounds
    self.depths = tuple(sorted(decoders))
    self.depth = self.depths[-1]
    self.seconds_of_round: dict[int, float] = {}
    self._decoders = {
      depth: dataclasses.replace(one, with_log_probs=True)
      for depth, one in decoders.items()
    }
    self._params, self._stop_tokens = params, tuple(stop_tokens)
    self._mesh, self._cache_specs = mesh, cache_specs
    self._window = max_rounds * (self.depth + 1)
    self._admit: dict[int, Any] = {}
    self._rounds: dict[int, Any] = {}
    self._state: Any = None

  def compile(self, say: Callable[[str], None] = lambda text: None) -> None:
    """Compiles all programs and runs each once.

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
      self._state = self._admit[width](
        self._params, self._state, *self._request(width)
      )
    for depth in self.depths:
      self._make_rounds(depth, self._orders())

  def measure(self, rounds: int = 8, repeats: int = 3) -> None:
    """Times a round at each depth, into `seconds_of_round`; ends all rows.

    Args:
      rounds: of one measurement.
      repeats: of which the median counts.
    """
    for depth in self.depths:
      seen = []
      for _ in range(repeats):
        for row in range(self.num_slots):
          budget = self.max_length - 1
          asked = Asked(
            token_ids=(0,), seed=row, max_new_tokens=budget, temperature=1.0
          )
          self._begin(row, asked)
        jax.block_until_ready(self._state)
        start = time.perf_counter()
        report = self._make_rounds(
          depth, self._orders(rounds=min(rounds, self.max_rounds))
        )
        seen.append((time.perf_counter() - start) / max(report["rounds"], 1))
      self.seconds_of_round[depth] = sorted(seen)[len(seen) // 2]
    self._make_rounds(self.depth, self._orders(ended=True))

  def turn(self, control: Control) -> Report:
    """Does what a visit is to do, and reads what it has done."""
    start = time.perf_counter()
    for row, asked in control.admissions:
      self._begin(row, asked)
    deepest = int(control.max_depth.max(initial=0))
    depth = next(d for d in self.depths if d >= min(deepest, self.depth))
    found = self._make_rounds(
      depth,
      self._orders(control.ended, control.max_depth, control.rounds),
    )
    return Report(**found, seconds=time.perf_counter() - start)

  def idle(self) -> Control:
    """A visit that does nothing."""
    return Control(
      ended=np.zeros(self.num_slots, bool),
      max_depth=np.full(self.num_slots, self.depth, np.int32),
      rounds=0,
    )

  def _begin(self, row: int, asked: Asked) -> None:
    length = len(asked.token_ids)
    width = next(w for w in self.widths if w >= length)
    self._state = self._admit[width](
      self._params, self._state, *self._request(width, row, asked)
    )

  def _make_rounds(self, depth: int, orders) -> dict[str, Any]:
    self._state, found = self._rounds[depth](self._params, self._state, *orders)
    return jax.device_get(found)

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
    return drawing.seeded_keys(seeds, seeds)

  def _orders(self, ended=False, max_depth=None, rounds=0):
    count = self.num_slots
    max_depth = self.depth if max_depth is None else max_depth
    orders = (
      np.array(np.broadcast_to(ended, count), bool),
      np.array(np.broadcast_to(max_depth, count), np.int32),
      np.int32(min(rounds, self.max_rounds)),
    )
    return everywhere(self._mesh, orders)

  def _request(self, width: int, row: int = 0, asked: Asked | None = None):
    # Asked by nobody: warmth alone, which ends before it began.
    budget = 0 if asked is None else asked.max_new_tokens
    asked = asked or Asked(
      token_ids=(0,), seed=0, max_new_tokens=1, temperature=1.0
    )
    tokens = np.zeros(width, np.int32)
    tokens[: len(asked.token_ids)] = asked.token_ids
    request = (
      np.int32(row),
      tokens,
      np.int32(len(asked.token_ids)),
      np.array([asked.seed, asked.stream], np.uint32),
      np.int32(budget),
      np.int32(asked.top_k),
      np.bool_(asked.ignore_stop),
      np.array([asked.temperature, asked.top_p, asked.min_p], np.float32),
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
    found = shapes(
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
    if found != expected:
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
