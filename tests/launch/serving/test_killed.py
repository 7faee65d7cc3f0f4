"""A server of the embedded pair as a process, killed."""

import http.client
import json
import threading
import time
from concurrent import futures

import pytest
import server_process
import several

pytestmark = pytest.mark.heavy

PATIENCE = 60  # for whoever was being answered when the server was killed
FLAGS = (
  "--config=configs/embedded.py", "--slots=4", "--max_prompt=64",
  "--config.max_new_tokens=200", "--queue=16",
)  # fmt: skip
ASKED = [
  dict(prompt=prompt, max_tokens=24, **settings)
  for prompt in ("def main(", "import os\n")
  for settings in (
    dict(temperature=0), dict(temperature=0.8, seed=1, n=2),
    dict(temperature=1, seed=2, top_p=0.9, stop=["\n\n"]),
  )
]  # fmt: skip


def opened(address):
  return http.client.HTTPConnection(
    address.removeprefix("http://"), timeout=PATIENCE
  )


def posted(address, body):
  """An answer that has begun: its connection, and itself."""
  connection = opened(address)
  connection.request(
    "POST", "/v1/completions", json.dumps(body),
    {"Content-Type": "application/json"},
  )  # fmt: skip
  return connection, connection.getresponse()


class Load:
  """Clients that ask until they are told of an error, half of them streams.

  Attributes:
    fates: how the last request of each ended.
    wrong: answers that looked whole and were not.
    begun: streams of which something has come.
  """

  def __init__(self, address, expected, count=12):
    self._address, self._expected = address, expected
    self.fates, self.wrong, self.begun = [], [], threading.Semaphore(0)
    self.threads = [
      threading.Thread(target=self._ask, args=(number,))
      for number in range(count)
    ]
    for thread in self.threads:
      thread.start()

  def _ask(self, number):
    try:
      while True:
        self._stream() if number % 2 else self._whole(number)
    except (OSError, http.client.HTTPException) as error:
      self.fates.append(type(error).__name__)

  def _whole(self, number):
    body = ASKED[number % len(ASKED)]
    connection, answer = posted(self._address, body)
    texts = [x["text"] for x in json.loads(answer.read())["choices"]]
    connection.close()
    if texts != self._expected[number % len(ASKED)]:
      self.wrong.append((body, texts))

  def _stream(self):
    body = dict(prompt="x = ", max_tokens=200, temperature=1.5, stream=True)
    connection, answer = posted(self._address, body)
    data = b""
    while part := answer.read1(1 << 16):
      data += part
      self.begun.release()
    connection.close()
    if not data.endswith(b"data: [DONE]\n\n"):
      raise http.client.IncompleteRead(data)


def ask_all(server):
  with futures.ThreadPoolExecutor(len(ASKED)) as pool:
    return list(pool.map(server.ask, ASKED))


def test_killed_under_load_it_starts_again_and_answers_as_before():
  """Clients get errors, none hangs, and the port is free at once."""
  port = several.free_port()
  with server_process.serving(*FLAGS, f"--port={port}") as server:
    expected = ask_all(server)
    assert all(isinstance(texts, list) for texts in expected), expected
    load = Load(server.address, expected)
    for _ in range(30):
      assert load.begun.acquire(timeout=several.PATIENCE)
    server.processes[0].kill()
    killed = time.monotonic()
    for thread in load.threads:
      thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in load.threads)
    assert time.monotonic() - killed < PATIENCE / 2
    assert len(load.fates) == len(load.threads)
    assert not load.wrong
    assert server.ask(ASKED[0]) in ("URLError", "ConnectionRefusedError")
    server.ended()
  with server_process.serving(*FLAGS, f"--port={port}") as server:
    assert server.address.endswith(f":{port}")
    assert ask_all(server) == expected
