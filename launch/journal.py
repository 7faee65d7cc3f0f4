"""A run's progress on disk, so that a stopped run goes on where it was.

Every finished batch is appended to `OUT.partial`, one line each, under a header
that tells the run's settings. A line torn by a crash is dropped and its batch
done again; batches draw from streams of their own, so the result is the same as
that of a run that was never stopped. `Results` also appends the rows of a JSONL
file itself.

Of several processes the chief alone writes, and it alone reads what was there.
"""

import json
import os
import pathlib
import sys
from typing import Any

from launch import processes


class Journal:
  """The partial results of one output file.

  Attributes:
    batches: finished batches by number, as they were added.
  """

  def __init__(self, output: str, fingerprint: str):
    """Opens or resumes.

    Args:
      output: the final file.
      fingerprint: of everything that decides the results.

    Raises:
      ValueError: if a partial file of other settings is there.
      FileNotFoundError: if the folder of `output` is not.
    """
    self._output = pathlib.Path(output)
    check_writable(output)
    self._partial = self._output.with_name(self._output.name + ".partial")
    self._kept = self._output.with_name(self._output.name + ".journal")
    self._header = json.dumps({"fingerprint": fingerprint})
    self._begun = False
    self.batches: dict[int, dict] = {}
    if not processes.is_chief():
      return
    lines = _whole_lines(self._partial)
    if lines and lines[0] != self._header:
      raise ValueError(
        f"{self._partial} is from a run with other prompts or settings; "
        "finish that run, or delete the file"
      )
    if not lines:  # a run that was finished
      kept = _whole_lines(self._kept)
      lines = kept if kept[:1] == [self._header] else []
    for number, record in enumerate(_objects(self._partial, lines)):
      if number:
        self.batches[record["batch"]] = record
    if lines:  # without a torn last line, so that appending is safe
      self._begun = True
      _replace(self._partial, "\n".join(lines) + "\n")

  def add(self, record: dict) -> None:
    """Appends one finished batch; `record["batch"]` is its number."""
    if processes.is_chief():
      if not self._begun:
        _replace(self._partial, self._header + "\n")
      self._begun = True
      _append(self._partial, [record])
    self.batches[record["batch"]] = record

  def finish(
    self, rows: list[dict] | None = None, *, keep: bool = False
  ) -> None:
    """Writes the output, whole, and removes the partial file.

    Args:
      rows: lines of the output; None if it has been written.
      keep: to keep the partial file as `OUTPUT.journal`; the same run, asked
        for again, then has nothing left to do.
    """
    if not processes.is_chief():
      return
    if rows is not None:
      _replace(self._output, _lines(rows))
    if keep and self._partial.exists():
      os.replace(self._partial, self._kept)
    else:
      self._partial.unlink(missing_ok=True)


class Results:
  """A JSONL file that grows by the rows of each batch, and resumes by id.

  A batch is done if all its rows are in the file and the journal beside it has
  what was measured. Whoever deletes rows, or the file, gets them made again.

  Attributes:
    batches: see `Journal`.
  """

  def __init__(self, output: str, fingerprint: str):
    """Opens or resumes, and says on stderr what is there.

    Args:
      output: the file.
      fingerprint: of everything that decides the results.

    Raises:
      ValueError: see `Journal`; also if the file has lines that are no JSON.
      FileNotFoundError: if the folder of `output` is not.
    """
    self._path = pathlib.Path(output)
    self._journal = Journal(output, fingerprint)
    self.batches = self._journal.batches
    self._started = False
    if not self.batches:
      return  # nothing of these settings: whatever is there is replaced
    rows = list(_objects(self._path, _whole_lines(self._path)))
    there = {_key(row.get("id")) for row in rows}
    for number, record in list(self.batches.items()):
      if not all(_key(i) in there for i in record["ids"]):
        del self.batches[number]
    done = {_key(i) for record in self.batches.values() for i in record["ids"]}
    kept = {_key(row.get("id")): row for row in rows}
    _replace(self._path, _lines([kept[key] for key in kept if key in done]))
    self._started = True
    print(
      f"{self._path}: {len(done)} rows are there already and are kept",
      file=sys.stderr,
    )

  def add(self, record: dict, rows: list[dict]) -> None:
    """Appends a finished batch.

    Args:
      record: what is to be known of it later: its number under "batch", the
        ids of its rows under "ids", ...
      rows: its lines of the file.
    """
    self._journal.add(record)
    if processes.is_chief():
      if not self._started:
        _replace(self._path, "")
      self._started = True
      _append(self._path, rows)

  def finish(self, rows: list[dict]) -> None:
    """Puts all rows in their final order, in one rename."""
    self._journal.finish(rows, keep=True)


def _key(identity: Any) -> str:
  """An id, which may be any JSON, as something to look up."""
  return json.dumps(identity, sort_keys=True)


def _lines(records: list[dict]) -> str:
  return "".join(json.dumps(record) + "\n" for record in records)


def _append(path: pathlib.Path, records: list[dict]) -> None:
  with path.open("a", encoding="utf-8") as out:
    out.write(_lines(records))
    out.flush()
    os.fsync(out.fileno())


def _whole_lines(path: pathlib.Path) -> list[str]:
  """The lines of a file, if any, without one that a crash left half-written."""
  if not path.exists():
    return []
  *lines, torn = path.read_text("utf-8", errors="replace").split("\n")
  if torn:
    print(f"{path}: dropped a half-written last line", file=sys.stderr)
  return lines


def _objects(path: pathlib.Path, lines: list[str]) -> list[dict]:
  """JSON objects; ValueError names the line that holds none."""
  found = []
  for number, line in enumerate(lines, start=1):
    try:
      found.append(json.loads(line))
    except json.JSONDecodeError:
      found.append(None)
    if not isinstance(found[-1], dict):
      raise ValueError(
        f"{path}:{number}: expected a JSON object; mend or delete the file"
      )
  return found


def _replace(path: pathlib.Path, text: str) -> None:
  """Writes a file so that it is never seen half-written."""
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(text, encoding="utf-8")
  os.replace(temporary, path)


def check_writable(path: str) -> None:
  """Raises, before any work is done, if `path` cannot become a file.

  Of several processes the chief asks: it writes.

  Raises:
    FileNotFoundError: if its folder does not exist.
    ValueError: if it is a folder itself.
  """
  if not processes.is_chief():
    return
  target = pathlib.Path(path)
  if not target.parent.is_dir():
    raise FileNotFoundError(f"no such folder for {path}: {target.parent}")
  if target.is_dir():
    raise ValueError(f"expected a file, but {path} is a folder")
  if not os.access(target.parent, os.W_OK):
    raise PermissionError(f"cannot write to {target.parent}")


def check_folder_writable(path: str) -> None:
  """Raises, before any work is done, if files cannot go into a folder `path`.

  It need not be there yet. Of several processes the chief asks: it writes.

  Raises:
    NotADirectoryError: if it, or what it would be in, is a file.
    PermissionError: if it cannot be written to, or cannot be made.
  """
  if not processes.is_chief():
    return
  there = pathlib.Path(path).absolute()
  while not there.exists():
    there = there.parent
  if not there.is_dir():
    raise NotADirectoryError(f"expected a folder, but {there} is a file")
  if not os.access(there, os.W_OK):
    raise PermissionError(f"cannot write to {there}")


def write_json(path: str, value: dict) -> None:
  """Writes a JSON file, whole or not at all; the chief does."""
  if processes.is_chief():
    _replace(pathlib.Path(path), json.dumps(value, indent=2) + "\n")
