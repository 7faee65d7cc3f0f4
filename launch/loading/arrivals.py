"""When requests are sent: by a clock, or as answers come."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from launch.loading.client import Timed

Send = Callable[[dict[str, Any]], Coroutine[Any, Any, Timed]]


def poisson(count: int, rate: float, seed: int) -> np.ndarray:
  """When each of `count` requests is sent, from 0: `rate` a second in mean."""
  gaps = np.random.default_rng(seed).exponential(1 / rate, count)
  return np.cumsum(gaps) - gaps[0]


async def open_loop(
  bodies: Sequence[dict[str, Any]], times: Sequence[float], send: Send
) -> list[Timed]:
  """Sends each at its time, whatever became of those before."""
  start = time.monotonic()

  async def one(body, at) -> Timed:
    await asyncio.sleep(max(0.0, start + at - time.monotonic()))
    found = await send(body)
    found.sent = start + at
    return found

  return list(
    await asyncio.gather(
      *(one(body, at) for body, at in zip(bodies, times, strict=True))
    )
  )


async def closed_loop(
  bodies: Sequence[dict[str, Any]], clients: int, send: Send
) -> list[Timed]:
  """So many clients, each of which asks again as soon as it is answered."""
  left = iter(list(bodies))
  found: list[Timed] = []

  async def client() -> None:
    for body in left:
      found.append(await send(body))

  await asyncio.gather(*(client() for _ in range(clients)))
  return found
