"""HTTP routes: requests are read, queued, answered and counted."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launch import stops
from launch.serving import answers, limits, page, schemas
from launch.serving.answers import Answer
from launch.serving.limits import Limits
from launch.serving.metrics import CONTENT_TYPE, Metrics
from launch.serving.refusals import RefusalError, error_body
from launch.serving.scheduler import (
  ClosedError,
  Finish,
  FullError,
  News,
  Scheduler,
  Ticket,
)
from launch.serving.schemas import Ask, Defaults
from models.tokenizers import Tokenizer

_log = logging.getLogger(__name__)
_full = lambda: RefusalError(
  "all slots are in use and the queue is full: try again",
  status=429, kind="rate_limit_error", code="rate_limit_exceeded",
  headers={"Retry-After": "1"},
)  # fmt: skip
_closed = lambda: RefusalError(
  "the server takes no more requests", status=503, kind="server_error",
  code="unavailable", headers={"Retry-After": "5"},
)  # fmt: skip
# Of an answer that is cancelled, as only a server does that ends.
_ended = answers.FAILURES[Finish.BROKEN]
# What a client hears of that has left.
_LEFT = Response(status_code=499)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
  """The parts of a server that routes use.

  Attributes:
    scheduler: which runs.
    metrics: its.
    tokenizer: of the pair.
    defaults, limits: what holds for requests.
    stuck_seconds: how long an iteration on the device may last before the
      server counts as dead.
    about: what the page says of the pair.
  """

  scheduler: Scheduler
  metrics: Metrics
  tokenizer: Tokenizer
  defaults: Defaults
  limits: Limits
  stuck_seconds: float = 120.0
  about: dict[str, Any] = dataclasses.field(default_factory=dict)


def application(service: Service) -> Starlette:
  """The routes of a service."""
  guarded = lambda handler: _checked(
    handler, service.limits.names, service.limits.token
  )
  for_all = lambda handler: _checked(
    lambda request: handler(), service.limits.names, None
  )
  answering = lambda is_chat: guarded(
    lambda request: _answer(service, request, is_chat)
  )
  tokens = lambda work: guarded(lambda request: _tokens(service, request, work))
  routes = [
    Route("/v1/completions", answering(False), methods=["POST"]),
    Route("/v1/chat/completions", answering(True), methods=["POST"]),
    Route("/tokenize", tokens(schemas.tokenize), methods=["POST"]),
    Route("/detokenize", tokens(schemas.detokenize), methods=["POST"]),
    Route("/v1/models", guarded(lambda request: _models(service))),
    Route("/v1/models/{name:path}", guarded(lambda r: _model(service, r))),
    Route("/health", for_all(lambda: _health(service))),
    Route("/metrics", for_all(lambda: _metrics(service))),
    Route("/live", for_all(lambda: _live(service))),
    Route("/", for_all(page.response)),
  ]

  def not_here(request: Request, error: Exception) -> Response:
    try:
      limits.check_name(request, service.limits.names)
    except RefusalError as refusal:
      return _refused(refusal)
    return _not_here(error)

  app = Starlette(
    routes=routes, exception_handlers={HTTPException: not_here, Exception: _bug}
  )
  # It would send clients to wherever they say that they are, unchecked.
  app.router.redirect_slashes = False
  return app


def _checked(
  handler: Callable, names: frozenset[str] | None, token: str | None
):
  """A handler behind names and a token; its refusals are OpenAI's errors."""

  async def endpoint(request: Request) -> Response:
    try:
      limits.check_name(request, names)
      limits.check_token(request, token)
      response = handler(request)
      return await response if asyncio.iscoroutine(response) else response
    except RefusalError as refusal:
      return _refused(refusal)
    except ClientDisconnect:
      return _LEFT
    except asyncio.CancelledError:
      return _refused(_ended())

  return endpoint


async def crowded(scope, receive, send) -> None:
  """The answer where there are more connections than there may be."""
  refusal = RefusalError(
    "there are too many connections: try again",
    status=503, kind="server_error", code="unavailable",
    headers={"Connection": "close", "Retry-After": "1"},
  )  # fmt: skip
  await _refused(refusal)(scope, receive, send)


def _refused(refusal: RefusalError) -> Response:
  return JSONResponse(error_body(refusal), refusal.status, refusal.headers)


def _not_here(error: Exception) -> Response:
  assert isinstance(error, HTTPException)
  return _refused(
    RefusalError(
      str(error.detail),
      status=error.status_code,
      headers=dict(error.headers or {}),
    )
  )


def _bug(request: Request, error: Exception) -> Response:
  del request, error  # uvicorn writes its traceback
  return _refused(
    RefusalError("the server made a mistake", status=500, kind="server_error")
  )


# ----------------------------------------------------------- what is not asked


def _models(service: Service) -> Response:
  return JSONResponse({"object": "list", "data": [_described(service)]})


def _model(service: Service, request: Request) -> Response:
  name = request.path_params["name"]
  if name != service.defaults.model:
    raise RefusalError(
      f"there is no model {name[:80]!r}, only {service.defaults.model!r}",
      status=404, code="model_not_found",
    )  # fmt: skip
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


