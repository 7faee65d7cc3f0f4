"""Names that requests may call a server by, so that no page borrows one."""

import asyncio
import json
import types

import pytest

from launch.serving import http, limits
from launch.serving.limits import Limits


def get(names, path, *host, method="GET"):
  """Status and body of a request with these Host headers."""
  service = types.SimpleNamespace(
    limits=Limits(names=names), defaults=types.SimpleNamespace(model="toy")
  )
  scope = {
    "type": "http", "http_version": "1.1", "method": method, "path": path,
    "raw_path": path.encode(), "query_string": b"", "scheme": "http",
    "headers": [(b"host", name.encode()) for name in host],
  }  # fmt: skip
  sent = []

  async def receive():
    return {"type": "http.request", "body": b"{}", "more_body": False}

  async def send(message):
    sent.append(message)

  asyncio.run(http.application(service)(scope, receive, send))
  return sent[0]["status"], sent[1]["body"]


LOCAL = limits.allowed_names("127.0.0.1")


@pytest.mark.parametrize(
  "name",
  [
    "localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:80",
    "[::1]", "[::1]:8000",
  ],
)  # fmt: skip
def test_this_machine_is_called_by_its_names(name):
  assert get(LOCAL, "/", name)[0] == 200


@pytest.mark.parametrize(
  "name",
  [
    "evil.example", "evil.example:8000", "localhost.evil.example",
    "evil.localhost", "127.0.0.1.evil.example", "[::2]", "10.0.0.1:8000", "",
    ":8000", "[::1]evil", "[localhost]", "localhost:8000:evil.example",
  ],
)  # fmt: skip
def test_a_name_that_only_leads_here_is_refused_everywhere(name):
  for path in (
    "/",
    "/live",
    "/health",
    "/metrics",
    "/v1/models",
    "/v1/models/x",
  ):
    status, body = get(LOCAL, path, name)
    assert status == 403
    assert json.loads(body)["error"]["code"] == "host_not_allowed"
  assert get(LOCAL, "/v1/completions", name, method="POST")[0] == 403


def test_who_says_no_name_is_refused():
  assert get(LOCAL, "/")[0] == 403


def test_a_server_for_others_has_any_name_unless_some_are_given():
  assert limits.allowed_names("0.0.0.0") is None
  assert limits.allowed_names("10.1.2.3") is None
  assert limits.allowed_names("") is None
  assert get(None, "/", "evil.example")[0] == 200
  given = limits.allowed_names("0.0.0.0", ["Api.Example"])
  assert get(given, "/", "api.example:443")[0] == 200
  assert get(given, "/", "evil.example")[0] == 403


def test_names_of_a_server_for_this_machine():
  for host in ("127.0.0.1", "::1", "localhost"):
    assert limits.allowed_names(host) == LOCAL
  more = limits.allowed_names("127.0.0.2", ["proxy.example"])
  assert more == LOCAL | {"127.0.0.2", "proxy.example"}
