"""What a conversation looks like: in a terminal, and piped.

In a terminal tokens have the colours of `launch.decode`; piped, the answers
alone go to stdout, and all else that is to be said to stderr.
"""

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

import rich.console
import rich.text
from rich import cells
from rich.control import Control, ControlType

from launch import display, terminal
from launch.stops import Growing
from models.tokenizers import Tokenizer
from specjax.state import Origin

# Scripts without blanks, in which lines break behind every character.
_IDEOGRAPHS = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uff60"
_IDEOGRAPH = re.compile(f"[{_IDEOGRAPHS}]")
_PARTS = re.compile(
  rf"\n|[^\S\n]+|[{_IDEOGRAPHS}][^\s{_IDEOGRAPHS}]*|[^\s{_IDEOGRAPHS}]+"
)


class Wrapped:
  """Text that comes in pieces, whose words do not break at the border.

  A piece is shown at once: the word that it would break is taken back, and goes
  on in the next line.
  """

  def __init__(self, console: rich.console.Console):
    """At the beginning of a line."""
    self._console = console
    self._column = 0
    self._word: list[tuple[str, str]] = []  # what of it is shown, and how

  def write(self, text: str, style: str) -> None:
    """Shows a piece."""
    if self._console.is_dumb_terminal:  # nothing can be taken back there
      self._show(text, style, 0)
      return
    for part in _PARTS.findall(terminal.visible(text)):
      if part == "\n":
        self._break()
      elif part.isspace():
        self._blank(part, style)
      else:
        if _IDEOGRAPH.match(part):
          self._word = []
        self._go_on(part, style)

  def _blank(self, part: str, style: str) -> None:
    self._word = []
    start = self._column
    size = len((" " * start + part).expandtabs()) - start
    if start + size > self._width():
      self._break()  # in place of it
    else:
      self._show(" " * size, style, size)

  def _go_on(self, part: str, style: str) -> None:
    size, before = cells.cell_len(part), self._size()
    if self._column + size > self._width() and before < self._column:
      again, start = self._word, self._column - before
      if again:
        self._console.control(
          Control(
            (ControlType.CURSOR_MOVE_TO_COLUMN, start),
            (ControlType.ERASE_IN_LINE, 0),
          )
        )
      self._break()
      for one in again:
        self._show(*one, cells.cell_len(one[0]))
      self._word = again
    # What is longer than a line is the terminal's to break.
    self._show(part, style, size)
    self._word.append((part, style))
    self._column %= self._width() + 1

  def _size(self) -> int:
    """Cells of the word so far."""
    return sum(cells.cell_len(part) for part, _ in self._word)

  def _width(self) -> int:
    # One less: a full line's cursor is where terminals disagree about.
    return max(self._console.width - 1, 1)

  def _break(self) -> None:
    self._console.print()
    self._column, self._word = 0, []

  def _show(self, text: str, style: str, size: int) -> None:
    self._console.print(
      rich.text.Text(text, style=style), end="", soft_wrap=True
    )
    self._column += size


class Screen:
  """Where a conversation is shown.

  Attributes:
    interactive: whether somebody sits before it.
  """

  def __init__(self, interactive: bool):
    """Shows nothing yet."""
    self.interactive = interactive
    stream = sys.stdout if interactive else sys.stderr
    self.console = terminal.console(stream, highlight=False, markup=False)
    self._answer = Wrapped(self.console)

  def lines(self) -> Iterator[str]:
    """What is typed, or piped in, until it ends."""
    if not self.interactive:
      with contextlib.suppress(AttributeError):  # not a real stdin
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
      yield from _joined(iter(sys.stdin.readline, ""))
      return
    with contextlib.suppress(ImportError):
      import readline  # noqa: F401  `input` then edits, and remembers
    yield from _joined(self._typed())

  def _typed(self) -> Iterator[str]:
    goes_on = False
    while True:
      try:
        line = input("… " if goes_on else "> ")
      except EOFError:
        self.console.print()
        return
      except KeyboardInterrupt:  # the line is given up
        self.console.print()
        continue
      # What is typed may be no UTF-8.
      line = line.encode("utf-8", "replace").decode()
      goes_on = line.endswith("\\")
      yield line + "\n"

  def answer(
    self,
    tokenizer: Tokenizer,
    rounds: Iterator[Sequence[tuple[int, Origin]]],
    before: Sequence[int] = (),
  ) -> list[int]:
    """Shows an answer as it is written; Ctrl-C ends it.

    Args:
      tokenizer: of the model.
      rounds: the tokens of each round, and where they came from.
      before: tokens of what is answered.

    Returns:
      All tokens that were written.
    """
    growing, ids = Growing(tokenizer, before), list[int]()
    self._answer = Wrapped(self.console)
    with _noticed(self.interactive) as interrupted:
      try:
        for new in rounds:
          for token, origin in new:
            ids.append(token)
            self._write(growing.add(token), origin)
          if interrupted():
            break
      except KeyboardInterrupt:  # the second one
        if not self.interactive:
          raise
    self._write(growing.rest() + "\n", Origin.BONUS)
    return ids

  def _write(self, text: str, origin: Origin) -> None:
    if not self.interactive:
      sys.stdout.write(text)
      sys.stdout.flush()
    elif text:
      self._answer.write(text, display.STYLES[origin])

  def note(self, text: str) -> None:
    """Something beside the answers; on stderr where they are piped."""
    self.console.print(rich.text.Text(text, style="dim"), soft_wrap=True)

  def passing(self, text: str) -> None:
    """Something that takes its time; "" once it is over, and it is gone."""
    if not self.interactive or self.console.is_dumb_terminal:
      if text:
        self.note(text)
      return
    self.console.control(
      Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
    )
    self.console.print(rich.text.Text(text, style="dim"), end="")

  def error(self, text: str) -> None:
    """What went wrong, in one line; the conversation goes on."""
    print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)


def _joined(lines: Iterator[str]) -> Iterator[str]:
  """Lines without their ends; those that end in a backslash go on."""
  begun = ""
  for line in lines:
    line = line.rstrip("\r\n")
    if line.endswith("\\"):
      begun += line[:-1] + "\n"
      continue
    yield begun + line
    begun = ""
  if begun:
    yield begun.removesuffix("\n")


@contextlib.contextmanager
def _noticed(wanted: bool) -> Iterator[Callable[[], bool]]:
  """Ctrl-C is noted, for what cannot be broken off; the second one is not.

  Args:
    wanted: else it is as ever.

  Yields:
    Whether there was one.
  """
  seen: list[int] = []
  if not wanted:
    yield lambda: False
    return

  def note(number, frame):
    seen.append(number)
    signal.signal(signal.SIGINT, before)

  before = signal.signal(signal.SIGINT, note)
  try:
    yield lambda: bool(seen)
  finally:
    signal.signal(signal.SIGINT, before)
