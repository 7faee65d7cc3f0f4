"""Serving over several processes: the leader decides, all do the same.

Every visit begins with one array from the leader, of the same size always, from
which each process reads what to do. Nothing else is sent, so that all issue the
same programs in the same order. An idle leader sends visits that do nothing: a
process that hears nothing has lost it.
"""

from collections.abc import Callable

import numpy as np

from launch import processes
from launch.serving.control import Control, Report
from launch.serving.slots import Slots


def leading(slots: Slots) -> Callable[[Control], Report]:
  """A function that makes a visit on all processes; `slots.turn` on one."""
  if not processes.several():
    return slots.turn

  def turn(control: Control) -> Report:
    _broadcast(control.encode(slots.longest))
    return slots.turn(control)  # the last one does nothing

  return turn


def follow(slots: Slots) -> None:
  """Makes the leader's visits until its last."""
  shape = slots.idle().encode(slots.longest).shape
  while True:
    control = Control.decode(_broadcast(np.zeros(shape, np.int32)))
    slots.turn(control)
    if control.is_last:
      return


def greet(slots: Slots) -> None:
  """The first array: what sends it is compiled with it, on all processes."""
  if processes.several():
    _broadcast(slots.idle().encode(slots.longest))


def _broadcast(array: np.ndarray) -> np.ndarray:
  from jax.experimental import multihost_utils

  return np.asarray(
    multihost_utils.broadcast_one_to_all(array, is_source=processes.is_chief())
  )
