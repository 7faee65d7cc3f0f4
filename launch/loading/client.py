"""One streamed request, and when each chunk of its answer came."""

import asyncio
import dataclasses
import json
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

import h11


@dataclasses.dataclass(kw_only=True)
class Timed:
  """A request and its answer; times are seconds of one clock.

  Attributes:
    sent: when it was sent; in an open loop, when it was to be: a client that
      lags is no excuse.
    chunks: when each chunk with text came.
    ended: when the answer was whole, or it failed.
    num_tokens: of the completion, by the server's own count.
    error: why there is no whole answer, or None.
  """

  sent: float
  chunks: list[float] = dataclasses.field(default_factory=list)
  ended: float = 0.0
  num_tokens: int = 0
  error: str | None = None


# Seconds after which an answer that has not ended counts as none.
PATIENCE = 600.0


async def ask(
  url: str, path: str, body: dict[str, Any], *, token: str | None = None
) -> Timed:
  """Sends a request and reads its stream to the end."""
  found = Timed(sent=time.monotonic())
  try:
    body = {
      **body, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with asyncio.timeout(PATIENCE):
      async for event in _events(url, path, body, token):
        if "error" in event:
          raise ConnectionError(event["error"]["message"])
        if event.get("usage"):
          found.num_tokens = event["usage"]["completion_tokens"]
        if any(map(_text_of, event.get("choices", []))):
          found.chunks.append(time.monotonic())
    if not found.num_tokens:
      raise ConnectionError("the stream ended before its usage")
  except (OSError, ValueError, KeyError, h11.RemoteProtocolError) as error:
    found.error = " ".join(str(error).split()) or type(error).__name__
  found.ended = time.monotonic()
  return found


def _text_of(choice: dict[str, Any]) -> str:
  return choice.get("text") or choice.get("delta", {}).get("content") or ""


async def _events(
  url: str, path: str, body: dict[str, Any], token: str | None
) -> AsyncIterator[dict[str, Any]]:
  """The events of an answer.

  Raises:
    ConnectionError: if there is none.
  """
  text = b""
  async for part in _body(url, path, json.dumps(body).encode(), token):
    *whole, text = (text + part).split(b"\n\n")
    for event in whole:
      data = event.removeprefix(b"data: ")
      if data == b"[DONE]":
        return
      yield json.loads(data)


async def _body(
  url: str, path: str, body: bytes, token: str | None
) -> AsyncIterator[bytes]:
  where = urllib.parse.urlsplit(url)
  safe = where.scheme == "https"
  reader, writer = await asyncio.open_connection(
    where.hostname, where.port or (443 if safe else 80), ssl=safe or None
  )
  try:
    line = h11.Connection(h11.CLIENT)
    headers = [
      ("Host", where.netloc),
      ("Content-Type", "application/json"),
      ("Content-Length", str(len(body))),
      ("Connection", "close"),
    ]
    if token:
      headers.append(("Authorization", f"Bearer {token}"))
    for event in (
      h11.Request(method="POST", target=path, headers=headers),
      h11.Data(data=body),
      h11.EndOfMessage(),
    ):
      writer.write(line.send(event) or b"")
    await writer.drain()
    status = 0
    while True:
      event = line.next_event()
      if event is h11.NEED_DATA:
        line.receive_data(await reader.read(1 << 16))
      elif isinstance(event, h11.Response):
        status = event.status_code
        if status != 200:
          raise ConnectionError(f"status {status}")
      elif isinstance(event, h11.Data):
        yield bytes(event.data)
      else:
        return
  finally:
    writer.close()
