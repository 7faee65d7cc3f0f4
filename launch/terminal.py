"""Safe terminal output: control characters are shown, not obeyed.

Prompts, ids, names of files and tensors come from outside, and a terminal obeys
what they hold: an escape sequence may empty the screen or fill the clipboard, a
bidirectional override shows another text than there is. All that goes through
`sys.stdout` and `sys.stderr` (tracebacks too), through `console` and through
the log is therefore written with such characters made visible. Files that
commands write hold what they held.
"""

import contextlib
import io
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator
from typing import Any, TextIO

import rich.console
from absl import logging

# Other, but not private or unassigned characters; separators of lines.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Joiners make one letter, or one emoji, of several.
_KEPT = "\n\t\u200c\u200d"


def visible(text: str) -> str:
  """The text, with pictures or escapes for control characters.

  C0 controls and DEL become the pictures that Unicode has for them, all others
  (C1, formats as bidirectional overrides, lone surrogates) Python's escapes.
  Newlines and tabs stay.
  """
  if text.isprintable():
    return text
  return "".join(
    c if c in _KEPT or unicodedata.category(c) not in _HIDDEN else _picture(c)
    for c in text
  )


def _picture(character: str) -> str:
  code = ord(character)
  if code < 0x20:
    return chr(0x2400 + code)
  return "␡" if code == 0x7F else character.encode("unicode_escape").decode()


class _Console(rich.console.Console):
  """A console whose own escape sequences are the only ones."""

  def render(self, renderable, options=None):
    for segment in super().render(renderable, options):
      shown = segment.text if segment.control else visible(segment.text)
      yield segment._replace(text=shown)

  def print_json(self, json=None, **options):
    # JSON has escapes of its own.
    super().print_json(json, **{"ensure_ascii": True, **options})

  def on_broken_pipe(self):
    raise SystemExit(reader_left())


def console(
  stream: TextIO | None = None, **options: Any
) -> rich.console.Console:
  """A `rich.console.Console`, on stdout by default; its escapes pass."""
  return _Console(file=_raw(stream or sys.stdout), **options)


class _Visible:
  """A stream that text is made visible for; all else is the stream's own."""

  def __init__(self, raw: TextIO):
    self.raw = raw

  def write(self, text: str) -> int:
    # Progress bars begin with a return to the line's start, or go up a line.
    body = text.lstrip("\r")
    if body.replace("\x1b[A", ""):
      body = visible(body)
    self.raw.write(text[: len(text) - len(text.lstrip("\r"))] + body)
    return len(text)

  def writelines(self, lines) -> None:
    for line in lines:
      self.write(line)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.raw, name)


def _raw(stream: Any) -> TextIO:
  return stream.raw if isinstance(stream, _Visible) else stream


def guard() -> None:
  """Makes streams and the log show control characters from now on.

  What a terminal's encoding lacks is shown as an escape.
  """
  log = logging.get_absl_handler().python_handler
  for stream in (sys.stdout, sys.stderr):
    if isinstance(_raw(stream), io.TextIOWrapper):
      _raw(stream).reconfigure(errors="backslashreplace")
  sys.stdout, sys.stderr, log.stream = (
    x if isinstance(x, _Visible) else _Visible(x)
    for x in (sys.stdout, sys.stderr, log.stream)
  )


@contextlib.contextmanager
def waiting(what: str, *, every: float = 10.0) -> Iterator[None]:
  """Reports on stderr, while entered, the running work and its duration.

  Args:
    what: is done, as in "compiling".
    every: seconds between two lines; on a terminal one line stays, and is
      written anew each second.
  """
  live, begun, over = sys.stderr.isatty(), time.monotonic(), threading.Event()
  print(what, end="" if live else "\n", file=sys.stderr, flush=True)

  def tell():
    while not over.wait(1.0 if live else every):
      passed = f"{what}: {time.monotonic() - begun:.0f} s so far"
      text = f"\r{passed}" if live else f"{passed}\n"
      sys.stderr.write(text)
      sys.stderr.flush()

  teller = threading.Thread(target=tell, daemon=True)
  teller.start()
  try:
    yield
  finally:
    over.set()
    teller.join()
    if live:
      print(file=sys.stderr)


def reader_left() -> int:
  """Stops writing to a stdout that is closed (`| head`); the exit code."""
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, sys.stdout.fileno())
  return 141  # as a shell reports SIGPIPE


@contextlib.contextmanager
def guarded() -> Iterator[None]:
  """As `guard`, while it is entered."""
  log = logging.get_absl_handler().python_handler
  before = sys.stdout, sys.stderr, log.stream
  guard()
  try:
    yield
  finally:
    sys.stdout, sys.stderr, log.stream = before
