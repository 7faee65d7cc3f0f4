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


def test_what_decodes_in_slots_and_answers_nobody_needs_no_server():
  names = ("starlette", "uvicorn", "prometheus_client")
  done = _without(names, "launch.tools.self_data", "--help")
  assert "No module" not in done.stderr
  assert "no such module" not in done.stderr
  assert "--answer_temperatures" in done.stdout


def test_a_package_that_is_not_installed_is_named_in_one_line():
  done = _without(("starlette",), "launch.serve")
  assert done.returncode == 2
  assert done.stderr == (
    f"error: starlette is not installed: {sys.executable} -m pip install -e "
    "'.[serve]'\n"
  )


@pytest.mark.parametrize("key", ["schlüssel", "a\tb", " key", "key\n"])
def test_a_key_that_no_header_holds_is_refused(cli, monkeypatch, capsys, key):
  """Before anything is loaded: no client could ever send it."""
  monkeypatch.setenv("SPECJAX_API_KEY", key)
  assert cli(serve.run, "--port=0") == 2
  said = capsys.readouterr().err
  assert said.startswith("error: $SPECJAX_API_KEY must be printable ASCII")
  assert said.count("\n") == 1
  assert key.strip() not in said


def test_a_template_that_is_not_there_is_refused(cli, capsys, tmp_path):
  file = tmp_path / "talk.jinja"
  assert cli(serve.run, "--port=0", f"--chat_template={file}") == 2
  said = capsys.readouterr().err
  assert said.startswith("error: --chat_template: ")
  assert str(file) in said
  assert said.count("\n") == 1


def test_a_port_that_is_taken_is_said_in_one_line(cli, capsys):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    assert cli(serve.run, f"--port={taken.getsockname()[1]}") == 2
  said = capsys.readouterr().err
  assert said.startswith("error: cannot listen on 127.0.0.1:")
  assert said.count("\n") == 1
