"""HTTP routes, which read, queue, answer and count requests."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence

import anyio.to_thread
import prometheus_client
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
from launch.serving.metrics import Metrics
from launch.serving.scheduler import (
  ClosedError,
  FullError,
  Scheduler,
  Ticket,
  Update,
)
from launch.serving.schemas import Call, Defaults, RefusalError
from models.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
  """The parts of a server that routes use.

  Attributes:
    token: the required bearer token, or None.
    hosts: accepted host names; "*" is any.
    body_bytes: maximum size of a request's body.
    answer_seconds: maximum time from a request to its last token.
  """

  scheduler: Scheduler
  metrics: Metrics
  tokenizer: Tokenizer
  defaults: Defaults
  token: str | None = None
  hosts: Sequence[str] = ("*",)
  body_bytes: int = 1 << 20
  answer_seconds: float = 600.0


def application(service: Service) -> Starlette:
  """The routes of a service."""
  complete = lambda is_chat: _private(
    functools.partial(_answer, is_chat=is_chat)
  )
  app = Starlette(
    routes=[
      Route("/v1/completions", complete(False), methods=["POST"]),
      Route("/v1/chat/completions", complete(True), methods=["POST"]),
      Route("/v1/models", _private(_models)),
      Route("/health", _health),
      Route("/metrics", _metrics),
    ],
    # Against DNS rebinding: a web site's name may resolve to this machine.
    middleware=[
      Middleware(
        TrustedHostMiddleware, allowed_hosts=service.hosts, www_redirect=False
      )
    ],
    exception_handlers=dict.fromkeys(
      (RefusalError, HTTPException, ClientDisconnect, Exception), _refused
    ),
  )
  # A redirect would name whatever Host the request names.
  app.router.redirect_slashes = False
  app.state.service = service
  return app


def _private(endpoint: Callable) -> Callable:
  """Requires the bearer token for an endpoint, if there is one."""

  async def checked(request: Request) -> Response:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    token = request.app.state.service.token
    if token is not None and not (
      scheme.lower() == "bearer"
      and hmac.compare_digest(given.strip().encode("latin-1"), token.encode())
    ):
      raise RefusalError(
        "the bearer token is missing or wrong", status=401,
        code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
      )  # fmt: skip
    return await endpoint(request)

  return checked


async def _refused(request: Request, error: Exception) -> Response:
  if isinstance(error, HTTPException):
    error = RefusalError(
      str(error.detail), status=error.status_code, headers=error.headers
    )
  elif not isinstance(error, RefusalError):  # uvicorn logs the traceback
    error = RefusalError("internal error", status=500, kind="server_error")
  return JSONResponse(error.body(), error.status, error.headers)


async def _models(request: Request) -> Response:
  defaults = request.app.state.service.defaults
  model = {
    "id": defaults.model,
    "object": "model",
    "created": 0,
    "owned_by": "specjax",
    "root": defaults.model,
    "max_model_len": defaults.max_length,
  }
  return JSONResponse({"object": "list", "data": [model]})


async def _health(request: Request) -> Response:
  """200 while the scheduler runs and accepts requests."""
  service = request.app.state.service
  scheduler, status = service.scheduler, "ok"
  used, waiting = scheduler.load()
  if not scheduler.is_alive():
    status = "dead"
  elif scheduler.is_closed:
    status = "draining"
  return JSONResponse(
    {"status": status, "slots_used": used, "waiting": waiting},
    200 if status == "ok" else 503,
  )


async def _metrics(request: Request) -> Response:
  registry = request.app.state.service.metrics.registry
  return Response(
    prometheus_client.generate_latest(registry),
    media_type=prometheus_client.CONTENT_TYPE_LATEST,
  )


async def _body(request: Request, most: int) -> bytes:
  kind = request.headers.get("content-type", "").partition(";")[0]
  # Browsers let other sites send any other type without a preflight request.
  if kind.strip().lower() != "application/json":
    raise RefusalError("Content-Type must be application/json", status=415)
  body = b""
  async for part in request.stream():  # to its end, so that clients get errors
    body += part if len(body) <= most else b""
  if len(body) > most:
    raise RefusalError(f"the body must have at most {most} bytes", status=413)
  return body


async def _answer(request: Request, *, is_chat: bool) -> Response:
  service, begun = request.app.state.service, time.monotonic()
  body = await _body(request, service.body_bytes)
  # Off the event loop: tokenizing a long prompt takes a while.
  call = await anyio.to_thread.run_sync(
    lambda: schemas.read(
      body, is_chat=is_chat, tokenizer=service.tokenizer,
      defaults=service.defaults,
    )
  )  # fmt: skip
  answer = Answer(
    call, model=service.defaults.model, tokenizer=service.tokenizer
  )
  updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
  tickets = _tickets(service, call, updates, begun + service.answer_seconds)
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
      "the server is shutting down", status=503, kind="server_error",
      code="unavailable", headers={"Retry-After": "5"},
    ) from None  # fmt: skip
  cancel = lambda: service.scheduler.cancel(tickets)
  if call.body.stream:
    return _Stream(_events(call, updates, answer), cancel)
  watching = asyncio.create_task(_on_disconnect(request, cancel))
  try:
    while not answer.is_over:
      answer.add(*await updates.get())
  finally:
    watching.cancel()
    cancel()
  return JSONResponse(answer.full())


async def _on_disconnect(request: Request, cancel: Callable[[], None]) -> None:
  """Calls `cancel` once the client disconnects, after its body was read."""
  while (await request.receive())["type"] != "http.disconnect":
    pass
  cancel()


def _tickets(
  service: Service, call: Call, updates: asyncio.Queue, deadline: float
) -> list[Ticket]:
  loop = asyncio.get_running_loop()

  def deliver(index: int) -> Callable[[Update], None]:
    def put(update: Update) -> None:
      with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(updates.put_nowait, (index, update))

    return put

  choices = [
    (prompt, budget, stream)
    for prompt, budget in zip(call.prompts, call.budgets, strict=True)
    for stream in range(call.body.n)
  ]
  is_seeded = call.body.seed is not None
  return [
    Ticket(
      request=dataclasses.replace(
        call.request, token_ids=prompt, stream=stream, max_new_tokens=budget
      ),
      deliver=deliver(index),
      watch=stops.watch(service.tokenizer, call.body.stop, prompt),
      deadline=deadline,
      objective=call.objective,
      seeded=is_seeded and call.request.temperature > 0,
    )
    for index, (prompt, budget, stream) in enumerate(choices)
  ]


async def _events(
  call: Call, updates: asyncio.Queue, answer: Answer
) -> AsyncIterator[bytes]:
  try:
    while not answer.is_over:
      index, update = await updates.get()
      answer.add(index, update)
      yield answers.event(answer.chunk(index))
    if call.body.stream_options.include_usage:
      yield answers.event(answer.usage_chunk())
    yield b"data: [DONE]\n\n"
  except RefusalError as refusal:
    yield answers.event(refusal.body())


class _Stream(StreamingResponse):
  """Server-sent events; calls `cancel` when they end or the client leaves."""

  media_type = "text/event-stream"

  def __init__(self, events: AsyncIterator[bytes], cancel: Callable[[], None]):
    super().__init__(events, headers={"Cache-Control": "no-store"})
    self._cancel = cancel

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:
      self._cancel()
