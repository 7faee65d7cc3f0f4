"""Several processes of one run, on this machine."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import threading
import time

ROOT = pathlib.Path(__file__).parents[1]
# Generous: the machine may be busy. A test that hangs is ended by it.
PATIENCE = 240
# Threads of XLA:CPU. It takes as many as devices; when a program has several
# collectives under way on each, all threads wait and none is left to join.
THREADS = "64"


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


def printed(program: str, *arguments) -> str:
  """The last line that a program prints, on CPU devices that it asks for."""
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
    cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": THREADS},
    capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout.splitlines()[-1]


def start(commands, *, devices=1, **environment):
  """Starts a Python process for each list of arguments.

  Args:
    commands: arguments of each process, `-m launch.decode` and so on.
    devices: CPU devices of each.
    **environment: further variables.

  Returns:
    The `subprocess.Popen`s; stdout and stderr are piped, as text.
  """
  port = free_port()
  return [
    subprocess.Popen(
      [sys.executable, *map(str, command)],
      cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      env={
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(len(commands)),
        "JAX_PROCESS_ID": str(number),
        "NPROC": THREADS,
        **environment,
      },
    )
    for number, command in enumerate(commands)
  ]  # fmt: skip


@contextlib.contextmanager
def limited(processes, *, patience=PATIENCE):
  """Kills the processes after `patience` seconds, and at the end.

  What reads their output inside ends with them, and so does not wait forever.
  """

  def kill():
    for process in processes:
      process.kill()

  timer = threading.Timer(patience, kill)
  timer.start()
  try:
    yield processes
  finally:
    timer.cancel()
    kill()


def finish(processes, *, patience=PATIENCE):
  """Waits; every process is killed once `patience` seconds are over.

  Returns:
    `(exit code, stdout, stderr)` of each.
  """
  end = time.monotonic() + patience
  try:
    outputs = [
      process.communicate(timeout=max(1, end - time.monotonic()))
      for process in processes
    ]
  finally:
    for process in processes:
      process.kill()
  return [
    (process.returncode, *texts)
    for process, texts in zip(processes, outputs, strict=True)
  ]
