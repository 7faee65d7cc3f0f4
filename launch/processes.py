r"""Several processes of one run: joining them, and the one that writes.

A TPU slice of more than one worker runs one process a worker; on one machine
several can be started by hand. They must join before jax touches a device:

  JAX_COORDINATOR_ADDRESS=localhost:9911 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 \
    python -m launch.decode --config=configs/embedded.py --output=OUT.jsonl &
  JAX_COORDINATOR_ADDRESS=localhost:9911 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1 \
    python -m launch.decode --config=configs/embedded.py --output=OUT.jsonl

or the same by flags. `launch.decode`, `launch.evaluate`, `launch.serve` and
`launch.train` run so; the other commands are of one process, and refuse.
Process 0, the chief, alone writes files. When one process dies, the others end
within --heartbeat_timeout seconds or a little more: jax aborts them with
"another task died", or they raise what broke in their hands.
"""

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from absl import flags

from launch import without_tpu

DISTRIBUTED = flags.DEFINE_enum(
  "distributed", "auto", ["auto", "on", "off"],
  "Whether this is one of several processes. auto: on a TPU slice of several "
  "workers, or if a coordinator is given.",
)  # fmt: skip
_COORDINATOR = flags.DEFINE_string(
  "coordinator_address", None,
  "HOST:PORT of process 0 ($JAX_COORDINATOR_ADDRESS); a TPU slice knows it.",
)  # fmt: skip
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "How many there are ($JAX_NUM_PROCESSES).",
  lower_bound=1,
)  # fmt: skip
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "Which one this is, from 0 ($JAX_PROCESS_ID).",
  lower_bound=0,
)  # fmt: skip
_HEARTBEAT = flags.DEFINE_integer(
  "heartbeat_timeout", 30,
  "Seconds of silence after which a process counts as dead.", lower_bound=1,
)  # fmt: skip

# What a command of several processes reads; one of a single process, the first.
FLAGS = (DISTRIBUTED, _COORDINATOR, _NUM_PROCESSES, _PROCESS_ID, _HEARTBEAT)

# How long workers wait for each other at the start, and a failed process for
# the others to fail alike.
_JOIN_SECONDS = 300
_LEAVE_SECONDS = 5

_Part = TypeVar("_Part")

_METADATA = "computeMetadata/v1/instance/attributes/worker-network-endpoints"


class UnjoinedError(RuntimeError):
  """Other processes that did not come in time, and may at the next try."""


def start(*, preemption_notice: bool = False) -> None:
  """Joins the other processes, if there are any, and says so on stderr.

  Must come before anything that makes jax look for devices.

  Args:
    preemption_notice: whether SIGTERM is to be only noted, for
      `orbax.checkpoint.CheckpointManager.reached_preemption`, instead of ending
      the process.

  Raises:
    ValueError: if half a setting was given, or none where one is needed.
    UnjoinedError: if the other processes do not come.
  """
  mode = DISTRIBUTED.value
  settings = _settings()
  if not _is_asked(settings):
    return
  jax.config.update("jax_enable_preemption_service", preemption_notice)
  try:
    jax.distributed.initialize(
      **settings,
      initialization_timeout=_JOIN_SECONDS,
      heartbeat_timeout_seconds=_HEARTBEAT.value,
    )
  except (ValueError, RuntimeError) as error:
    reason = " ".join(str(error).split())
    kind = ValueError if isinstance(error, ValueError) else UnjoinedError
    raise kind(
      f"--distributed={mode} cannot join the other processes ({reason}); "
      "expected a TPU slice, or all of --coordinator_address=HOST:PORT, "
      "--num_processes=N and --process_id=I, the same address everywhere"
    ) from None
  print(
    f"process {jax.process_index()} of {jax.process_count()}: "
    f"{jax.local_device_count()} local of {jax.device_count()} devices",
    file=sys.stderr,
    flush=True,
  )


