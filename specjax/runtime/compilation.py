"""Ahead-of-time compilation of prefill and the decoding loop."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.cache import Cache
from specjax.decode import Decoder
from specjax.runtime.mesh import MeshDecoder
from specjax.state import DecodeState

_NOTHING: Mapping[str, Any] = {}
_MAPS = pathlib.Path("/proc/self/maps")
_MOST_MAPS = 25_000
ROUNDS = jax.ShapeDtypeStruct((), jax.numpy.int32)
"""Shape of the limit on rounds that `Decoder.steps` takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
  """The compiled prefill and decoding loop.

  Attributes:
    prefill: maps its arguments to a state.
    loop: maps parameters and a state, which is donated (and, in pieces, a limit
      on rounds), to the last state.
    state: shapes, shardings and layouts of a state.
    formats: its shardings and layouts alone, for further programs.
  """

  prefill: jax.stages.Compiled
  loop: jax.stages.Compiled
  state: DecodeState
  formats: DecodeState


def compile_both(
  decoder: Decoder,
  init: Callable[..., DecodeState],
  arguments: tuple,
  options: Mapping[str, Any] = _NOTHING,
  *,
  cache_specs: tuple[P, P] | None = None,
  in_pieces: bool = False,
  loop: Callable[..., tuple[DecodeState, Any]] | None = None,
  more: tuple = (),
  compiled: Callable[[Any], Any] = lambda lowered: lowered.compile(),
) -> Programs:
  """Compiles prefill and loop; a mesh must be in use (`jax.set_mesh`).

  The loop chooses the memory layout of the state, and prefill writes it in that
  layout. Otherwise caches would be copied on the way in and out, and held
  twice.

  Args:
    decoder: the decoder, perhaps on a mesh.
    init: prefill, a function of the arguments and options.
    arguments: parameters (arrays or shapes, with shardings), and the rest.
    options: keyword arguments of `init`.
    cache_specs: how the target's and the draft's caches are split over the
      mesh, `(layers, rows, heads, slots, channels)`; the decoder splits rows.
      None: only rows are split.
    in_pieces: whether the loop takes a limit on rounds, `i32[]`.
    loop, more: replace the decoder's own loop, see `compile_loop`.
    compiled: compiles a lowered program.
  """
  state = jax.eval_shape(init, *arguments, **options)
  if isinstance(decoder, MeshDecoder):
    where = _shardings(cache_specs or (P(), P()), decoder, state)
  else:
    here = jax.tree.leaves(arguments[0])[0].sharding
    where = jax.tree.map(lambda x: here, state)
  wanted = jax.tree.map(
    lambda x, s: Format(Layout.AUTO, s) if _has_layout(x) else s, state, where
  )
  run: Callable[..., Any] = loop or decoder.generate
  if in_pieces:
    run, more = decoder.steps, (ROUNDS,)
  compiled_loop = compile_loop(
    run, arguments[0], state, wanted, more, reports=loop is not None,
    compiled=compiled,
  )  # fmt: skip
  formats = jax.tree.map(
    lambda x, s, chosen: chosen if _has_layout(x) else s,
    state, wanted, compiled_loop.input_formats[0][1],
  )  # fmt: skip
  prefill = compile_prefill(init, arguments, options, formats, compiled)
  placed = jax.tree.map(
    lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
    state,
    formats,
  )
  return Programs(
    prefill=prefill, loop=compiled_loop, state=placed, formats=formats
  )


def compile_prefill(
  init: Callable[..., DecodeState],
  arguments: tuple,
  options: Mapping[str, Any],
  formats: DecodeState,
  compiled: Callable[[Any], Any] = lambda lowered: lowered.compile(),
) -> jax.stages.Compiled:
  """Compiles prefill for a loop's layouts; arguments as in `compile_both`."""
  with without_call_stacks():
    lowered = jax.jit(init, out_shardings=formats).lower(*arguments, **options)
  return compiled(lowered)


def compile_loop(
  run: Callable[..., Any],
  params: Any,
  state: DecodeState,
  formats: DecodeState,
  more: tuple = (),
  *,
  reports: bool = False,
  compiled: Callable[[Any], Any] = lambda lowered: lowered.compile(),
) -> jax.stages.Compiled:
  """Compiles a loop; a mesh must be in use, if there is one.

  Args:
    run: maps parameters, a state, which is donated, and `more` to a state.
    params, state, more: arrays or their shapes; parameters with shardings.
    formats: the state's layout in memory, before and after.
    reports: whether `run` also returns something small besides the state.
    compiled: compiles a lowered program.
  """
  of_params = jax.tree.map(lambda x: x.sharding, params)
  here = jax.tree.leaves(of_params)[0]
  if isinstance(here, NamedSharding):
    here = NamedSharding(here.mesh, P())
  with without_call_stacks():
    lowered = jax.jit(
      run,
      donate_argnums=1,
      in_shardings=(of_params, formats, *(here for _ in more)),
      out_shardings=(formats, here) if reports else formats,
    ).lower(params, state, *more)
  return compiled(lowered)


def has_many_maps() -> bool:
  """True if programs should be freed before XLA runs out of memory maps.

  Linux allows a process 65,530 memory maps, every CPU program takes a few
  dozen, and XLA aborts the process when none are left.
  """
  return _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS


@contextlib.contextmanager
def without_call_stacks() -> Iterator[None]:
  """Omits call stacks of operations, on which XLA may loop forever.

  See `StackFrames::IsPrefix` in libtpu 0.0.42.1.
  """
  config: Any = jax.config  # mypy does not see its options
  before = config.jax_traceback_in_locations_limit
  jax.config.update("jax_traceback_in_locations_limit", 0)
  try:
    yield
  finally:
    jax.config.update("jax_traceback_in_locations_limit", before)


def _has_layout(x) -> bool:
  return not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _shardings(cache_specs: tuple[P, P], decoder: MeshDecoder, state):
  """Shardings of the loop's state: rows over their axis, caches as given."""

  def cut(specs, now, spec):
    return jax.tree.map(
      lambda node, now: (
        cut_cache(node, now, spec) if isinstance(node, Cache) else node
      ),
      specs,
      now,
      is_leaf=lambda node: isinstance(node, Cache | P),
    )

  def cut_cache(node, now, spec):
    # Rows are split as the decoder's, later axes as the model's.
    put = lambda rows: jax.tree.map(
      lambda row: P(*row, *spec[2:]), rows, is_leaf=lambda x: isinstance(x, P)
    )
    others = jax.tree.map(
      lambda row, x: P(*row, *spec[2:]) if x.ndim in (4, 5) else row,
      (node.context, node.recurrent), (now.context, now.recurrent),
      is_leaf=lambda x: isinstance(x, P),
    )  # fmt: skip
    return node.replace(
      keys=put(node.keys), values=put(node.values), context=others[0],
      recurrent=others[1],
    )  # fmt: skip

  of_target, of_draft = cache_specs
  specs = decoder.specs(state)
  specs = dataclasses.replace(
    specs,
    target_cache=cut(specs.target_cache, state.target_cache, of_target),
    drafter_state=cut(specs.drafter_state, state.drafter_state, of_draft),
  )
  return jax.tree.map(
    lambda spec: NamedSharding(decoder.mesh, spec),
    specs,
    is_leaf=lambda x: isinstance(x, P),
  )
