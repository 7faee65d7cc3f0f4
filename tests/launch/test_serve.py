"""The command: what it refuses before anything is loaded."""

import socket
import subprocess
import sys

import pytest
import several

from launch import serve

# A finder that says of packages that they are not there.
_WITHOUT = """
import runpy, sys
class Nowhere:
  def find_spec(self, name, path=None, target=None):
    if name in {names!r}:
      raise ModuleNotFoundError("no such module", name=name)
sys.meta_path.insert(0, Nowhere())
sys.argv = [{command!r}, *{args!r}]
runpy.run_module({command!r}, run_name="__main__")
"""


def _without(names, command, *args):
  code = _WITHOUT.format(names=names, command=command, args=args)
  return subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True, text=True, check=False, timeout=several.PATIENCE,
  )  # fmt: skip


def test_a_package_that_is_not_installed_is_named_in_one_line():
  done = _without(("starlette",), "launch.serve")
  assert done.returncode == 2
  assert done.stderr == (
    f"error: starlette is not installed: {sys.executable} -m pip install -e "
    "'.[serve]'\n"
  )


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--chat_template=no/talk.jinja", "no/talk.jinja: No such file"),
    ("--host=no.such.host.invalid", "cannot listen on no.such.host.invalid:"),
  ],
)
def test_a_mistake_is_one_line(cli, capsys, flag, message):
  """Before anything is loaded."""
  assert cli(serve.run, "--port=0", flag) == 2
  said = capsys.readouterr().err
  assert said.startswith(f"error: {message}")
  assert said.count("\n") == 1


def test_a_port_that_is_taken_is_said_in_one_line(cli, capsys):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    assert cli(serve.run, f"--port={taken.getsockname()[1]}") == 2
  said = capsys.readouterr().err
  assert said.startswith("error: cannot listen on 127.0.0.1:")
  assert said.count("\n") == 1
