"""Output files: written atomically, never overwritten by accident.

An existing output is rejected without --overwrite, before any work is done.
With several processes only the chief writes. "-" is stdout.
"""

import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from launch import cli, processes

STDOUT = "-"


def check(*paths: str | pathlib.Path | None) -> None:
  """Raises UserError for unusable output files; call it before any work.

  Folders need not exist yet; "-" and None are fine. If the first file has a
  journal, the run resumes and may overwrite its outputs.
  """
  resumes = bool(paths and paths[0]) and os.path.exists(f"{paths[0]}.journal")
  for path in map(pathlib.Path, filter(None, paths)):
    if str(path) == STDOUT or not processes.is_chief():
      continue
    if path.exists() and not path.is_file():
      raise cli.UserError(f"{path} is not a file")
    replaces = resumes or cli.OVERWRITE.value
    if path.exists() and path.stat().st_size and not replaces:
      raise cli.UserError(f"{path} exists already: --overwrite replaces it")
    folder = next(x for x in path.absolute().parents if x.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
      raise cli.UserError(f"{path}: {folder} is not a writable folder")


def write(path: str | pathlib.Path, content: str | bytes) -> None:
  """Writes a file atomically, on the chief only."""
  if not processes.is_chief():
    return
  if str(path) == STDOUT:
    out: Any = sys.stdout if isinstance(content, str) else sys.stdout.buffer
    out.write(content)
    out.flush()
    return
  path = pathlib.Path(os.path.realpath(path))
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.replace(path)
  finally:
    new.unlink(missing_ok=True)


def write_json(path: str | pathlib.Path, value: Any) -> None:
  """Writes JSON, like `write`."""
  write(path, json.dumps(value, indent=2) + "\n")


def messages(path: str | None) -> Any:
  """The stream for messages: stderr if stdout has the result."""
  return sys.stderr if path == STDOUT else sys.stdout


def lines_of(path: str | pathlib.Path) -> list[tuple[int, str]]:
  """The non-empty lines of a UTF-8 file, with their numbers."""
  try:
    text = pathlib.Path(path).read_text("utf-8-sig")
  except UnicodeDecodeError:
    raise ValueError(f"{path}: not UTF-8") from None
  return [(i, x) for i, x in enumerate(text.split("\n"), 1) if x.strip()]


def read_jsonl(path: str | pathlib.Path) -> Iterator[tuple[int, dict]]:
  """Yields the objects of a UTF-8 JSONL file with their line numbers."""
  for number, line in lines_of(path):
    try:
      record = json.loads(line)
    except ValueError as error:
      raise ValueError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(record, dict):
      raise ValueError(f"{path}:{number}: expected a JSON object")
    yield number, record


def dumps(records: Iterable[Any]) -> str:
  """Formats records as JSON lines."""
  return "".join(json.dumps(record) + "\n" for record in records)


class Journal:
  """The finished batches of a run, in OUT.journal until the output is written.

  The first line has the settings of the run, each later line a batch.

  Attributes:
    batches: records by their "batch" (a number or a string), in the order in
      which they were added; the same on every process.
  """

  def __init__(self, output: str | None, settings: Mapping[str, Any]):
    """Opens a journal, or continues that of a killed run."""
    records: list[dict] = []
    self._path = None
    if output and output != STDOUT and processes.is_chief():
      self._path = pathlib.Path(f"{output}.journal")
      header = json.loads(json.dumps(settings))
      if self._path.exists() and not cli.OVERWRITE.value:
        # The last line of a killed run may be incomplete.
        *lines, _ = self._path.read_text("utf-8", "replace").split("\n")
        records = [json.loads(line) for line in lines]
      if len(records) > 1 and records[0] != header:
        raise cli.UserError(
          f"{self._path} is from a run with other settings "
          f"({_differences(records[0], header)}): repeat its command to finish "
          "it, or give --overwrite to start over"
        )
      records = records[1:]
      write(self._path, dumps([header, *records]))
      if records:
        print(f"resuming from {self._path}", file=sys.stderr)
    records = processes.gather(records)[0]
    self.batches = {record["batch"]: record for record in records}

  def add(self, record: dict) -> None:
    """Adds a finished batch; `record["batch"]` is its number or name."""
    self.batches[record["batch"]] = record
    if self._path:
      with open(self._path, "a", encoding="utf-8") as file:
        file.write(dumps([record]))
        file.flush()
        os.fsync(file.fileno())

  def finish(self) -> None:
    """Deletes the journal, once the output is written."""
    if self._path:
      self._path.unlink()


def _differences(*runs: Mapping[str, Any]) -> str:
  """The settings in which two runs differ."""
  before, now = (
    {f"config.{name}": x for name, x in run.get("config", {}).items()}
    | {name: x for name, x in run.items() if name != "config"}
    for run in runs
  )
  return ", ".join(
    f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
    for name in sorted({**before, **now})
    if before.get(name) != now.get(name)
  )
