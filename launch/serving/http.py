"""HTTP routes: requests are read, queued, answered and counted."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from launch import stops
from launch.serving import answers, schemas
from launch.serving.answers import Answer
from launch.serving.limits import Guard
from launch.serving.metrics import CONTENT_TYPE, Metrics
from launch.serving.refusals import RefusalError, error_body, response_of
from launch.serving.scheduler import (
  ClosedError,
  FullError,
  News,
  Scheduler,
  Ticket,
)
from launch.serving.schemas import Ask, Defaults
from models.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
  """The parts of a server that routes use.

  Attributes:
    scheduler: which runs.
    metrics: its.
    tokenizer: of the pair.
    defaults: of requests.
    token: the bearer token that is asked for, or None.
    hosts: names that requests may call the server by; "*" is any.
    body_bytes: of a request's body, at most.
    answer_seconds: from a request to its last token, at most.
    stuck_seconds: how long an iteration on the device may last before the
      server counts as dead.
  """

  scheduler: Scheduler
  metrics: Metrics
  tokenizer: Tokenizer
  defaults: Defaults
  token: str | None = None
  hosts: tuple[str, ...] = ("*",)
  body_bytes: int = 1 << 20
  answer_seconds: float = 600.0
  stuck_seconds: float = 120.0


def application(service: Service) -> Starlette:
  """The routes of a service."""
  app = Starlette(
    routes=[
      Route("/v1/completions", _completions, methods=["POST"]),
      Route("/v1/chat/completions", _chat_completions, methods=["POST"]),
      Route("/v1/models", _models),
      Route("/v1/models/{name:path}", _model),
      Route("/health", _health),
      Route("/metrics", _metrics),
    ],
    middleware=[
      Middleware(
        TrustedHostMiddleware, allowed_hosts=service.hosts, www_redirect=False
      ),
      Middleware(Guard, token=service.token, body_bytes=service.body_bytes),
    ],
    exception_handlers={
      RefusalError: _refused,
      HTTPException: _not_here,
      ClientDisconnect: _left,
      Exception: _bug,
    },
  )
  app.state.service = service
  return app


async def _refused(request: Request, error: Exception) -> Response:
  assert isinstance(error, RefusalError)
  return response_of(error)


async def _not_here(request: Request, error: Exception) -> Response:
  assert isinstance(error, HTTPException)
  return response_of(RefusalError(str(error.detail), status=error.status_code))


async def _left(request: Request, error: Exception) -> Response:
  return Response(status_code=499)  # nobody hears it


async def _bug(request: Request, error: Exception) -> Response:
  return response_of(  # uvicorn writes the traceback
    RefusalError("the server made a mistake", status=500, kind="server_error")
  )


# ----------------------------------------------------------- what is not asked


async def _models(request: Request) -> Response:
  service = request.app.state.service
  return JSONResponse({"object": "list", "data": [_described(service)]})


async def _model(request: Request) -> Response:
  service, name = request.app.state.service, request.path_params["name"]
  if name != service.defaults.model:
    raise schemas.no_model(name, service.defaults)
  return JSONResponse(_described(service))


def _described(service: Service) -> dict[str, Any]:
  return {
    "id": service.defaults.model,
    "object": "model",
    "created": 0,
    "owned_by": "specjax",
    "root": service.defaults.model,
    "max_model_len": service.defaults.max_length,
  }


async def _health(request: Request) -> Response:
  """200 while the device's thread lives, moves, and takes requests."""
  service = request.app.state.service
  scheduler = service.scheduler
  used, waiting = scheduler.load()
  stuck = scheduler.stuck()
  status = "ok"
  if not scheduler.is_alive():
    status = "dead"
  elif stuck > service.stuck_seconds:
    status = "stuck"
  elif scheduler.is_closed:
    status = "draining"
  return JSONResponse(
    {
      "status": status,
      "slots_used": used,
      "waiting": waiting,
      "seconds_in_iteration": round(stuck, 3),
    },
    200 if status == "ok" else 503,
  )


