"""Files of JSON lines, in UTF-8, as all commands read them.

A line ends with a newline alone: other characters that end lines elsewhere, as
U+2028, U+2029 and U+0085 do, are text that JSON need not escape. A byte order
mark may begin the file, and blank lines are none.
"""

import codecs
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def lines(path: str | pathlib.Path) -> Iterator[tuple[int, bytes]]:
  """The lines of a file, none of them blank, and their numbers from 1.

  Raises:
    OSError: if it cannot be read.
    ValueError: if it is UTF-16 or UTF-32.
  """
  content = pathlib.Path(path).read_bytes()
  marked = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
  if content.startswith(marked) or b"\0" in content[:4]:
    raise ValueError(f"{path}: not UTF-8, but UTF-16 or UTF-32")
  content = content.removeprefix(codecs.BOM_UTF8)
  for number, line in enumerate(content.split(b"\n"), start=1):
    if line.strip():
      yield number, line


def parsed(
  line: bytes, *, hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
  """The JSON value of a line.

  Args:
    line: the line.
    hook: makes an object of its keys and values, or None for a dict.

  Raises:
    ValueError: saying in a few words why it is no JSON; or `hook`'s.
  """
  try:
    return json.loads(line.decode("utf-8"), object_pairs_hook=hook)
  except UnicodeDecodeError:
    raise ValueError("not UTF-8") from None
  except json.JSONDecodeError as error:
    raise ValueError(f"not JSON: {error.msg}") from None
  except RecursionError:
    raise ValueError("nested too deeply") from None


def read(path: str | pathlib.Path) -> Iterator[tuple[int, Any]]:
  """The JSON values of a file's lines, with their numbers.

  Raises:
    OSError, ValueError: as `lines`; ValueError for a line that is no JSON,
      naming it.
  """
  for number, line in lines(path):
    try:
      yield number, parsed(line)
    except ValueError as error:
      raise ValueError(f"{path}:{number}: {error}") from None


def objects(path: str | pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """As `read`, of lines that are objects; ValueError for one that is none."""
  for number, record in read(path):
    if not isinstance(record, dict):
      raise ValueError(f"{path}:{number}: expected an object")
    yield number, record


def whole(path: pathlib.Path) -> list[dict[str, Any] | None]:
  """The lines of a file that grows, if it is there; None for one of no object.

  A last line that a crash left half-written is said on stderr, and dropped.
  """
  if not path.exists():
    return []
  *lines, torn = path.read_bytes().split(b"\n")
  if torn:
    print(f"{path}: dropped a half-written last line", file=sys.stderr)
  records: list[dict[str, Any] | None] = []
  for line in lines:
    try:
      record = parsed(line)
    except ValueError:
      record = None
    records.append(record if isinstance(record, dict) else None)
  return records


def dumps(records: Iterable[Any]) -> str:
  """The lines of a file."""
  return "".join(json.dumps(record) + "\n" for record in records)
