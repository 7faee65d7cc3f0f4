"""The page at `/`: a chat with token origins in colour, and live metrics."""

import base64
import functools
import hashlib
import pathlib
import re

from starlette.responses import HTMLResponse, Response

_FILE = pathlib.Path(__file__).with_name("page.html")


@functools.cache
def text() -> str:
  """The page: one file, which loads no other."""
  return _FILE.read_text("utf-8")


@functools.cache
def policy() -> str:
  """Content security policy: the page's own script and server, nothing else."""
  return (
    f"default-src 'none'; style-src {_own('style')}; "
    f"script-src {_own('script')}; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
  )


def _own(tag: str) -> str:
  """The source, a hash, by which the policy allows the page's one such tag."""
  (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text(), re.DOTALL)
  digest = hashlib.sha256(inside.encode("utf-8")).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"


def response() -> Response:
  """The page as it is sent."""
  return HTMLResponse(text(), headers={"Content-Security-Policy": policy()})
