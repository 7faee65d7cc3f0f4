"""`launch.terminal`: nothing from outside is obeyed by a terminal."""

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import time
from unittest import mock

import absl.logging
import pytest
import rich.text
import several
import tqdm

from launch import cli, terminal

CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"
EVIL = f"a{CLIPBOARD}\x1b[2J\x9b2J\u202egpj\x7f\r"
SHOWN = "a␛]52;c;cm0gLXJm␇␛[2J\\x9b2J\\u202egpj␡␍"


def test_control_characters_become_visible_and_text_stays():
  assert terminal.visible(EVIL) == SHOWN
  assert terminal.visible("\ud800\u2028\U000e0041") == (
    "\\ud800\\u2028\\U000e0041"
  )
  for text in ("def f(x):\n\treturn 'é' ⟨x⟩", "می\u200cخواهم", "👩\u200d🔬"):
    assert terminal.visible(text) == text
  assert terminal.visible(SHOWN) == SHOWN


@contextlib.contextmanager
def streams():
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    with terminal.guarded():
      yield out, err
    assert (sys.stdout, sys.stderr) == (out, err)


def test_streams_consoles_and_the_log_are_guarded(monkeypatch):
  log = absl.logging.get_absl_handler().python_handler
  with streams() as (out, err):
    print(EVIL, end="")
    console = terminal.console(force_terminal=True, width=200)
    console.print(rich.text.Text(EVIL, style="red"))
    console.print_json('{"a": "\\u009b\\u202e"}')
    print(EVIL, file=sys.stderr)
    warning = "warning", logging.WARNING, "", 0, "the tensor %s", (EVIL,), None
    with io.StringIO() as stream:
      monkeypatch.setattr(log, "stream", stream)
      terminal.guard()
      log.handle(logging.LogRecord(*warning))
      print(stream.getvalue(), file=err)
  shown, colours = out.getvalue(), r"\x1b\[[\d;]*m"
  assert shown.startswith(SHOWN)
  assert re.search(colours, shown)  # rich's colours are obeyed
  assert '"\\u009b\\u202e"' in re.sub(colours, "", shown)  # still JSON
  for text in (re.sub(colours, "", shown), err.getvalue()):
    assert text.replace("\n", "").isprintable()
  assert err.getvalue().count(SHOWN) == 2


def test_progress_bars_may_return_to_the_lines_start():
  with streams() as (_, err):
    for _ in tqdm.tqdm(range(2), desc="\x1b[2J", position=1):
      tqdm.tqdm.write(EVIL, file=sys.stderr)
  assert "\r␛[2J:   0%" in err.getvalue()
  assert SHOWN in err.getvalue()
  assert set(re.findall(r"\x1b(..)", err.getvalue())) == {"[A"}


def test_messages_and_tracebacks_are_guarded(capsys):
  def fails(_):
    raise cli.UserError(f"no such tensor: {EVIL}")

  assert cli.execute(fails, ["test"]) == 2
  assert f"no such tensor: {SHOWN[:-1]}" in capsys.readouterr().err
  assert cli.execute(fails, ["test", EVIL]) == 2
  assert capsys.readouterr().err.replace("\n", "").isprintable()


@pytest.mark.parametrize(
  "command",
  [
    [
      "launch.studies.rules",
      "--target=.5,.5",
      "--draft=.25,.75",
      "--rule=token",
    ],
  ],
)
def test_a_reader_that_leaves_is_no_error(command):
  """As `| head -1`, whose pipe is closed while the command still writes."""
  reader, writer = os.pipe()
  os.close(reader)
  done = subprocess.run(
    [sys.executable, "-m", *command],
    stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120,
  )  # fmt: skip
  os.close(writer)
  assert (done.returncode, done.stderr) == (141, "")


def test_characters_that_an_encoding_lacks_are_escaped():
  done = subprocess.run(
    [sys.executable, "-m", "launch.studies.rules", "--help"],
    env=os.environ | {"PYTHONIOENCODING": "ascii"},
    capture_output=True, text=True, timeout=120,
  )  # fmt: skip
  assert (done.returncode, done.stderr) == (0, "")
  raw = io.TextIOWrapper(io.BytesIO(), "ascii")
  with mock.patch.object(sys, "stdout", raw), terminal.guarded():
    print("ε «bonus»")
  raw.flush()
  assert raw.buffer.getvalue() == rb"\u03b5 \xabbonus\xbb" + b"\n"


def test_waiting_says_for_how_long_and_no_more_afterwards(capsys):
  with terminal.waiting("compiling", every=0.01):
    told, end = "", time.monotonic() + several.PATIENCE
    while "so far" not in told:
      assert time.monotonic() < end
      told += capsys.readouterr().err
  first, second, *_ = told.splitlines()
  assert first == "compiling"
  assert second == "compiling: 0 s so far"
  capsys.readouterr()
  time.sleep(0.05)
  assert capsys.readouterr().err == ""
