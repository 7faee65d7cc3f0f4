"""`launch.serve` as a command: alone, and as two processes of one model."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent import futures

import pytest
import several

pytestmark = pytest.mark.usefixtures("quick_to_compile")

ASKED = [
  dict(prompt=prompt, max_tokens=12, **settings)
  for prompt in ("def main(", "import os\n")
  for settings in (
    dict(temperature=0),
    dict(temperature=0.8, seed=1),
    dict(temperature=1, seed=2, top_k=40, n=2),
  )
]


class Started:
  """A server of one or more processes: where it listens, what it said."""

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
      if found := re.search(r"on (http://\S+?)/ ", line):
        self.address = found[1]
        self._ready.set()
    self._ready.set()

  def ended(self):
    """Exit codes, and what each has said, once all have ended."""
    for reader in self._readers:
      reader.join(several.PATIENCE)
    codes = [p.wait(several.PATIENCE) for p in self.processes]
    return codes, ["".join(lines) for lines in self.said]

  def ask(self, body):
    request = urllib.request.Request(
      f"{self.address}/v1/completions", data=json.dumps(body).encode(),
      headers={"Content-Type": "application/json"},
    )  # fmt: skip
    try:
      with urllib.request.urlopen(request, timeout=several.PATIENCE) as answer:
        return [c["text"] for c in json.loads(answer.read())["choices"]]
    except urllib.error.HTTPError as error:
      return json.loads(error.read())["error"]["code"]
    except OSError as error:
      return type(error).__name__

  def ask_all(self):
    with futures.ThreadPoolExecutor(len(ASKED)) as pool:
      return list(pool.map(self.ask, ASKED))


def started(command, count):
  if count > 1:
    return several.start([command] * count)
  return [
    subprocess.Popen(
      [sys.executable, *command], cwd=several.ROOT, text=True,
      stderr=subprocess.PIPE, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
  ]  # fmt: skip


@contextlib.contextmanager
def serving(pair, count, *more):
  target, draft = pair
  command = [
    "-m", "launch.serve", "--port=0", "--max_prompt=32", "--rounds_per_visit=2",
    f"--config=configs/huggingface.py:target={target},draft={draft}",
    "--config.num_speculative_tokens=2", "--config.max_new_tokens=200", *more,
  ]  # fmt: skip
  with several.limited(started(command, count)) as all_:
    yield Started(all_)


@pytest.fixture(scope="module")
def alone(pair, quick_to_compile):
  """What one process answers; told to end, it ends well."""
  with serving(pair, 1, "--slots=2") as server:
    found = server.ask_all()
    again = server.ask(ASKED[1])
    server.processes[0].send_signal(signal.SIGTERM)
    codes, said = server.ended()
  assert again == found[1]
  return found, codes, said


def test_a_server_that_is_told_to_end_ends_well(alone):
  found, codes, said = alone
  assert codes == [0], said
  assert all(isinstance(texts, list) for texts in found)
  assert len({text for texts in found for text in texts}) > 4
  assert "Traceback" not in said[0]


def test_two_processes_answer_as_one_does(alone, pair):
  """Each holds two of four slots; both end when the leader is told to."""
  mesh = ("--slots=4", "--config.mesh=data:2,model:1")
  with serving(pair, 2, *mesh) as server:
    assert server.ask_all() == alone[0]
    server.processes[0].send_signal(signal.SIGTERM)
    codes, said = server.ended()
  assert codes == [0, 0], said
  assert "serving" in said[0]
  assert "serving" not in said[1]


def test_a_process_that_dies_ends_the_others_and_is_said_to_clients(pair):
  mesh = ("--slots=2", "--config.mesh=data:2,model:1")
  with serving(pair, 2, *mesh, "--heartbeat_timeout=5") as server:
    body = dict(prompt="x", max_tokens=200, temperature=1, seed=0, n=20)
    with futures.ThreadPoolExecutor(1) as pool:
      answer = pool.submit(server.ask, body)
      while not answer.running():
        pass
      server.processes[1].kill()
      found = answer.result(several.PATIENCE)
    codes, said = server.ended()
  assert found in ("unavailable", "RemoteDisconnected", "ConnectionResetError")
  assert codes[0] not in (0, None)
  assert re.search(r"error|died|failed|UNAVAILABLE", said[0])
