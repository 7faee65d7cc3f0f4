"""Loops whose passes read a fixed number of cache slots, for GPUs.

A loop over the slots in use would make every layer wait for the host. So there
is a program for each of a few slot counts, and the host picks one between
rounds, by the longest text.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from specjax.decode import Decoder
from specjax.runtime import compilation
from specjax.runtime.stopping import fetch
from specjax.state import DecodeState, StopReason
from specjax.types import Params

Loop = Callable[[Params, DecodeState, Any], DecodeState]


def reads_fixed_slots(params: Any) -> bool:
  """True if passes on the parameters' devices read a fixed number of slots."""
  devices = jax.tree.leaves(params)[0].sharding.device_set
  return not {device.platform for device in devices} <= {"cpu", "tpu"}


def smallest(sizes: Iterable[int | None], slots: int | None) -> int | None:
  """The smallest slot count that suffices; None stands for all slots."""
  number = lambda size: math.inf if size is None else size
  return min((x for x in sizes if number(x) >= number(slots)), key=number)


def loop(
  decoder: Decoder,
  params: Params,
  programs: compilation.Programs,
  full: Loop,
  *,
  text: int,
) -> Loop:
  """A loop in pieces that picks a program by the longest text.

  A mesh must be in use, if there is one.

  Args:
    decoder: the decoder.
    params: parameters, as the programs were compiled for.
    programs: compiled for a decoder with the same state.
    full: the program that reads all slots.
    text: tokens of the shortest text to compile for; shorter ones use the same
      program.
  """
  if not reads_fixed_slots(params):
    return full
  loops: dict[int | None, Loop] = {None: full}
  while (slots := decoder.slots_for(programs.state, text)) is not None:
    if slots not in loops:
      loops[slots] = compilation.compile_loop(
        functools.partial(decoder.steps, slots=slots),
        params, programs.state, programs.formats, (compilation.ROUNDS,),
      )  # fmt: skip
    text *= 2
  return functools.partial(_dispatch, decoder, loops)


def _dispatch(
  decoder: Decoder,
  loops: Mapping[int | None, Loop],
  params: Params,
  state: DecodeState,
  num_rounds: Any,
) -> DecodeState:
  """`Decoder.steps`, by a loop for each slot count."""
  first = None
  while True:
    num_steps, lengths, reasons = fetch(
      (state.num_steps, state.length, state.stop_reason)
    )
    running = reasons == StopReason.RUNNING
    first = num_steps if first is None else first
    rest = num_rounds - np.int32(num_steps - first)
    if not running.any() or int(rest) <= 0:
      return state
    slots = decoder.slots_for(state, int(lengths[running].max()))
    state = loops[smallest(loops, slots)](params, state, rest)
