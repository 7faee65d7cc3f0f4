"""Hundreds of requests of every fate: nothing of any of them is kept."""

import asyncio
import gc
import json
import os
import random
import socket
import tracemalloc

import jax
import pytest
import served
from starlette.requests import Request

from launch.serving.answers import Answer, Choice
from launch.serving.limits import Limits
from launch.serving.refusals import RefusalError
from launch.serving.scheduler import Ticket
from launch.serving.schemas import Ask

pytestmark = pytest.mark.usefixtures("quick_to_compile")

_HUNDREDS = 3
_SIZE = 8_000  # bytes of a request's body, which no other has
# What each request of a hundred may leave, far less than its body.
_LEFT = 800


def body_of(rng):
  """A client's request; its stop texts are nobody else's."""
  stop = [f"{rng.random()}".ljust(200, "x") for _ in range(16)]
  return {
    "prompt": "x = ", "max_tokens": rng.randrange(1, 40), "temperature": 1,
    "seed": rng.randrange(1000), "stop": stop, "user": "u" * (_SIZE - 4000),
    "stream": rng.random() < 0.5, "logprobs": 0, "token_origins": True,
  }  # fmt: skip


FATES = {
  "answered": lambda body: body,
  "left": lambda body: body | {"max_tokens": 150, "stop": []},
  "refused": lambda body: body | {"bogus": 1},
  "no prompt": lambda body: body | {"prompt": []},
  "too many": lambda body: body | {"n": 16, "max_tokens": 3},
  "too large": lambda body: body | {"user": "u" * 30_000},
  "malformed": lambda body: json.dumps(body)[:-20],
}


async def client(address, fate, rng):
  """One request to its end, whatever that is; the first line of the answer."""
  host, port = address.removeprefix("http://").split(":")
  reader, writer = await asyncio.open_connection(host, int(port))
  body = FATES[fate](body_of(rng))
  data = (body if isinstance(body, str) else json.dumps(body)).encode()
  writer.write(
    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}"
    "\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n".encode()
    + data
  )
  try:
    if fate == "left":
      await asyncio.sleep(rng.random() * 0.02)
      return b""
    return (await asyncio.wait_for(reader.read(), served.PATIENCE))[:12]
  except OSError:  # who refuses a body need not read it
    return b""
  finally:
    writer.transport.abort()


def hundred(address, rng):
  """A hundred requests, ten at a time; how many there were of each status."""

  async def everybody():
    places = asyncio.Semaphore(10)

    async def one(number):
      async with places:
        return await client(address, list(FATES)[number % len(FATES)], rng)

    return await asyncio.gather(*[one(number) for number in range(100)])

  actual = [line[9:].decode() for line in asyncio.run(everybody())]
  return {status: actual.count(status) for status in {*actual}}


def loop_of(service, address):
  """The server's, as one of its connections knows it."""
  connections = service.scheduler.when_dead.__self__.server_state.connections
  host, port = address.removeprefix("http://").split(":")
  with socket.create_connection((host, int(port))):
    served.until(lambda: connections)
    (one,) = connections
    return one.loop


def settled(service, loop):
  """Objects of a service once nobody asks for anything."""
  server = service.scheduler.when_dead.__self__
  served.until(lambda: service.scheduler.load() == (0, 0))
  served.until(lambda: not server.server_state.connections)
  served.until(lambda: not server.server_state.tasks)
  service.metrics._recent.clear()  # the rates of the last ten seconds
  for _ in range(3):
    gc.collect()

  async def tasks():
    return len(asyncio.all_tasks())

  kinds = (Ticket, Answer, Choice, Ask, Request, RefusalError)
  kept = [type(x).__name__ for x in gc.get_objects() if type(x) in kinds]
  return {
    "bytes": tracemalloc.get_traced_memory()[0],
    "kept": kept,
    "tasks": asyncio.run_coroutine_threadsafe(tasks(), loop).result(60),
    "files": len(os.listdir("/proc/self/fd")),
    "arrays": len(jax.live_arrays()),
  }


def test_nothing_of_requests_is_kept_whatever_became_of_them():
  rng = random.Random(0)
  slots = served.text_slots()
  limits = Limits(body_bytes=20_000)
  with served.http_service(slots, limits=limits, queue_length=12) as actual:
    service, address = actual
    loop = loop_of(service, address)
    hundred(address, rng)  # what is made once is made
    tracemalloc.start()
    try:
      seen, statuses = [], {}
      for _ in range(_HUNDREDS):
        for status, count in hundred(address, rng).items():
          statuses[status] = statuses.get(status, 0) + count
        seen.append(settled(service, loop))
    finally:
      tracemalloc.stop()
    assert service.scheduler.is_alive()
  assert {"200", "400", "429", "413"} <= statuses.keys()
  first, last = seen[0], seen[-1]
  # What ended in the last iteration is there until the next.
  assert all(len(x["kept"]) <= slots.num_slots for x in seen), seen
  assert last["tasks"] == first["tasks"]
  assert last["files"] <= first["files"]
  assert last["arrays"] <= first["arrays"]
  grown = last["bytes"] - first["bytes"]
  assert grown < 100 * (_HUNDREDS - 1) * _LEFT, seen
