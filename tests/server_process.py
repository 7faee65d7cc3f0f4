"""`launch.serve` as processes of this machine, and a client."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import several


class Started:
  """A server of one or more processes: its address and its output."""

  def __init__(self, processes):
    self.processes, self.said = processes, [[] for _ in processes]
    self.address, self._ready = None, threading.Event()
    self._readers = [
      threading.Thread(target=self._read, args=(i,))
      for i in range(len(processes))
    ]
    for reader in self._readers:
      reader.start()
    assert self._ready.wait(several.PATIENCE)
    assert self.address, self.said

  def _read(self, number):
    for line in self.processes[number].stderr:
      self.said[number].append(line)
      if match := re.search(r"on (http://\S+?)/ ", line):
        self.address = match[1]
        self._ready.set()
    self._ready.set()

  def ended(self):
    """Exit codes and outputs, once all processes have ended."""
    for reader in self._readers:
      reader.join(several.PATIENCE)
    codes = [p.wait(several.PATIENCE) for p in self.processes]
    return codes, ["".join(lines) for lines in self.said]

  def ask(self, body):
    """Texts of the choices."""
    request = urllib.request.Request(
      f"{self.address}/v1/completions", data=json.dumps(body).encode(),
      headers={"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=several.PATIENCE) as answer:
      return [c["text"] for c in json.loads(answer.read())["choices"]]


@contextlib.contextmanager
def serving(*flags, count=1, patience=several.PATIENCE):
  """Runs a server; it is killed at the end, or when patience is."""
  command = ["-m", "launch.serve", *flags]
  if count > 1:
    processes = several.start([command] * count)
  else:
    processes = [
      subprocess.Popen(
        [sys.executable, *command], cwd=several.ROOT, text=True,
        stderr=subprocess.PIPE, env={**os.environ, "JAX_PLATFORMS": "cpu"},
      )
    ]  # fmt: skip
  with several.limited(processes, patience=patience):
    yield Started(processes)
