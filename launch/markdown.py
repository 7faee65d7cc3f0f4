"""Markdown tables of committed results, and the commands that print them."""

import json
import pathlib
import sys
from collections.abc import Callable, Mapping

from launch import terminal
from specjax import metrics

# What `plus_minus` means, for captions.
PLUS_MINUS = f"± is a 95% interval, {metrics.SIDE:g} standard errors."


def plus_minus(value: float, standard_error: float, digits: int) -> str:
  """A mean over many with its 95% interval: what ± is, wherever it stands."""
  side = metrics.SIDE * standard_error
  return f"{value:.{digits}f} ± {side:.{digits}f}"


def loss_in_words(lossless: bool, total_variation: float) -> str:
  """How far from the target's law tokens were drawn: beside every speed-up."""
  if lossless:
    return "lossless"
  return f"lossy, total variation {total_variation:.3f}"


def table(head: list[str], rows: list[list[str]]) -> str:
  """A Markdown table."""
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def print_table(
  argv: list[str], module: str, tables: Mapping[str, Callable[..., str]]
) -> int:
  """Prints the table that the command line names.

  Args:
    argv: the program, the name of a table, and JSON files.
    module: the command, for `python -m`.
    tables: by name, what makes a table of the files' contents.

  Returns:
    The exit code.
  """
  usage = f"usage: python -m {module} {{{','.join(tables)}}} RESULT.json..."
  if len(argv) < 3 or argv[1] not in tables:
    print(usage, file=sys.stderr)
    return 2
  _, name, *paths = argv
  try:
    results = [json.loads(pathlib.Path(p).read_text("utf-8")) for p in paths]
    text = tables[name](*results)
  except FileNotFoundError as error:
    print(f"error: no such file: {error.filename}", file=sys.stderr)
    return 2
  except (KeyError, TypeError, ValueError):
    print(f"error: {' '.join(paths)} hold no results for {name}\n{usage}",
          file=sys.stderr)  # fmt: skip
    return 2
  print(text)
  return 0


def run(main: Callable[[list[str]], int]) -> None:
  """Runs what draws committed results as the program, and exits with its code.

  Files are what may be wrong: one that holds something else is one line.
  """
  terminal.guard()
  try:
    code = main(sys.argv)
    sys.stdout.flush()
  except BrokenPipeError:
    code = terminal.reader_left()
  except (LookupError, TypeError, ValueError, RecursionError) as error:
    files, kind = " ".join(sys.argv[1:]), type(error).__name__
    print(f"error: no results in {files} ({kind}: {error})", file=sys.stderr)
    code = 2
  sys.exit(code)
