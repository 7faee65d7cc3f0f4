"""A run's progress on disk, so that a stopped run goes on where it was.

Every finished batch is appended to `OUT.partial`, one line each, under a header
that tells the run's settings. Every line has a checksum, of the settings too: a
line that is torn or damaged is said, dropped, and its batch done again. Batches
draw from streams of their own, so the result is the same as that of a run that
was never stopped. `Results` also appends the rows of a JSONL file itself.

One process at a time has a journal (`launch.locks`). Of several processes of a
run the chief alone writes, and it alone reads what was there.
"""

import hashlib
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from launch import cli, locks, outputs, processes
from launch.prompts import row_id

# Of settings that differ, as many are named.
_MOST_NAMED = 3


class Journal:
  """The partial results of one output file, open while it is entered.

  Attributes:
    begun: whether there is anything on disk.
    batches: finished batches by what `add` was given under "batch" (a number
      or a string), in the order they were added.
  """

  def __init__(
    self, output: str, settings: Mapping[str, Any], *, grows: bool = False
  ):
    """Reads nothing yet.

    Args:
      output: the final file.
      settings: everything that decides the results, of JSON's types.
      grows: whether the journal is kept beside a finished output, as
        `OUTPUT.journal`: the same run, asked for again, then goes on with it,
        and what has no such journal is not replaced. Else a finished output is
        whoever's `outputs.check` lets replace it.
    """
    self._output = outputs.resolve(output)
    self._partial, self._kept, lock = (
      self._output.with_name(self._output.name + end) for end in outputs.BESIDE
    )
    self._settings = json.loads(json.dumps(settings, sort_keys=True))
    self._salt = json.dumps(self._settings)
    self._grows = grows
    self.begun = False
    self._lock = locks.Lock(lock, what=output)
    self.batches: dict[int | str, dict] = {}

  def __enter__(self):
    """Opens or resumes.

    Raises:
      ValueError: if another process has it open; or if something of other
        settings is there, without --overwrite.
    """
    self._lock.__enter__()
    try:
      if processes.is_chief() and not cli.OVERWRITE.value:
        self._resume()
    except BaseException:
      self._lock.__exit__()
      raise
    return self

  def __exit__(self, *error):
    self._lock.__exit__(*error)

  def _resume(self) -> None:
    path = self._partial
    lines = _whole_lines(path)
    if not lines and self._grows and _is_something(self._output):
      path = self._kept
      lines = _whole_lines(path)
      if not lines:
        raise ValueError(
          f"{self._output} is there, and no {path.name} tells that it is of "
          "this run: --overwrite replaces it"
        )
    if not lines:
      return
    header = _unsealed(lines[0], salt="")
    if header is not None and header != self._settings:
      raise ValueError(
        f"{path} is of a run with other settings "
        f"({_differences(header, self._settings)}): give its command again to "
        "finish that run, or --overwrite to replace it"
      )
    damaged = [] if header is not None else [1]
    for number, line in enumerate(lines[1:], start=2):
      record = _unsealed(line, salt=self._salt)
      if record is None:
        damaged.append(number)
      else:
        self.batches[record["batch"]] = record
    if header is None and not self.batches:
      raise ValueError(
        f"{path} is damaged, or the journal of something else: --overwrite "
        "begins anew"
      )
    for number in damaged:
      print(
        f"{path}:{number}: damaged"
        + (", and done again" if number > 1 else ", but what follows is sound"),
        file=sys.stderr,
      )
    self.keep(self.batches)

  def keep(self, names: Iterable[int | str]) -> None:
    """Drops all batches but some, on disk too; appending is then safe."""
    names = set(names)
    self.batches = {k: v for k, v in self.batches.items() if k in names}
    self.begun = True
    if not processes.is_chief():
      return
    lines = [_sealed(self._settings, salt="")]
    lines += [_sealed(x, salt=self._salt) for x in self.batches.values()]
    outputs.replace(self._partial, "".join(lines))

  def add(self, record: dict) -> None:
    """Appends one finished batch; `record["batch"]` is its number or name."""
    if not self.begun:
      self.keep(())
    if processes.is_chief():
      outputs.append(self._partial, _sealed(record, salt=self._salt))
    self.batches[record["batch"]] = record

  def finish(self, rows: list[dict] | None = None) -> None:
    """Writes the output, whole, and ends the journal.

    Args:
      rows: lines of the output; None if it has been written.
    """
    if not processes.is_chief():
      return
    if rows is not None:
      outputs.replace(self._output, _lines(rows))
    if self._grows and self._partial.exists():
      self._partial.replace(self._kept)
    else:
      self._partial.unlink(missing_ok=True)


