"""Clients that are too many, too slow or gone, and a server that ends."""

import json
import socket
import threading
import time

import pytest
import served


def request_of(body, path="/v1/completions", host="x", token=""):
  data = json.dumps(body).encode()
  method = "POST" if body else "GET"
  return (
    f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    f"Authorization: Bearer {token}\r\nContent-Length: {len(data)}\r\n"
    "Content-Type: application/json\r\n\r\n"
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


def slowly(slots, seconds=0.03):
  """Iterations that take a while, so that clients can leave in the middle."""

  def iterate(control):
    time.sleep(seconds)
    return slots.iterate(control)

  return iterate


@pytest.fixture(scope="module")
def narrow(text_slots):
  with served.http_service(
    text_slots, slowly(text_slots), limits=dict(body_bytes=2000), queue_length=4
  ) as actual:
    yield actual


def test_oversized_bodies_are_rejected_with_413(narrow):
  status, body = answer_of(narrow[1], {"prompt": "x " * 200_000})
  assert status == 413
  assert b"the body must have at most 2000 bytes" in body


def test_requests_beyond_the_queue_length_get_429(narrow):
  """Three slots and four places: of twelve requests, seven are answered."""
  asked, results = served.long_request(), []
  threads = [
    threading.Thread(target=lambda: results.append(answer_of(narrow[1], asked)))
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
      assert b"rate_limit_exceeded" in body


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_frees_the_slot(narrow, stream):
  service, address = narrow
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
def test_slow_answers_time_out(text_slots, stream):
  with served.http_service(
    text_slots, slowly(text_slots, 0.1), limits=dict(answer_seconds=0.3)
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
def test_dead_scheduler_loop_returns_503_without_waiting(text_slots):
  calls = []

  def iterate(control):
    calls.append(control)
    if len(calls) > 3:
      raise RuntimeError("the device is gone")
    return text_slots.iterate(control)

  with served.http_service(text_slots, iterate) as (_, address):
    for _ in range(2):
      status, body = answer_of(address, served.long_request())
      assert (status, b'"unavailable"' in body) == (503, True)
    status, body = answer_of(address, {}, path="/health")
    assert (status, json.loads(body)["status"]) == (503, "dead")


def test_draining_rejects_new_requests_and_finishes_running_ones(
  text_slots,
):
  """Also on a connection that was open before."""
  with served.http_service(text_slots, slowly(text_slots)) as (
    service,
    address,
  ):
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
    status, body = answer_of(address, {}, path="/health")
    assert (status, json.loads(body)["status"]) == (503, "draining")
    thread.join(served.PATIENCE)
    assert results[0][0] == 200


def test_unknown_hosts_and_tokens_are_rejected(text_slots):
  limits = dict(hosts=("localhost", "[::1]"), token="a secret")
  with served.http_service(text_slots, limits=limits) as (_, address):

    def post(host="localhost:8000", token="a secret"):
      models = dict(path="/v1/models", host=host, token=token)
      return answer_of(address, {}, **models)[0]

    assert [post(), post("[::1]:8000")] == [200, 200]
    assert post("evil.example") == post("localhost.evil.example") == 400
    assert [post(token=x) for x in ("", "a secre", "a secret!")] == 3 * [401]