def _health(service: Service) -> Response:
  """200 while the device's thread lives, moves, and takes requests."""
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


def _metrics(service: Service) -> Response:
  return Response(service.metrics.text(), media_type=CONTENT_TYPE)


def _live(service: Service) -> Response:
  used, waiting = service.scheduler.load()
  return JSONResponse(
    {
      **service.about,
      **service.metrics.live(),
      "slots_used": used,
      "waiting": waiting,
    }
  )


# ------------------------------------------------------------- what is asked


async def _answer(service: Service, request: Request, is_chat: bool):
  begun = time.monotonic()
  body = await limits.body_of(request, service.limits)
  # Off the loop: a long prompt is tokenised for a while.
  ask = await anyio.to_thread.run_sync(
    lambda: schemas.read(
      body,
      is_chat=is_chat,
      tokenizer=service.tokenizer,
      defaults=service.defaults,
    )
  )
  news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
  deadline = begun + service.limits.answer_seconds
  tickets = _tickets(service, ask, news, deadline)
  answer = Answer(
    ask, model=service.defaults.model, tokenizer=service.tokenizer
  )
  try:
    service.scheduler.submit(tickets)
  except FullError:
    raise _full() from None
  except ClosedError:
    raise _closed() from None
  if ask.stream:
    return _Stream(service, request, ask, tickets, news, answer)
  with _cancelled_at_the_end(service, tickets):
    return await _first(_whole(news, answer), limits.gone(request))


async def _tokens(service: Service, request: Request, work: Callable):
  body = await limits.body_of(request, service.limits)
  return JSONResponse(
    await anyio.to_thread.run_sync(
      work, body, service.tokenizer, service.defaults
    )
  )


def _tickets(
  service: Service, ask: Ask, news: asyncio.Queue, deadline: float
) -> list[Ticket]:
  loop = asyncio.get_running_loop()

  def deliver(index: int) -> Callable[[News], None]:
    def hear(one: News) -> None:
      with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(news.put_nowait, (index, one))

    return hear

  # Stop strings are the thread's business too: it ends the row.
  choices = [
    (prompt, budget, stream)
    for prompt, budget in zip(ask.prompts, ask.budgets, strict=True)
    for stream in range(ask.num_choices)
  ]
  return [
    Ticket(
      asked=dataclasses.replace(
        ask.asked,
        token_ids=prompt,
        stream=stream,
        max_new_tokens=budget,
      ),
      deliver=deliver(index),
      watch=stops.watch(service.tokenizer, ask.stop, prompt),
      deadline=deadline,
      objective=ask.objective,
      seeded=ask.is_seeded and ask.asked.temperature > 0,
    )
    for index, (prompt, budget, stream) in enumerate(choices)
  ]


@contextlib.contextmanager
def _cancelled_at_the_end(service: Service, tickets: list[Ticket]):
  """Cancels tickets that are not over when their client has gone."""
  try:
    yield
  finally:
    service.scheduler.cancel(tickets)


async def _whole(news: asyncio.Queue, answer: Answer) -> Response:
  while not answer.is_over:
    answer.hear(*await news.get())
  return JSONResponse(answer.whole())


async def _first(work, left) -> Response:
  """The result of the work, unless the client leaves before."""
  tasks = [asyncio.ensure_future(work), asyncio.ensure_future(left)]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return tasks[0].result() if tasks[0].done() else _LEFT
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _events(
  ask: Ask, news: asyncio.Queue, answer: Answer
) -> AsyncIterator[bytes]:
  try:
    while not answer.is_over:
      if chunk := answer.hear(*await news.get()):
        yield answers.event(chunk)
    if ask.usage:
      yield answers.event(answer.usage_chunk())
    yield answers.LAST_EVENT
  except RefusalError as refusal:
    yield answers.event(error_body(refusal))


class _Stream(Response):
  """Events as they come, to a client that takes them."""

  media_type = "text/event-stream"

  def __init__(self, service, request, ask, tickets, news, answer):
    super().__init__(headers={"Cache-Control": "no-store"})
    del self.headers["content-length"]
    self._service, self._request, self._tickets = service, request, tickets
    self._work = lambda: _events(ask, news, answer)

  async def __call__(self, scope, receive, send) -> None:
    seconds, begun = self._service.limits.send_seconds, False
    part = lambda body, more: {
      "type": "http.response.body", "body": body, "more_body": more,
    }  # fmt: skip

    async def put(message: dict[str, Any]) -> None:
      async with asyncio.timeout(seconds):
        await send(message)

    async def work() -> Response:
      nonlocal begun
      await put(
        {
          "type": "http.response.start",
          "status": 200,
          "headers": self.raw_headers,
        }
      )
      begun = True
      async for data in self._work():
        await put(part(data, True))
      await put(part(b"", False))
      return _LEFT

    with _cancelled_at_the_end(self._service, self._tickets):
      try:
        await _first(work(), limits.gone(self._request))
      except TimeoutError:
        _log.info("a client takes nothing of what it is sent")
      except asyncio.CancelledError:
        if not begun:
          await _refused(_ended())(scope, receive, send)
          return
        await send(part(answers.event(error_body(_ended())), True))
        await send(part(b"", False))
