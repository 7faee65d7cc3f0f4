r"""Several processes of one run: joining them, and the chief, which writes.

A TPU slice with several workers runs one process per worker, and
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
  "Whether this is one of several processes; auto: on a TPU, or if "
  "$JAX_COORDINATOR_ADDRESS is given.",
)  # fmt: skip
_HEARTBEAT = flags.DEFINE_integer(
  "heartbeat_timeout", 30,
  "Seconds of silence after which a process counts as dead.", lower_bound=1,
)  # fmt: skip

_LEAVE_SECONDS = 5  # what a failed process waits for others to fail alike

_Part = TypeVar("_Part")


class UnjoinedError(RuntimeError):
  """Other processes that did not come in time, and may at the next try."""


def start(*, preemption_notice: bool = False) -> None:
  """Joins the other processes, if there are any, and says so on stderr.

  Must come before anything that makes jax look for devices. With a
  `preemption_notice` SIGTERM is only noted, for Orbax's `reached_preemption`.
  """
  if not _is_asked():
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
      "JAX_PROCESS_ID=I where no TPU slice or Slurm tells them"
    ) from None
  if several():
    print(
      f"process {jax.process_index()} of {jax.process_count()}: "
      f"{jax.local_device_count()} local of {jax.device_count()} devices",
      file=sys.stderr, flush=True,
    )  # fmt: skip


def _is_asked() -> bool:
  if _DISTRIBUTED.value != "auto":
    return _DISTRIBUTED.value == "on"
  allowed = "tpu" in os.environ.get("JAX_PLATFORMS", "tpu").split(",")
  on_tpu = allowed and without_tpu.has_tpu()
  return on_tpu or "JAX_COORDINATOR_ADDRESS" in os.environ


def several() -> bool:
  """True if this is one of several processes; looks for no device."""
  return jax.distributed.is_initialized() and jax.process_count() > 1


def is_chief() -> bool:
  """True for the process that writes the files."""
  return not several() or jax.process_index() == 0


def gather(value: Any) -> list[Any]:
  """The values of all processes, of JSON's types; all must call it."""
  if not several():
    return [value]
  from jax.experimental import multihost_utils

  text = json.dumps(value).encode()
  sizes = multihost_utils.process_allgather(np.int32(len(text)))
  # Powers of two, so that few lengths are compiled.
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
  """The records of parts of a run, the same on every process.

  Args:
    parts: the same on every process.
    work: makes a record of a part and its number among this process's.
    together: whether all processes make every part, because the models' arrays
      lie on the devices of several; otherwise they take turns.
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
  """True if arrays of `tree` lie on devices of more than one process."""
  return any(
    isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    for leaf in jax.tree.leaves(tree)
  )


def leave(code: int) -> None:
  """Ends a process that failed, without waiting for others that go on.

  jax's own way out waits for all processes, and would hang if this one alone
  failed. If all fail alike, they end together, each with its own exit code.
  """
  farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
  farewell.start()
  farewell.join(_LEAVE_SECONDS)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