def refuse() -> None:
  """Raises if this is to be one of several processes; nothing is joined.

  Raises:
    ValueError: that says so.
  """
  settings = _settings()
  if _is_asked(settings) and settings["num_processes"] != 1:
    raise ValueError(
      "this command is of one process, but was started as one of several "
      "(launch.decode, launch.evaluate, launch.serve and launch.train can "
      "be): start it once, without "
      "--coordinator_address and JAX_COORDINATOR_ADDRESS, or with "
      "--distributed=off"
    )


def _is_asked(settings: dict[str, Any]) -> bool:
  """True if flags, environment or machine ask for several processes."""
  if DISTRIBUTED.value == "auto":
    return any(settings.values()) or _tpu_workers() > 1
  return DISTRIBUTED.value == "on"


def _settings() -> dict[str, Any]:
  """Settings from flags, or else the environment; None where not given.

  jax itself reads JAX_COORDINATOR_ADDRESS only.

  Raises:
    ValueError: for numbers that are none.
  """
  numbers = {}
  for name, flag in (
    ("num_processes", _NUM_PROCESSES),
    ("process_id", _PROCESS_ID),
  ):
    text = os.environ.get(f"JAX_{name.upper()}")
    if flag.value is None and text is not None and not text.isdecimal():
      raise ValueError(
        f"JAX_{name.upper()} must be a number of 0 or more, got {text!r}"
      )
    numbers[name] = flag.value
    if flag.value is None and text is not None:
      numbers[name] = int(text)
  address = _COORDINATOR.value or os.environ.get("JAX_COORDINATOR_ADDRESS")
  host, _, port = (address or "").rpartition(":")
  if address and not (host and port.isdecimal()):
    raise ValueError(
      f"the coordinator's address must be HOST:PORT, got {address!r}"
    )
  if not address and None not in numbers.values():
    raise ValueError(
      "num_processes and process_id need the address of process 0: give "
      "--coordinator_address=HOST:PORT or JAX_COORDINATOR_ADDRESS"
    )
  return {"coordinator_address": address or None, **numbers}


def _tpu_workers() -> int:
  """Workers of the TPU slice that this machine is part of; 0 without a TPU."""
  platforms = os.environ.get("JAX_PLATFORMS", "tpu")
  if "tpu" not in platforms.split(","):
    return 0
  if not without_tpu.has_tpu():
    return 0
  names = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get(
    "TPU_WORKER_HOSTNAMES"
  )
  if not names:  # not GKE
    names = _metadata()
  workers = len(names.split(",")) if names else 0
  return workers * int(os.environ.get("MEGASCALE_NUM_SLICES") or 1)


def _metadata() -> str:
  """The slice's workers, as a TPU VM's metadata server lists them; or ''."""
  host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
  request = urllib.request.Request(
    f"http://{host}/{_METADATA}", headers={"Metadata-Flavor": "Google"}
  )
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  try:
    with opener.open(request, timeout=5) as answer:
      return answer.read().decode()
  except (urllib.error.URLError, OSError):
    return ""


def several() -> bool:
  """True if this is one of several processes; looks for no device."""
  return jax.distributed.is_initialized() and jax.process_count() > 1


def is_chief() -> bool:
  """True for the process that writes the files."""
  return not several() or jax.process_index() == 0


def gather(value: Any) -> list[Any]:
  """The values of all processes, in their order.

  All processes must call it equally often.

  Args:
    value: anything that JSON can hold.

  Returns:
    One value for each process.
  """
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
  """The records of parts of a run, on every process.

  Args:
    parts: the same on every process.
    work: makes the record of a part; its number counts the parts that this
      process makes.
    together: whether every process must take part in every part, because the
      models' arrays lie on the devices of several; otherwise they take turns.

  Yields:
    A record at a time, the same ones in the same order on every process.
  """
  if together or not several():
    for number, part in enumerate(parts):
      yield work(number, part)
    return
  rank, count = jax.process_index(), jax.process_count()
  for start in range(0, len(parts), count):
    turn = range(start, min(start + count, len(parts)))
    record = None
    if rank < len(turn):
      record = work(start // count, parts[turn[rank]])
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

  Args:
    code: the exit code.
  """
  farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
  farewell.start()
  farewell.join(_LEAVE_SECONDS)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
