"""Middleware: names of the server, bearer tokens, and the size of a body."""

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.serving.refusals import RefusalError, response_of

# Paths that need no token.
OPEN = ("/health", "/metrics")


def allowed_hosts(host: str, more: Sequence[str] = ()) -> list[str]:
  """Host names of `TrustedHostMiddleware` for a server.

  A page of another site may have its name lead to this machine, and its browser
  then takes the server for that site's own: only the name tells.

  Args:
    host: where it listens.
    more: further names.

  Returns:
    This machine's and those; all ("*") if others reach it and none are given.
  """
  try:
    is_local = ipaddress.ip_address(host).is_loopback
  except ValueError:
    is_local = host.lower() == "localhost"
  if not is_local and not more:
    return ["*"]
  named = f"[{host}]" if ":" in host else host
  return list({"localhost", "127.0.0.1", "[::1]", named, *more})


class Guard:
  """Refuses requests without the token, of another type, or too large."""

  def __init__(self, app: ASGIApp, *, token: str | None, body_bytes: int):
    """Wraps an application; `token` is None for everybody."""
    self._app, self._token, self._body_bytes = app, token, body_bytes

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers, or refuses in OpenAI's form."""
    size = 0

    async def limited() -> Message:
      nonlocal size
      message = await receive()
      size += len(message.get("body", b""))
      if size > self._body_bytes:
        while message.get("more_body"):  # who is cut off would not hear why
          message = await receive()
        raise RefusalError(
          f"the body may have {self._body_bytes} bytes", status=413
        )
      return message

    try:
      self._check(scope)
      await self._app(scope, limited, send)
    except RefusalError as refusal:
      await response_of(refusal)(scope, receive, send)

  def _check(self, scope: Scope) -> None:
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # Pages of other sites may send anything else here without asking.
    if scope["method"] == "POST" and kind != "application/json":
      raise RefusalError("Content-Type must be application/json", status=415)
    if self._token is None or scope["path"] in OPEN:
      return
    given = headers.get("authorization", "")
    expected = f"Bearer {self._token}".encode()
    if not hmac.compare_digest(given.encode("utf-8", "replace"), expected):
      raise RefusalError(
        "a bearer token is needed, and it was not given",
        status=401, code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
      )  # fmt: skip
