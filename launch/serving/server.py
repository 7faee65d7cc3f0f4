"""Builds the HTTP service over slots, and runs it until it is to end."""

import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping

import ml_collections
import uvicorn

from launch import processes
from launch.assembly import pair
from launch.serving import builder, http, objectives
from launch.serving.http import Service
from launch.serving.metrics import Metrics
from launch.serving.scheduler import Scheduler
from launch.serving.schemas import Defaults
from launch.serving.slots import Slots

# To send what is written, once nothing more is decoded.
_LAST_SECONDS = 5


def make_service(
  config: ml_collections.ConfigDict,
  loaded: pair.Models,
  slots: Slots,
  *,
  queue: int = 64,
  depth_policy: str = "whole",
  classes: Mapping[str, float] | None = None,
  name: str | None = None,
  chat_template: str | None = None,
  **more,
) -> Service:
  """The service over these slots; its scheduler is not started.

  Args:
    config, loaded: as of `builder.make_slots`.
    slots: of `builder.make_slots`.
    queue: requests that may wait for a slot.
    depth_policy: as of the slots.
    classes: objectives by name, seconds a token.
    name: the model's, or None for that of its checkpoint.
    chat_template: Jinja, in place of the target's own, or None.
    **more: other fields of `Service`.
  """
  models = pair.assemble(config, loaded)
  tokenizer = models.tokenizer
  if chat_template is not None:
    tokenizer = dataclasses.replace(tokenizer, chat_template=chat_template)
  name = name or os.path.basename(os.path.normpath(config.target))
  metrics = Metrics(model=name, num_slots=slots.num_slots, depth=slots.depth)
  adapts = depth_policy != "whole"
  pace, controller = slots.pace(), None
  if adapts:
    policy = objectives.POLICIES[depth_policy]
    controller = objectives.Controller(
      policy, slots.depths, pace.seconds_of_round
    )
  scheduler = Scheduler(
    slots, builder.leading(slots), queue_length=queue, metrics=metrics,
    pace=pace, choose_depth=controller, keeps_in_touch=processes.several(),
  )  # fmt: skip
  warp = ("temperature", "top_k", "top_p", "min_p")
  defaults = Defaults(
    model=name,
    warp={setting: config[setting] for setting in warp},
    vocab_size=models.decoder.vocab_size,
    max_new_tokens=config.max_new_tokens,
    longest_prompt=slots.longest,
    max_length=slots.max_length,
    most=slots.num_slots + queue,
    scores=slots.scores,
    has_objectives=adapts,
    classes=classes or {},
  )
  return Service(
    scheduler=scheduler, metrics=metrics, tokenizer=tokenizer,
    defaults=defaults, **more,
  )  # fmt: skip


def make_server(service: Service) -> uvicorn.Server:
  """The web server of a service; more connections at a time get 503."""
  config = uvicorn.Config(
    http.application(service), ws="none", lifespan="off",
    log_config=None,  # its own would close the log that there is
    log_level="warning", access_log=False, server_header=False,
    limit_concurrency=1000, timeout_keep_alive=30,
    timeout_graceful_shutdown=_LAST_SECONDS,
  )  # fmt: skip
  return uvicorn.Server(config)


def listening(host: str, port: int) -> socket.socket:
  """A socket that is bound, and refuses until it listens; port 0 is any."""
  bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
  try:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
  except (OSError, OverflowError) as error:
    bound.close()
    raise ValueError(f"cannot listen on {host}:{port}: {error}") from None
  return bound


def run(
  service: Service,
  where: socket.socket,
  *,
  drain_seconds: float,
  ready: Callable[[], None] = lambda: None,
) -> bool:
  """Serves until a signal, or until the scheduler's thread has died.

  Then requests get 503, and running ones are answered; on a second signal, or
  when the time is over, they get 503 too.
  """
  signals: list[int] = []
  for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, lambda number, frame: signals.append(number))
  server, scheduler = make_server(service), service.scheduler
  # uvicorn leaves signals alone where it is not in the main thread.
  thread = threading.Thread(
    target=server.run, kwargs={"sockets": [where]}, daemon=True
  )
  where.listen(1024)  # who is told that it listens may connect at once
  thread.start()
  ready()
  while scheduler.is_alive() and thread.is_alive() and not signals:
    time.sleep(0.05)
  scheduler.close()
  end = time.monotonic() + drain_seconds
  while scheduler.is_alive() and len(signals) < 2 and time.monotonic() < end:
    time.sleep(0.05)
  scheduler.close(at_once=True)
  ended = scheduler.join(_LAST_SECONDS)
  server.should_exit = True
  thread.join(2 * _LAST_SECONDS)
  return ended and scheduler.error is None
