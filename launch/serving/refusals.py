"""Refused requests, as OpenAI's errors."""

from typing import Any

from starlette.responses import JSONResponse


class RefusalError(Exception):
  """A request that is not answered; its fields are OpenAI's error's."""

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
    kind: str = "invalid_request_error",
    headers: dict[str, str] | None = None,
  ):
    super().__init__(message)
    self.message, self.status = message, status
    self.param, self.code, self.kind = param, code, kind
    self.headers = headers or {}


def error_body(refusal: RefusalError) -> dict[str, Any]:
  """An error as OpenAI nests it."""
  return {
    "error": {
      "message": refusal.message,
      "type": refusal.kind,
      "param": refusal.param,
      "code": refusal.code,
    }
  }


def response_of(refusal: RefusalError) -> JSONResponse:
  """The response that refuses a request."""
  return JSONResponse(error_body(refusal), refusal.status, refusal.headers)
