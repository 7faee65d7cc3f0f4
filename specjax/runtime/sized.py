"""Loops where passes read as many slots as a program is made for, on GPUs.

A loop over what is there would have every layer wait for the host. So there is
a program for each of a few numbers of slots, and the host takes one between
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
  """Whether parameters lie on such devices."""
  devices = jax.tree.leaves(params)[0].sharding.device_set
  return not {device.platform for device in devices} <= {"cpu", "tpu"}


def least(sizes: Iterable[int | None], slots: int | None) -> int | None:
  """The least of some numbers of slots that is enough; None stands for all."""
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
  """A loop in pieces, of one program or several; a mesh must be in use, if any.

  Args:
    decoder: what decodes.
    params: as they were compiled for.
    programs: of a decoder with the same state.
    whole: the program that reads all slots.
    text: tokens of the shortest text that programs are compiled for; shorter
      ones read as many slots.
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
  """`Decoder.steps` by the loops of each number of slots."""
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