async def _metrics(request: Request) -> Response:
  text = request.app.state.service.metrics.text()
  return Response(text, media_type=CONTENT_TYPE)


# ------------------------------------------------------------- what is asked


async def _completions(request: Request) -> Response:
  return await _answer(request, is_chat=False)


async def _chat_completions(request: Request) -> Response:
  return await _answer(request, is_chat=True)


async def _answer(request: Request, *, is_chat: bool) -> Response:
  service, begun = request.app.state.service, time.monotonic()
  body = await request.body()
  # Off the loop: a long prompt is tokenized for a while.
  ask = await anyio.to_thread.run_sync(
    lambda: schemas.read(
      body,
      is_chat=is_chat,
      tokenizer=service.tokenizer,
      defaults=service.defaults,
    )
  )
  answer = Answer(
    ask, model=service.defaults.model, tokenizer=service.tokenizer
  )
  news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
  tickets = _tickets(service, ask, news, begun + service.answer_seconds)
  try:
    service.scheduler.submit(tickets)
  except FullError:
    raise RefusalError(
      "all slots are in use and the queue is full: try again",
      status=429, kind="rate_limit_error", code="rate_limit_exceeded",
      headers={"Retry-After": "1"},
    ) from None  # fmt: skip
  except ClosedError:
    raise RefusalError(
      "the server takes no more requests", status=503, kind="server_error",
      code="unavailable", headers={"Retry-After": "5"},
    ) from None  # fmt: skip
  cancel = lambda: service.scheduler.cancel(tickets)
  if ask.request.stream:
    return _Stream(_events(ask, news, answer), cancel)
  watching = asyncio.create_task(_at_departure(request, cancel))
  try:
    while not answer.is_over:
      answer.hear(*await news.get())
  finally:
    watching.cancel()
    cancel()
  return JSONResponse(answer.whole())


async def _at_departure(request: Request, cancel: Callable[[], None]) -> None:
  """Calls `cancel` once the client has left; all of its body has come."""
  while (await request.receive())["type"] != "http.disconnect":
    pass
  cancel()


def _tickets(
  service: Service, ask: Ask, news: asyncio.Queue, deadline: float
) -> list[Ticket]:
  loop = asyncio.get_running_loop()

  def deliver(index: int) -> Callable[[News], None]:
    def hear(one: News) -> None:
      with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(news.put_nowait, (index, one))

    return hear

  choices = [
    (prompt, budget, stream)
    for prompt, budget in zip(ask.prompts, ask.budgets, strict=True)
    for stream in range(ask.request.n)
  ]
  is_seeded = ask.request.seed is not None
  return [
    Ticket(
      asked=dataclasses.replace(
        ask.asked, token_ids=prompt, stream=stream, max_new_tokens=budget
      ),
      deliver=deliver(index),
      # Stop strings are the device's thread's business: it ends the row.
      watch=stops.watch(service.tokenizer, ask.request.stop_texts, prompt),
      deadline=deadline,
      objective=ask.objective,
      seeded=is_seeded and ask.asked.temperature > 0,
    )
    for index, (prompt, budget, stream) in enumerate(choices)
  ]


async def _events(
  ask: Ask, news: asyncio.Queue, answer: Answer
) -> AsyncIterator[bytes]:
  try:
    while not answer.is_over:
      if chunk := answer.hear(*await news.get()):
        yield answers.event(chunk)
    if ask.request.stream_options.include_usage:
      yield answers.event(answer.usage_chunk())
    yield answers.LAST_EVENT
  except RefusalError as refusal:
    yield answers.event(error_body(refusal))


class _Stream(StreamingResponse):
  """Server-sent events, which are given up when their client has left."""

  media_type = "text/event-stream"

  def __init__(self, events: AsyncIterator[bytes], cancel: Callable[[], None]):
    super().__init__(events, headers={"Cache-Control": "no-store"})
    self._cancel = cancel

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:
      self._cancel()
