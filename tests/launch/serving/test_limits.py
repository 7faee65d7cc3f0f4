"""Clients that are too many, too slow or gone, and a server that ends."""

import json
import socket
import threading
import time

import pytest
import served


@pytest.fixture(scope="module")
def slots():
  return served.text_slots()


def request_of(body, host="x", method="POST", path="/v1/completions"):
  data = json.dumps(body).encode()
  return (
    f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
  ).encode() + data


def connect(address):
  host, port = address.removeprefix("http://").split(":")
  return socket.create_connection((host, int(port)), timeout=60)


def answer_of(address, body, **more):
  """Status and body of one request on a connection of its own."""
  with connect(address) as connection:
    connection.sendall(request_of(body, **more))
    data = b""
    while part := connection.recv(1 << 16):
      data += part
  head, _, body = data.partition(b"\r\n\r\n")
  return int(head.split()[1]), body


class Slowly:
  """Iterations that take a while, so that clients can leave in the middle."""

  def __init__(self, slots, seconds=0.03):
    self.slots, self.seconds = slots, seconds

  def __call__(self, control):
    time.sleep(self.seconds)
    return self.slots.iterate(control)


@pytest.fixture(scope="module")
def server(slots):
  with served.http_service(
    slots, Slowly(slots), limits=dict(body_bytes=2000), queue_length=4
  ) as actual:
    yield actual


def code_of(body):
  return json.loads(body)["error"]["code"]


def test_bodies_are_bounded_and_whoever_sends_more_hears_why(server):
  status, body = answer_of(server[1], {"prompt": "x " * 200_000})
  assert status == 413
  assert b"the body may have 2000 bytes" in body


def test_no_more_than_the_queue_holds_wait(server):
  """Three slots and four places: of twelve requests, seven are answered."""
  asked, results = served.long_request(), []
  threads = [
    threading.Thread(target=lambda: results.append(answer_of(server[1], asked)))
    for _ in range(12)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(served.PATIENCE)
  statuses = [status for status, _ in results]
  assert statuses.count(200) >= 7
  assert {*statuses} == {200, 429}
  expected = served.expected_text(**asked)
  for status, body in results:
    if status == 200:
      assert json.loads(body)["choices"][0]["text"] == expected
    else:
      assert code_of(body) == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_slot(server, stream):
  service, address = server
  cancelled = lambda: service.metrics.registry.get_sample_value(
    "vllm:request_failure_total", {"model_name": "toy", "reason": "cancelled"}
  )
  before = cancelled()
  connections = [connect(address) for _ in range(5)]
  for connection in connections:
    connection.sendall(request_of(served.long_request() | {"stream": stream}))
  served.until(lambda: service.scheduler.load() == (3, 2))
  for connection in connections:
    connection.close()
  served.until(lambda: service.scheduler.load() == (0, 0))
  assert cancelled() == before + 5


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_ends(slots, stream):
  with served.http_service(
    slots, Slowly(slots, 0.1), limits=dict(answer_seconds=0.3)
  ) as (service, address):
    asked = served.long_request() | {"stream": stream}
    status, body = answer_of(address, asked)
    assert status == (200 if stream else 408)
    assert b'"timeout"' in body
    assert b"[DONE]" not in body
    served.until(lambda: service.scheduler.load() == (0, 0))


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

  with served.http_service(slots, iterate) as (_, address):
    for _ in range(2):
      status, body = answer_of(address, served.long_request())
      assert (status, code_of(body)) == (503, "unavailable")
    status, body = answer_of(address, {}, method="GET", path="/health")
    assert (status, json.loads(body)["status"]) == (503, "dead")


def test_who_comes_while_it_drains_is_refused_and_others_are_answered(slots):
  """Also on a connection that was open before."""
  with served.http_service(slots, Slowly(slots)) as (service, address):
    results = []
    thread = threading.Thread(
      target=lambda: results.append(answer_of(address, served.long_request()))
    )
    with connect(address) as idle:
      thread.start()
      served.until(lambda: service.scheduler.load() == (1, 0))
      service.scheduler.close()
      idle.sendall(request_of({"prompt": "x"}))
      assert b" 503 " in idle.recv(1 << 16)
    status, body = answer_of(address, {}, method="GET", path="/health")
    assert (status, json.loads(body)["status"]) == (503, "draining")
    thread.join(served.PATIENCE)
    assert results[0][0] == 200


def test_a_name_that_only_leads_here_is_refused(slots):
  names = ("localhost", "127.0.0.1", "[::1]")
  with served.http_service(slots, limits=dict(hosts=names)) as (_, address):
    ask = lambda host: answer_of(
      address, {}, method="GET", path="/v1/models", host=host
    )[0]
    assert [ask("localhost:8000"), ask("[::1]:8000")] == [200, 200]
    assert ask("evil.example") == ask("localhost.evil.example") == 400
