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


def reads_at_once(params: Any) -> bool:
  """Whether parameters are on devices whose passes read a fixed number."""
  devices = jax.tree.leaves(params)[0].sharding.device_set
  return not {device.platform for device in devices} <= {"cpu", "tpu"}


def least(sizes: Iterable[int | None], slots: int | None) -> int | None:
  """The least of some slot counts that suffices; None stands for all slots."""
  number = lambda size: math.inf if size is None else size
  return min((x for x in sizes if number(x) >= number(slots)), key=number)


def loop(
  decoder: Decoder,
  params: Params,
  programs: compilation.Programs,
  whole: Loop,
  *,
  text: int,
) -> Loop:
  """A loop in pieces that picks a program by the longest text.

  A mesh must be in use, if there is one.

  Args:
    decoder: the decoder.
    params: parameters, as the programs were compiled for.
    programs: compiled for a decoder with the same state.
    whole: the program that reads all slots.
    text: tokens of the shortest text to compile for; shorter ones use the same
      program.
  """
  if not reads_at_once(params):
    return whole
  loops: dict[int | None, Loop] = {None: whole}
  while (slots := decoder.slots_for(programs.state, text)) is not None:
    if slots not in loops:
      loops[slots] = compilation.compile_loop(
        functools.partial(decoder.steps, slots=slots),
        params, programs.state, programs.formats, (compilation.ROUNDS,),
      )  # fmt: skip
    text *= 2
  return functools.partial(_in_turn, decoder, loops)


def _in_turn(
  decoder: Decoder,
  loops: Mapping[int | None, Loop],
  params: Params,
  state: DecodeState,
  num_rounds: Any,
) -> DecodeState:
  """`Decoder.steps`, by a loop for each slot count."""
  first = None
  while True:
    made, lengths, reasons = fetch(
      (state.num_steps, state.length, state.stop_reason)
    )
    running = reasons == StopReason.RUNNING
    first = made if first is None else first
    rest = num_rounds - np.int32(made - first)
    if not running.any() or int(rest) <= 0:
      return state
    slots = decoder.slots_for(state, int(lengths[running].max()))
    state = loops[least(loops, slots)](params, state, rest)
