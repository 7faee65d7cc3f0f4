r"""Runs with several processes: joining them, and the chief, which writes.

A TPU slice with several workers runs one process per worker;
`jax.distributed.initialize` finds the others, as it does under Slurm, Open MPI
and Kubernetes with --distributed=on. By hand, on one machine or several:

  JAX_COORDINATOR_ADDRESS=localhost:9911 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 \
    python -m launch.decode --config=configs/embedded.py --output=OUT.jsonl &
  JAX_COORDINATOR_ADDRESS=localhost:9911 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1 \
    python -m launch.decode --config=configs/embedded.py --output=OUT.jsonl

When one process dies, jax aborts the others after about --heartbeat_timeout
seconds with "another task died".
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from absl import flags

from launch import without_tpu

_DISTRIBUTED = flags.DEFINE_enum(
  "distributed", "auto", ["auto", "on", "off"],
  "Whether to join other processes; auto: on a TPU, or if "
  "$JAX_COORDINATOR_ADDRESS is set.",
)  # fmt: skip
_HEARTBEAT = flags.DEFINE_integer(
  "heartbeat_timeout", 30,
  "Seconds of silence after which a process counts as dead.", lower_bound=1,
)  # fmt: skip

_LEAVE_SECONDS = 5  # that a failed process waits for others to fail, too

_Part = TypeVar("_Part")


class UnjoinedError(RuntimeError):
  """Other processes did not join in time; a retry may succeed."""


def start(*, preemption_notice: bool = False) -> None:
  """Joins the other processes, if there are any, and reports it on stderr.

  Call it before anything that makes jax look for devices. With
  `preemption_notice`, SIGTERM only sets Orbax's `reached_preemption`.
  """
  if not _is_distributed():
    return
  jax.config.update("jax_enable_preemption_service", preemption_notice)
  number = lambda name: int(x) if (x := os.environ.get(name)) else None
  try:
    jax.distributed.initialize(
      num_processes=number("JAX_NUM_PROCESSES"),
      process_id=number("JAX_PROCESS_ID"),
      heartbeat_timeout_seconds=_HEARTBEAT.value,
    )
  except (ValueError, RuntimeError, OSError) as error:
    kind = ValueError if isinstance(error, ValueError) else UnjoinedError
    raise kind(
      f"cannot join the other processes ({error}): give all of "
      "JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES=N and "
      "JAX_PROCESS_ID=I unless a TPU slice or Slurm provides them"
    ) from None
  if several():
    print(
      f"process {jax.process_index()} of {jax.process_count()}: "
      f"{jax.local_device_count()} local of {jax.device_count()} devices",
      file=sys.stderr, flush=True,
    )  # fmt: skip


def _is_distributed() -> bool:
  if _DISTRIBUTED.value != "auto":
    return _DISTRIBUTED.value == "on"
  allowed = "tpu" in os.environ.get("JAX_PLATFORMS", "tpu").split(",")
  on_tpu = allowed and without_tpu.has_tpu()
  return on_tpu or "JAX_COORDINATOR_ADDRESS" in os.environ


def several() -> bool:
  """True if this is one of several processes; does not look for devices."""
  return jax.distributed.is_initialized() and jax.process_count() > 1


def is_chief() -> bool:
  """True for the process that writes the files."""
  return not several() or jax.process_index() == 0


def gather(value: Any) -> list[Any]:
  """Gathers JSON values from all processes; all must call it."""
  if not several():
    return [value]
  from jax.experimental import multihost_utils

  text = json.dumps(value).encode()
  sizes = multihost_utils.process_allgather(np.int32(len(text)))
  # Powers of two, to compile for few lengths.
  padded = np.zeros(1 << (int(sizes.max()) - 1).bit_length(), np.uint8)
  padded[: len(text)] = np.frombuffer(text, np.uint8)
  texts = multihost_utils.process_allgather(padded)
  return [
    json.loads(bytes(row[:size]))
    for row, size in zip(texts, sizes.tolist(), strict=True)
  ]


def round_robin(
  parts: Sequence[_Part],
  work: Callable[[int, _Part], dict],
  *,
  together: bool,
) -> Iterator[dict]:
  """Yields the records of the parts of a run, the same on every process.

  Args:
    parts: the same on every process.
    work: makes the record of a part, given its number on this process first.
    together: whether all processes work on every part, because the models span
      their devices; otherwise they take turns.
  """
  if together or not several():
    for number, part in enumerate(parts):
      yield work(number, part)
    return
  rank, count = jax.process_index(), jax.process_count()
  for start in range(0, len(parts), count):
    turn = range(start, min(start + count, len(parts)))
    mine = rank < len(turn)
    record = work(start // count, parts[turn[rank]]) if mine else None
    yield from filter(None, gather(record))


def spanned_by(tree: Any) -> bool:
  """True if arrays of `tree` are sharded over several processes."""
  return any(
    isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    for leaf in jax.tree.leaves(tree)
  )


def leave(code: int) -> None:
  """Ends a failed process without waiting for others that keep running.

  jax's own exit waits for all processes, and would hang if only this one
  failed. If all fail, they end together, each with its own exit code.
  """
  farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
  farewell.start()
  farewell.join(_LEAVE_SECONDS)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
