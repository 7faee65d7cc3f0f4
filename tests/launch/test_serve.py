"""The command: what it refuses before anything is loaded."""

import socket
import subprocess
import sys

import pytest
import several

from launch import serve

# A finder that says of a package that it is not there.
_WITHOUT = """
import runpy, sys
class Nowhere:
  def find_spec(self, name, path=None, target=None):
    if name == "starlette":
      raise ModuleNotFoundError("no such module", name=name)
sys.meta_path.insert(0, Nowhere())
sys.argv = ["launch.serve"]
runpy.run_module("launch.serve", run_name="__main__")
"""


def test_a_package_that_is_not_installed_is_named_in_one_line():
  done = subprocess.run(
    [sys.executable, "-c", _WITHOUT],
    capture_output=True, text=True, check=False, timeout=several.PATIENCE,
  )  # fmt: skip
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: starlette is not installed: ")


@pytest.mark.parametrize(
  "flags, message",
  [
    (("--port=0", "--chat_template=no/talk.jinja"), "no/talk.jinja: No such"),
    (("--port=0", "--host=no.such.host.invalid"), "cannot listen on no.such."),
    (("--port=TAKEN",), "cannot listen on 127.0.0.1:"),
  ],
)
def test_a_mistake_is_one_line(cli, capsys, flags, message):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = str(taken.getsockname()[1])
    assert cli(serve.run, *(x.replace("TAKEN", port) for x in flags)) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: {message}")
