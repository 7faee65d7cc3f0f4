"""What a conversation looks like: in a terminal, and piped.

In a terminal tokens have the colours of `launch.decode`; piped, the answers
alone go to stdout, and all else that is to be said to stderr.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

import rich.text

from launch import display, terminal
from launch.stops import Growing
from models.tokenizers import Tokenizer
from specjax.state import Origin


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
      style = display.STYLES[origin]
      self.console.print(
        rich.text.Text(text, style=style), end="", soft_wrap=True
      )

  def note(self, text: str) -> None:
    """Something beside the answers; on stderr where they are piped."""
    self.console.print(rich.text.Text(text, style="dim"), soft_wrap=True)

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
