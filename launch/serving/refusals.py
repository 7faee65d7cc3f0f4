"""Refused requests, as OpenAI's errors."""

from typing import Any


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
  """An error as OpenAI nests it; what is no character of it is escaped."""

  def shown(text: str | None) -> str | None:
    return text and text.encode("utf-8", "backslashreplace").decode()

  return {
    "error": {
      "message": shown(refusal.message),
      "type": refusal.kind,
      "param": shown(refusal.param),
      "code": refusal.code,
    }
  }
