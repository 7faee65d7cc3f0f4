"""Clients that are rude, slow or gone: nothing leaks, others' texts stand."""

import array
import asyncio
import dataclasses
import fcntl
import json
import random
import signal
import socket
import termios
import threading
import time
from http import client as http_client

import pytest
import served

from launch.serving import http
from launch.serving.limits import Limits

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(scope="module")
def slots(quick_to_compile):
  return served.text_slots()


def head_of(path, length, more=""):
  return (
    f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    f"Content-Length: {length}\r\n{more}\r\n"
  ).encode()


def request_of(body, path="/v1/completions", more="Connection: close\r\n"):
  data = json.dumps(body).encode()
  return head_of(path, len(data), more) + data


def connect(address):
  host, port = address.removeprefix("http://").split(":")
  actual = socket.create_connection((host, int(port)), timeout=60)
  return actual


def all_of(connection):
  data = b""
  while part := connection.recv(1 << 16):
    data += part
  return data


def answer_of(address, body, **more):
  """Status and JSON of one request on a connection of its own."""
  with connect(address) as connection:
    connection.sendall(request_of(body, **more))
    return parsed(all_of(connection))


def parsed(data):
  head, _, body = data.partition(b"\r\n\r\n")
  return int(head.split()[1]), json.loads(body)


def is_idle(service):
  return service.scheduler.load() == (0, 0)


class Slowly:
  """Iterations that take a while, so that clients can leave in the middle."""

  def __init__(self, slots, seconds=0.03):
    self.slots, self.seconds = slots, seconds

  def __call__(self, control):
    time.sleep(self.seconds)
    return self.slots.iterate(control)


@pytest.fixture(scope="module")
def server(slots):
  limits = Limits(body_bytes=2000, body_seconds=0.5, send_seconds=2.0)
  with served.http_service(
    slots, Slowly(slots), limits=limits, head_seconds=0.5, queue_length=4
  ) as actual:
    yield actual


@pytest.fixture
def expected():
  return served.expected_text(**served.long_request())


def test_bodies_are_bounded_and_whoever_sends_more_hears_why(server):
  address = server[1]
  status, body = answer_of(address, {"prompt": "x " * 2000})
  assert (status, body["error"]["message"]) == (
    413,
    "the body may have 2000 bytes",
  )
  # Far more than is allowed, in parts: the rest of it is still taken.
  with connect(address) as connection:
    connection.sendall(head_of("/v1/completions", 30_000))
    for _ in range(30):
      connection.sendall(b" " * 1000)
      time.sleep(0.002)
    assert parsed(all_of(connection))[0] == 413


