"""`launch.serve` as a command: alone, and as two processes of one model."""

import contextlib
import json
import re
import signal
import threading
import urllib.request
from concurrent import futures

import pytest
import several
from files import read_jsonl, write_jsonl

from launch import decode

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
  """A server of one or more processes: its address and its output."""

  def __init__(self, processes):
    self.processes, self.output = processes, [[] for _ in processes]
    self.address, self._ready = None, threading.Event()
    self._readers = [
      threading.Thread(target=self._read, args=(i,))
      for i in range(len(processes))
    ]
    for reader in self._readers:
      reader.start()
    assert self._ready.wait(several.PATIENCE)
    assert self.address, self.output

  def _read(self, number):
    for line in self.processes[number].stderr:
      self.output[number].append(line)
      if match := re.search(r"on (http://\S+?)/ ", line):
        self.address = match[1]
        self._ready.set()
    self._ready.set()

  def ended(self):
    """Exit codes and outputs, once all processes have ended."""
    for reader in self._readers:
      reader.join(several.PATIENCE)
    codes = [p.wait(several.PATIENCE) for p in self.processes]
    return codes, ["".join(lines) for lines in self.output]

  def post(self, body):
    """Texts of the choices."""
    request = urllib.request.Request(
      f"{self.address}/v1/completions", data=json.dumps(body).encode(),
      headers={"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=several.PATIENCE) as answer:
      return [c["text"] for c in json.loads(answer.read())["choices"]]


@contextlib.contextmanager
def serving(pair, count, *more):
  """Runs a server; it is killed at the end, or when patience is."""
  target, draft = pair
  command = [
    "-m", "launch.serve", "--port=0", "--max_prompt=32",
    f"--config=configs/huggingface.py:target={target},draft={draft}",
    "--config.drafter=model(tokens=2)", "--config.max_new_tokens=200", *more,
  ]  # fmt: skip
  with several.limited(several.start([command] * count)) as processes:
    yield Started(processes)


def ask_all(server):
  with futures.ThreadPoolExecutor(len(ASKED)) as pool:
    return list(pool.map(server.post, ASKED))


@pytest.fixture(scope="module")
def alone(pair):
  """The answers of one process; told to end, it ends well."""
  with serving(pair, 1, "--slots=2", "--distributed=off") as server:
    actual = ask_all(server)
    again = server.post(ASKED[1])
    server.processes[0].send_signal(signal.SIGTERM)
    codes, output = server.ended()
  assert again == actual[1]
  return actual, codes, output


def test_server_exits_cleanly_on_sigterm(alone):
  actual, codes, output = alone
  assert codes == [0], output
  assert len({text for texts in actual for text in texts}) > 4
  assert "Traceback" not in output[0]


def test_greedy_completions_match_the_decode_command(alone, cli, tmp_path):
  greedy = [i for i, request in enumerate(ASKED) if not request["temperature"]]
  prompts = write_jsonl(
    tmp_path / "in.jsonl",
    [{"id": i, "prompt": ASKED[i]["prompt"], "temperature": 0} for i in greedy],
  )
  assert cli(
    decode.run, "--nobaseline", "--config.drafter=model(tokens=2)",
    "--config.max_new_tokens=12", f"--prompts={prompts}",
    f"--output={tmp_path / 'out.jsonl'}",
  ) == 0  # fmt: skip
  rows = read_jsonl(tmp_path / "out.jsonl")
  assert {x["id"]: [x["completion"]] for x in rows} == {
    i: alone[0][i] for i in greedy
  }


def test_two_processes_serve_the_same_completions_as_one(alone, pair):
  """Each holds two of four slots; both end when the leader is told to."""
  mesh = ("--slots=4", "--config.mesh=data:2,model:1")
  with serving(pair, 2, *mesh) as server:
    assert ask_all(server) == alone[0]
    server.processes[0].send_signal(signal.SIGTERM)
    codes, output = server.ended()
  assert codes == [0, 0], output
  assert "serving" in output[0]
  assert "serving" not in output[1]
