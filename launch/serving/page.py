"""The page at `/`: a conversation in colours, and what the slots are doing."""

import functools
import pathlib

from starlette.responses import HTMLResponse, Response

_FILE = pathlib.Path(__file__).with_name("page.html")
# It may run its own script and talk with this server, and nothing else.
_POLICY = (
  "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
  "connect-src 'self'; base-uri 'none'; form-action 'none'; "
  "frame-ancestors 'none'"
)


@functools.cache
def text() -> str:
  """The page: one file, which loads no other."""
  return _FILE.read_text("utf-8")


def response() -> Response:
  """The page as it is sent."""
  return HTMLResponse(text(), headers={"Content-Security-Policy": _POLICY})