def test_bodies_are_bounded_also_where_no_length_is_said(server):
  with connect(server[1]) as connection:
    connection.sendall(
      b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
      b"application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for _ in range(30):
      connection.sendall(b"64\r\n" + b" " * 100 + b"\r\n")
      time.sleep(0.002)
    assert parsed(all_of(connection))[0] == 413


def test_who_asks_before_sending_too_much_is_told_at_once(server):
  with connect(server[1]) as connection:
    connection.sendall(
      head_of("/v1/completions", 1 << 40, "Expect: 100-continue\r\n")
    )
    assert parsed(all_of(connection))[0] == 413


def test_a_body_without_an_end_is_not_taken_for_ever(server):
  with connect(server[1]) as connection:
    connection.sendall(head_of("/v1/completions", 1 << 40))
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
      connection.sendall(b" " * (1 << 28))


def test_a_body_that_does_not_come_is_not_waited_for(server):
  with connect(server[1]) as connection:
    connection.sendall(head_of("/v1/completions", 100) + b'{"prompt":')
    assert parsed(all_of(connection))[0] == 408


@pytest.mark.parametrize(
  "start", [b"", b"POST /v1/compl", b"GET / HTTP/1.1\r\n"]
)
def test_a_head_that_does_not_come_is_not_waited_for(server, start):
  with connect(server[1]) as connection:
    connection.sendall(start)
    assert all_of(connection) == b""


def test_a_connection_in_use_is_kept_and_one_of_no_use_is_not(server):
  """Looked at twice a second: one asks all the time, one owes a body."""
  kept = http_client.HTTPConnection(server[1].removeprefix("http://"))
  with connect(server[1]) as owing:
    owing.sendall(head_of("/v1/nothing", 10))  # answered, and no body comes
    assert owing.recv(4096).startswith(b"HTTP/1.1 404")
    owing.sendall(b"x")
    ports, end = set(), time.monotonic() + 2
    while time.monotonic() < end:
      kept.request("GET", "/live")
      assert kept.getresponse().read()
      ports.add(kept.sock.getsockname())
      time.sleep(0.2)
    assert len(ports) == 1  # it was never opened anew
    owing.settimeout(5)
    while owing.recv(4096):
      pass
  kept.close()


def unread(connection):
  """Bytes that wait in the system for a client that does not read."""
  actual = array.array("i", [0])
  fcntl.ioctl(connection, termios.FIONREAD, actual)
  return actual[0]


@pytest.mark.parametrize("stream", [False, True])
def test_who_takes_nothing_of_an_answer_is_dropped(server, stream):
  """Though it stays: neither its connection nor its answer is kept for it."""
  service, address = server
  connections = service.scheduler.when_dead.__self__.server_state.connections
  served.until(lambda: not connections)
  host, port = address.removeprefix("http://").split(":")
  body = served.long_request() | {
    "prompt": [served.long_request()["prompt"]] * 7, "logprobs": 0,
    "token_origins": True, "stream": stream,
  }  # fmt: skip
  with socket.socket() as silent:
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    silent.connect((host, int(port)))
    served.until(lambda: connections)
    (held,) = connections
    held.transport.get_extra_info("socket").setsockopt(
      socket.SOL_SOCKET, socket.SO_SNDBUF, 1
    )
    silent.sendall(request_of(body))
    served.until(lambda: unread(silent))
    served.until(lambda: held.flow.write_paused, 20)
    served.until(lambda: not connections, 20)
  served.until(lambda: is_idle(service))


def test_more_connections_than_there_may_be_are_told_so(slots):
  """And are served again once others have left."""
  ask = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
  with served.http_service(slots, connections=4) as (service, address):
    server = service.scheduler.when_dead.__self__
    idle = [connect(address) for _ in range(3)]
    served.until(lambda: len(server.server_state.connections) == 3)
    with connect(address) as late:
      late.sendall(ask)
      status, body = parsed(all_of(late))
      assert (status, body["error"]["code"]) == (503, "unavailable")
    for connection in idle:
      connection.close()
    served.until(lambda: not server.server_state.connections)
    with connect(address) as later:
      later.sendall(ask)
      assert parsed(all_of(later))[0] == 200


def test_no_more_than_the_queue_holds_wait(server, expected):
  """Three slots and four places: of twelve requests, seven are answered."""
  address = server[1]
  results = []
  threads = [
    threading.Thread(
      target=lambda: results.append(answer_of(address, served.long_request()))
    )
    for _ in range(12)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(served.PATIENCE)
  by_status = sorted(status for status, _ in results)
  assert by_status[0] == 200
  assert by_status[-1] == 429
  assert by_status.count(200) >= 7
  assert {*by_status} == {200, 429}
  for status, body in results:
    if status == 200:
      assert body["choices"][0]["text"] == expected
    else:
      assert body["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_slot(server, stream):
  service, address = server
  cancelled = lambda: service.metrics.registry.get_sample_value(
    "vllm:request_failure_total",
    {"model_name": "toy", "reason": "cancelled"},
  )
  before = cancelled()
  connections = [connect(address) for _ in range(5)]
  for connection in connections:
    connection.sendall(request_of(served.long_request() | {"stream": stream}))
  served.until(lambda: service.scheduler.load() == (3, 2))
  for connection in connections:
    connection.close()
  served.until(lambda: is_idle(service))
  assert cancelled() == before + 5


def test_an_answer_that_takes_too_long_ends(slots):
  limits = Limits(answer_seconds=0.3)
  with served.http_service(slots, Slowly(slots, 0.1), limits=limits) as actual:
    service, address = actual
    status, body = answer_of(address, served.long_request())
    assert (status, body["error"]["code"]) == (408, "timeout")
    with connect(address) as connection:
      connection.sendall(request_of(served.long_request() | {"stream": True}))
      data = all_of(connection)
    assert b'"code": "timeout"' in data
    assert b"[DONE]" not in data
    served.until(lambda: is_idle(service))


@pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
def test_a_dead_loop_is_said_and_nobody_waits(slots):
  calls = []

  def iterate(control):
    calls.append(control)
    if len(calls) > 3:
      raise RuntimeError("the device is gone")
    return slots.iterate(control)

  with served.http_service(slots, iterate) as (service, address):
    service.scheduler.when_dead = lambda: None  # it would end the server
    status, body = answer_of(address, served.long_request())
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert answer_of(address, served.long_request())[0] == 503
    with connect(address) as connection:
      connection.sendall(
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
      )
      status, health = parsed(all_of(connection))
    assert (status, health["status"]) == (503, "dead")


def test_a_stuck_device_is_no_healthy_one(slots):
  release = threading.Event()

  def iterate(control):
    release.wait(served.PATIENCE)
    return slots.iterate(control)

  with served.http_service(slots, iterate) as (service, address):
    impatient = dataclasses.replace(service, stuck_seconds=0.05)
    thread = threading.Thread(
      target=lambda: answer_of(address, served.long_request())
    )
    thread.start()
    served.until(lambda: service.scheduler.stuck() > 0.05)
    assert json.loads(http._health(impatient).body)["status"] == "stuck"
    assert json.loads(http._health(service).body)["status"] == "ok"
    release.set()
    thread.join(served.PATIENCE)


def fate_of(data):
  """End of an answer: whole, or with an error in OpenAI's form."""
  head, _, body = data.partition(b"\r\n\r\n")
  if b"event-stream" not in head:
    status, answer = parsed(data)
    return (status, answer["error"]["code"] if "error" in answer else None)
  events = [x for x in body.split(b"\r\n") if x.startswith(b"data: ")]
  last = events[-1].strip()
  if last == b"data: [DONE]":
    return (200, None)
  error = json.loads(last.removeprefix(b"data: "))["error"]
  assert body.endswith(b"0\r\n\r\n")  # the answer has ended, if not well
  return ("event", error["code"])


class Ending:
  """Clients who ask for what takes longer than the server has.

  Half of them for streams; one more owes its body.
  """

  def __init__(self, address, service, count=12):
    self._held = []
    for number in range(count):
      one = connect(address)
      one.sendall(
        request_of(served.long_request() | {"stream": number % 2 > 0})
      )
      self._held.append(one)
    served.until(lambda: sum(service.scheduler.load()) == count)
    owing = connect(address)
    owing.sendall(head_of("/v1/completions", 100) + b'{"prompt":')
    self._held.append(owing)
    self.server = service.scheduler.when_dead.__self__
    served.until(lambda: len(self.server.server_state.tasks) == count + 1)

  def finish(self):
    """The answers to each of them."""
    return [fate_of(all_of(one)) for one in self._held]

  def close(self):
    for one in self._held:
      one.close()


@pytest.mark.parametrize("how", ["slow", "stuck", "told twice"])
def test_a_drain_that_runs_out_tells_everybody(slots, caplog, how):
  """In OpenAI's form, by an event in streams; and the log has nothing of it."""
  release = threading.Event()

  def iterate(control):
    if how == "stuck" and control.admissions:
      release.wait(served.PATIENCE)
    time.sleep(0.05)
    return slots.iterate(control)

  drain_seconds = 60 if how == "told twice" else 0.3
  with served.http_service(
    slots, iterate, drain_seconds=drain_seconds
  ) as actual:
    clients = Ending(actual[1], actual[0])
    clients.server.handle_exit(signal.SIGTERM, None)
    if how == "told twice":
      clients.server.handle_exit(signal.SIGINT, None)
    fates = clients.finish()
    release.set()
  clients.close()
  assert {*fates} <= {
    (200, None), (503, "unavailable"), ("event", "unavailable"),
  }  # fmt: skip
  assert fates.count((503, "unavailable")) > 4
  assert fates.count((200, None)) < 4
  assert not caplog.records


GARBAGE = [
  b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET", b"\r\n" * 500,
  b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
  b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
  b"Content-Type: application/json\r\n\r\nzz\r\n",
  b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
  b"\x00" * 4096,
]  # fmt: skip


@pytest.mark.parametrize("number", [3, 4, 6])
def test_what_is_no_http_is_refused_in_openais_form(server, number):
  with connect(server[1]) as connection:
    connection.sendall(GARBAGE[number])
    status, body = parsed(all_of(connection))
  assert status == 400
  assert body["error"]["type"] == "invalid_request_error"


def test_what_is_no_http_after_an_answer_ends_the_connection(server, caplog):
  """Its body, which nobody wanted: there is nobody to refuse it to."""
  with connect(server[1]) as connection:
    connection.sendall(
      b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked"
      b"\r\n\r\n"
    )
    data = connection.recv(4096)
    connection.sendall(b"zz\r\n")
    assert parsed(data + all_of(connection))[0] == 404
  assert not [x for x in caplog.records if x.levelname == "ERROR"]


@pytest.mark.parametrize(
  "path", ["/health/", "/v1/completions/", "/v1/models/", "/metrics/", "//x"]
)
def test_nobody_is_sent_elsewhere_and_names_are_checked_first(slots, path):
  ask = lambda host: (
    f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
  ).encode()
  limits = Limits(names=frozenset({"localhost"}))
  with served.http_service(slots, limits=limits) as (_, address):
    for host, expected in (("localhost", 404), ("evil.example", 403)):
      with connect(address) as connection:
        connection.sendall(ask(host))
        status, body = parsed(all_of(connection))
      assert status == expected
      assert body["error"]["message"]


async def _rude(address, rng):
  """Does one thing that a client should not."""
  host, port = address.removeprefix("http://").split(":")
  reader, writer = await asyncio.open_connection(host, int(port))
  what = rng.randrange(6)
  body = served.long_request() | {
    "seed": rng.randrange(100),
    "stream": rng.random() < 0.5,
  }
  try:
    if what == 0:
      writer.write(rng.choice(GARBAGE))
    elif what == 1:  # half a request
      data = request_of(body)
      writer.write(data[: rng.randrange(1, len(data))])
    elif what == 2:  # slow reads
      writer.write(request_of(body))
      for _ in range(rng.randrange(5)):
        await reader.read(10)
        await asyncio.sleep(rng.random() * 0.1)
    elif what == 3:
      writer.write(request_of(rng.choice([[], 3, {"prompt": 1}, {"n": 99}])))
    else:
      writer.write(request_of(body))
    await writer.drain()
    await asyncio.sleep(rng.random() * 0.3)
    if what == 5:  # no goodbye
      writer.transport.abort()
  except OSError:
    pass
  finally:
    writer.close()


async def _polite(address, seed):
  host, port = address.removeprefix("http://").split(":")
  body = dict(prompt="x = ", max_tokens=40, temperature=1.0, seed=seed)
  while True:
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request_of(body))
    status, answer = parsed(await asyncio.wait_for(reader.read(), 100))
    writer.close()
    if status == 200:
      return answer["choices"][0]["text"]
    assert status == 429
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
  "clients", [30, pytest.param(200, marks=pytest.mark.heavy)]
)
def test_rude_clients_cost_the_others_nothing(slots, clients):
  """Slots, tasks and connections are as before, and texts are what they are."""
  rng = random.Random(clients)
  polite = clients // 5
  limits = Limits(body_bytes=5000, body_seconds=1.0, send_seconds=2.0)
  with served.http_service(
    slots, Slowly(slots, 0.003), limits=limits, head_seconds=1.0
  ) as (service, address):

    async def everybody():
      rude = [_rude(address, rng) for _ in range(clients)]
      good = [_polite(address, seed) for seed in range(polite)]
      actual = await asyncio.gather(*good, *rude)
      return actual[:polite]

    texts = asyncio.run(everybody())
    served.until(lambda: is_idle(service))
    server = service.scheduler.when_dead.__self__
    served.until(lambda: not server.server_state.connections)
    served.until(lambda: not server.server_state.tasks)
    assert texts == [
      served.expected_text("x = ", max_tokens=40, temperature=1.0, seed=seed)
      for seed in range(polite)
    ]
    assert service.scheduler.is_alive()
