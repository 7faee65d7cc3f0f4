"""The command: what it refuses before anything is compiled."""

import socket

import pytest

from launch import serve


@pytest.mark.parametrize(
  "flags, message",
  [
    (("--port=0", "--chat_template=no/talk.jinja"), "no/talk.jinja: No such"),
    (("--port=0", "--host=no.such.host.invalid"), "cannot listen on no.such."),
    (("--port=0", "--config.drafter=online(model)"), "ladder and online are"),
    (("--port=TAKEN",), "cannot listen on 127.0.0.1:"),
  ],
)
def test_startup_errors_print_one_line_and_exit_with_2(
  cli, capsys, flags, message
):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = str(taken.getsockname()[1])
    assert cli(serve.run, *(x.replace("TAKEN", port) for x in flags)) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: {message}")
