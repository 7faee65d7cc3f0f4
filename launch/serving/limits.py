"""Limits on clients: bytes, time, names of the server and bearer tokens."""

import asyncio
import dataclasses
import hmac
import ipaddress
import json
import re
from collections.abc import Collection

import h11
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from launch.serving.refusals import RefusalError, error_body


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Limits on every request.

  Attributes:
    body_bytes: of a request's body.
    body_seconds: for all of it to come.
    answer_seconds: from the request to its last token.
    send_seconds: for a client to take what it is sent.
    token: the bearer token, or None.
    names: what requests may call the server by, or None for anything.
  """

  body_bytes: int = 1 << 20
  body_seconds: float = 20.0
  answer_seconds: float = 600.0
  send_seconds: float = 60.0
  token: str | None = None
  names: frozenset[str] | None = None


# What is too large is read, and dropped, up to so many times what is allowed: a
# connection that is closed with something unread is reset, and the client would
# never hear why.
_DROPPED = 16
# A name or an address, of IPv6 in brackets, and perhaps a port.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]+))(?::\d*)?")
_LOCAL = ("localhost", "127.0.0.1", "::1")


def allowed_names(
  host: str, more: Collection[str] = ()
) -> frozenset[str] | None:
  """Names by which requests may call a server.

  A page of another site may have its name lead to this machine, and its browser
  then takes the server for that site's own: only the name tells.

  Args:
    host: where it listens.
    more: further names.

  Returns:
    The names, or None (any) if others reach the server too and none are given.
  """
  try:
    is_local = ipaddress.ip_address(host).is_loopback
  except ValueError:
    is_local = host.lower() == "localhost"
  if not is_local and not more:
    return None
  return frozenset(name.lower() for name in (*_LOCAL, host, *more))


def check_name(request: Request, names: frozenset[str] | None) -> None:
  """Raises RefusalError unless the server is called by one of its names."""
  if names is None:
    return
  given = request.headers.get("host", "")
  match = _HOST.fullmatch(given.lower())
  if not match or (match[1] or match[2]) not in names:
    raise RefusalError(
      f"this server is not called {given[:80]!r} (--allowed_hosts takes "
      "further names)",
      status=403,
      code="host_not_allowed",
    )


def check_token(request: Request, token: str | None) -> None:
  """Raises RefusalError unless the request has the token, if there is one.

  The comparison takes as long whatever was sent.
  """
  if token is None:
    return
  given = request.headers.get("authorization", "")
  scheme, _, secret = given.partition(" ")
  same = hmac.compare_digest(
    secret.strip().encode("utf-8", "surrogateescape"), token.encode()
  )
  if scheme.lower() != "bearer" or not same:
    raise RefusalError(
      "a bearer token is needed, and it was not this one"
      if given
      else "a bearer token is needed",
      status=401,
      code="invalid_api_key",
      headers={"WWW-Authenticate": "Bearer"},
    )


async def body_of(request: Request, limits: Limits) -> bytes:
  """The body of a request.

  Raises:
    RefusalError: if it is too large, comes too slowly, or is no JSON by its own
      words: pages of other sites may send anything else here without asking.
    ClientDisconnect: if the client has gone.
  """
  kind = request.headers.get("content-type", "").partition(";")[0].strip()
  if kind.lower() != "application/json":
    raise RefusalError(
      f"Content-Type must be application/json, got {kind[:80]!r}", status=415
    )
  too_large = RefusalError(
    f"the body may have {limits.body_bytes} bytes",
    status=413,
    headers={"Connection": "close"},
  )
  length = request.headers.get("content-length", "")
  is_announced = length.isdecimal() and int(length[:20]) > limits.body_bytes
  if is_announced and "expect" in request.headers:
    raise too_large  # nothing of it is sent before it is asked for
  body, size = bytearray(), 0
  try:
    async with asyncio.timeout(limits.body_seconds):
      async for part in request.stream():
        size += len(part)
        if size <= limits.body_bytes:
          body += part
        elif size > _DROPPED * limits.body_bytes:
          break
  except TimeoutError:
    if not is_announced and size <= limits.body_bytes:
      raise RefusalError(
        "the body came too slowly", status=408, headers={"Connection": "close"}
      ) from None
  if is_announced or size > limits.body_bytes:
    raise too_large
  return bytes(body)


async def gone(request: Request) -> None:
  """Returns once the client has disconnected; its body must have been read."""
  try:
    while (await request.receive())["type"] != "http.disconnect":
      pass
  except ClientDisconnect:
    pass


def patient(seconds: float) -> type[H11Protocol]:
  """The protocol of uvicorn, but a connection must be of use.

  A connection is dropped if no request began within so many seconds and none
  is being answered: nothing or half of a head came, or the body of a refused
  request, or its answer is not read. uvicorn would keep such connections for
  ever.
  """

  class Patient(H11Protocol):
    def connection_made(self, transport) -> None:
      super().connection_made(transport)
      self._seen = self.cycle  # the newest request at the last look: none
      self._head = self.loop.call_later(seconds, self._look)

    def send_400_response(self, msg: str) -> None:
      """Answers a malformed request, unless an answer has begun."""
      if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
        body = json.dumps(error_body(RefusalError(msg))).encode()
        head = h11.Response(
          status_code=400,
          headers=[
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
          ],
          reason=b"Bad Request",
        )
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
          self.transport.write(self.conn.send(event))
      self.transport.close()

    def connection_lost(self, exc) -> None:
      self._head.cancel()
      super().connection_lost(exc)

    def _look(self) -> None:
      waits = (
        self.cycle is None
        or self.cycle.response_complete
        or self.transport.is_closing()
      )
      if waits and self.cycle is self._seen:
        unread = self.transport.get_write_buffer_size()  # waited for by close
        self.transport.abort() if unread else self.transport.close()
      else:
        self._seen = self.cycle if waits else None
        self._head = self.loop.call_later(seconds, self._look)

  return Patient