class Results:
  """A JSONL file that grows by the rows of each batch, and resumes by row.

  A batch is done if all its rows are in the file, and the journal beside it has
  what was measured. Whoever deletes rows, or the file, gets them made again;
  rows that were changed, or that the run did not write, are not touched.
  """

  def __init__(
    self, output: str, settings: Mapping[str, Any], wanted: Mapping[str, Any]
  ):
    """Reads nothing yet.

    Args:
      output: the file.
      settings: everything that decides a row, but what it is the row of.
      wanted: the ids (`launch.prompts.row_id`) of all rows that are to be
        there, by their keys: a key tells all that a row is of (its id, the
        prompt).
    """
    self._path = outputs.resolve(output)
    self._journal = Journal(output, settings, grows=True)
    self._wanted = {key: _key(identity) for key, identity in wanted.items()}
    self._started = False

  @property
  def records(self) -> list[dict]:
    """Of the finished batches, see `add`."""
    return list(self._journal.batches.values())

  def __enter__(self):
    """Opens or resumes, and says on stderr what is there.

    Raises:
      ValueError: see `Journal`; also for rows that are not as this run wrote
        them, or of prompts that it has not.
    """
    self._journal.__enter__()
    try:
      if processes.is_chief() and self._journal.begun:
        self._resume()
    except BaseException:
      self._journal.__exit__()
      raise
    return self

  def __exit__(self, *error):
    self._journal.__exit__(*error)

  def _resume(self) -> None:
    lines = _whole_lines(self._path)
    there = {}
    for number, line in enumerate(lines, start=1):
      row = _parsed(line)
      if row is None:
        raise ValueError(
          f"{self._path}:{number}: expected a JSON object; delete that line to "
          "have it made again, or give --overwrite to begin anew"
        )
      there[_key(row_id(row))] = number, row
    kept, known = [], set()
    for record in self.records:
      ids = [_key(i) for i in record["ids"]]
      if not all(i in there for i in ids):
        continue
      for i, key, digest in zip(
        ids, record["keys"], record["digests"], strict=True
      ):
        number, row = there[i]
        if _digest(json.dumps(row)) != digest:
          raise ValueError(
            f"{self._path}:{number}: the row of id {i} is not as it was "
            "written; delete that line to have it made again, or give "
            "--overwrite to begin anew"
          )
        if self._wanted.get(key) != i:
          raise self._foreign(i, number)
      kept.append(record)
      known.update(ids)
    again = there.keys() - known
    for i in again - set(self._wanted.values()):
      raise self._foreign(i, there[i][0])
    if again:
      print(f"{self._path}: {len(again)} rows are made again", file=sys.stderr)
    self._journal.keep(record["batch"] for record in kept)
    outputs.replace(
      self._path, _lines([row for i, (_, row) in there.items() if i in known])
    )
    self._started = True
    print(
      f"{self._path}: {len(known)} rows are there already and are kept",
      file=sys.stderr,
    )

  def _foreign(self, identity: str, number: int) -> ValueError:
    among = identity in self._wanted.values()
    return ValueError(
      f"{self._path}:{number}: the row of id {identity} is of "
      + ("another prompt" if among else "none of these prompts")
      + ": write elsewhere, or give --overwrite to begin anew"
    )

  def add(self, record: dict, rows: list[dict]) -> None:
    """Appends a finished batch.

    Args:
      record: what is to be known of it later: the keys of its rows under
        "keys", their ids under "ids", ...
      rows: its lines of the file.
    """
    record = {
      **record,
      "batch": record["keys"][0],
      "digests": [_digest(json.dumps(row)) for row in rows],
    }
    if processes.is_chief() and not self._started:
      outputs.replace(self._path, "")
    self._started = True
    self._journal.add(record)
    if processes.is_chief():
      outputs.append(self._path, _lines(rows))

  def finish(self, rows: list[dict]) -> None:
    """Puts all rows in their final order, in one rename."""
    self._journal.finish(rows)


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sealed(record: dict, *, salt: str) -> str:
  """A line that tells whether it is as it was written, under one salt."""
  seal = _digest(salt + json.dumps(record))
  return json.dumps({**record, "sum": seal}) + "\n"


def _unsealed(line: str, *, salt: str) -> dict | None:
  """What `_sealed` was given; None if the line is not as it was written."""
  record = _parsed(line)
  if record is None:
    return None
  seal = record.pop("sum", None)
  return record if seal == _digest(salt + json.dumps(record)) else None


def _parsed(line: str) -> dict | None:
  try:
    found = json.loads(line)
  except (ValueError, RecursionError):
    return None
  return found if isinstance(found, dict) else None


def _differences(before: dict, now: dict) -> str:
  """The first settings that differ, in words."""
  a, b = _flat(before), _flat(now)
  names = sorted(n for n in a.keys() | b.keys() if a.get(n) != b.get(n))
  named = [
    f"{name} was {a.get(name)!r}, is {b.get(name)!r}"
    for name in names[:_MOST_NAMED]
  ]
  if len(names) > _MOST_NAMED:
    named.append(f"{len(names) - _MOST_NAMED} more")
  return ", ".join(named)


def _flat(settings: Any, name: str = "") -> dict[str, Any]:
  """Leaves by dotted names."""
  if not isinstance(settings, dict):
    return {name: settings}
  return {
    key: leaf
    for part, inner in settings.items()
    for key, leaf in _flat(inner, f"{name}.{part}" if name else part).items()
  }


def _key(identity: Any) -> str:
  """An id, which may be any JSON, as something to look up."""
  return json.dumps(identity, sort_keys=True)


def _lines(records: list[dict]) -> str:
  return "".join(json.dumps(record) + "\n" for record in records)


def _is_something(path: pathlib.Path) -> bool:
  return path.exists() and path.stat().st_size > 0


def _whole_lines(path: pathlib.Path) -> list[str]:
  """The lines of a file, if any, without one that a crash left half-written."""
  if not path.exists():
    return []
  *lines, torn = path.read_text("utf-8", errors="replace").split("\n")
  if torn:
    print(f"{path}: dropped a half-written last line", file=sys.stderr)
  return lines
