"""Results on disk: atomic writing, overwriting rules, locks and journals.

An output is a regular file, a link to one, or nothing yet; "-" is stdout, where
a command allows it. Files of value are not replaced: no input of the
same command, and, without --overwrite, no file but an empty one or the result
of this very command. Files are written beside where they will be, and then
renamed: what reads them sees the old or the new one. Of several processes the
chief alone looks and writes; of several runs one has the `lock`. The progress
of a run is a `Journal`: OUT.journal has a line for every finished batch, under
a header that tells the run's settings.
"""

import contextlib
import errno
import functools
import glob
import json
import os
import pathlib
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

import filelock
from flax import serialization

from launch import cli, jsonl, processes, provenance, terminal
from launch.prompts import row_id

STDOUT = "-"
# What a journal keeps beside its output.
_BESIDE = (".journal", ".lock")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
# An id, which may be any JSON, to look up.
_key = functools.partial(json.dumps, sort_keys=True)
_KINDS = {"d": "folder", "p": "pipe", "c": "device", "b": "device"}


def check(
  results: Mapping[str, str | None],
  *,
  grown: Mapping[str, str | None] | None = None,
  drawn: Mapping[str, str | None] | None = None,
  inputs: Mapping[str, str | None] | None = None,
  resumes: bool = False,
  stdout: bool = False,
) -> None:
  """Raises, before any work is done, for an output that is not to be written.

  Args:
    results: paths, by the flags that name them, of JSON files that have their
      provenance: those of the same command are replaced.
    grown: of files whose journal knows what is of this run.
    drawn: of figures and pages of the results: they are replaced with them.
    inputs: of what the command reads, beside its config's and --prompts.
    resumes: whether the results have journals, too.
    stdout: whether one of the results may be "-".

  Raises:
    ValueError, OSError: that say which output, and why.
  """
  if not processes.is_chief():
    return
  results, grown, drawn, inputs = (
    {name: path for name, path in (paths or {}).items() if path}
    for paths in (results, grown, drawn, inputs)
  )
  given = {**results, **grown, **drawn}
  dashes = [name for name, path in given.items() if path == STDOUT]
  if dashes and not (stdout and len(dashes) == 1 and dashes[0] not in drawn):
    raise ValueError(
      f"{' and '.join(dashes)} must be a file, not '-': "
      + ("stdout holds one result" if stdout else "stdout is not gone on with")
    )
  taken = {**provenance.inputs(), **inputs}
  for name, path in given.items():
    if path == STDOUT:
      continue
    _check_kind(name, path)
    more = _BESIDE if resumes or name in grown else ()
    for one in (path, *(f"{resolve(path)}{end}" for end in more)):
      for other, place in taken.items():
        if _is_same(one, place):
          raise ValueError(f"{name} would replace {other}: {path}")
      for stream, number in (("stdout", 1), ("stderr", 2)):
        with contextlib.suppress(OSError):  # closed, or no file yet
          if os.path.samestat(os.stat(one), os.fstat(number)):
            raise ValueError(f"{name} is where {stream} goes: {one}")
      taken[name if one == path else f"{name} ({one})"] = one
  if cli.OVERWRITE.value:
    return
  for name, path in results.items():
    if _size(path):
      provenance.check_command(name, path)
  for name, path in drawn.items():
    if _size(path) and not any(map(_size, results.values())):
      raise ValueError(
        f"{name}: {path} is there already: --overwrite replaces it"
      )


def check_folder(name: str, path: str, *, model: bool = False) -> pathlib.Path:
  """Raises, before any work is done, if files cannot go into a folder.

  Args:
    name: the flag.
    path: the folder, which need not be there yet; it is returned.
    model: whether a model is to go there, where without --overwrite none is.

  Raises:
    ValueError: if it is no local path, or a model is there.
    NotADirectoryError: if it, or what it would be in, is a file.
    PermissionError: if it cannot be written to, or cannot be made.
  """
  folder = pathlib.Path(path)
  if not processes.is_chief():
    return folder
  _check_local(name, path)
  parent = next(x for x in (folder / "it").absolute().parents if x.exists())
  if not parent.is_dir():
    raise NotADirectoryError(f"expected a folder, but {parent} is a file")
  if not os.access(parent, os.W_OK):
    raise PermissionError(f"cannot write to {parent}")
  for file in ("config.json", "model.safetensors") if model else ():
    if (folder / file).exists() and not cli.OVERWRITE.value:
      raise ValueError(
        f"{name}: {folder / file} is there already: --overwrite replaces it"
      )
  return folder


def resolve(path: str | pathlib.Path) -> pathlib.Path:
  """The path with links followed; it need not exist."""
  return pathlib.Path(os.path.realpath(path))


def write(path: str | pathlib.Path, content: str | bytes) -> None:
  """Writes a file, so that it is never seen half-written; the chief does.

  What a link leads to is written, and keeps its permissions; "-" is stdout.
  """
  if not processes.is_chief():
    return
  if path == STDOUT:
    sys.stdout.write(str(content))
    sys.stdout.flush()
    return
  end = resolve(path)
  new = end.with_name(f".{end.name}.{os.getpid()}.tmp")
  try:
    _to_disk(new, "wb", content, name=end)
    if end.exists():
      shutil.copymode(end, new)
    os.replace(new, end)
  except BaseException:
    new.unlink(missing_ok=True)
    raise


def append(path: pathlib.Path, text: str) -> None:
  """Appends to a file, to the disk."""
  _to_disk(path, "ab", text, name=path)


def _to_disk(path, mode: str, content: str | bytes, *, name) -> None:
  raw = content.encode() if isinstance(content, str) else content
  try:
    with open(path, mode) as out:
      out.write(raw)
      out.flush()
      os.fsync(out.fileno())
  except OSError as error:  # of a full disk: it does not tell of which file
    error.filename = error.filename or str(name)
    raise


def write_new(path: str, content: str | bytes) -> None:
  """`write`, if nothing else is there; ValueError, or --overwrite."""
  if _size(path) and not cli.OVERWRITE.value:
    raw = content.encode() if isinstance(content, str) else content
    if pathlib.Path(path).read_bytes() == raw:
      return
    raise ValueError(f"{path} holds something else: --overwrite replaces it")
  write(path, content)


def write_json(path: str | pathlib.Path, value: Any) -> None:
  """`write` of JSON."""
  write(path, json.dumps(value, indent=2) + "\n")


def show_json(path: str | None, value: Any) -> None:
  """Writes a result if there is a path, and shows it on stdout in any case."""
  if path:
    write_json(path, value)
  if path != STDOUT and processes.is_chief():
    terminal.console().print_json(json.dumps(value))


def beside(path: str | None) -> TextIO:
  """The stream for human readers: stderr, if stdout has the result."""
  return sys.stderr if path == STDOUT else sys.stdout


def _is_same(one: str, other: str) -> bool:
  if os.path.exists(one) and os.path.exists(other):
    return os.path.samefile(one, other)
  return resolve(one) == resolve(other)


def _size(path: str | pathlib.Path) -> int:
  """Bytes of a file; 0 of stdout, and of what is not there."""
  exists = path != STDOUT and os.path.exists(path)
  return os.path.getsize(path) if exists else 0


def _check_local(name: str, path: str) -> None:
  if "://" in path:
    raise ValueError(
      f"{name} must be a local path (a bucket can be mounted), got {path}"
    )


def _check_kind(name: str, path: str) -> None:
  """Raises for what is no regular file, or cannot become one."""
  _check_local(name, path)
  end = resolve(path)
  if end.is_symlink():
    raise ValueError(f"{name} must be a file, but {path} is a link to itself")
  if not end.parent.is_dir():
    raise FileNotFoundError(f"no such folder for {path}: {end.parent}")
  kind = stat.filemode(end.stat().st_mode)[0] if end.exists() else "-"
  if kind != "-":
    kind = _KINDS.get(kind, "socket")
    raise ValueError(f"{name} must be a file, but {path} is a {kind}")
  for place in (end, end.parent):
    if place.exists() and not os.access(place, os.W_OK):
      raise PermissionError(f"{name}: cannot write to {place}")


@contextlib.contextmanager
def lock(path: pathlib.Path, *, what: str) -> Iterator[None]:
  """Holds a lock file, which is there as long; the chief alone does.

  The kernel keeps the lock (`flock`), so it ends with its holder, whom the file
  names. Machines that share a folder exclude each other if its file system
  passes `flock` on: NFS does, a mounted bucket does not.

  Args:
    path: the lock file.
    what: what it is the lock of, for messages.

  Raises:
    ValueError: that names the holder, if another process has it.
  """
  if not processes.is_chief():
    yield
    return
  # A little time: the holder before may have just deleted its file.
  held = filelock.FileLock(
    path, timeout=0.05, poll_interval=0.01, fallback_to_soft=False
  )
  try:
    held.acquire()
  except filelock.Timeout:
    holder = path.exists() and path.read_text("utf-8", "replace")
    raise ValueError(
      f"{what} is being written by {holder or 'another process'}: wait for it "
      f"or end it, or write elsewhere ({path} is its lock)"
    ) from None
  except OSError as error:
    if error.errno not in _NO_LOCKS:
      raise
    _say(
      f"cannot lock {what} ({error.strerror}): let no other process write it"
    )
  try:
    if held.is_locked:
      host = f"on {socket.gethostname()}, "
      if before := path.read_text("utf-8", "replace"):
        _say(
          f"took over the lock of {what}, which was not given back by {before}"
          + ("" if host in before else "; if that runs, end it")
        )
      now = time.strftime("%Y-%m-%d %H:%M:%S %z")
      me = f"process {os.getpid()} {host}started {now}: {provenance.command()}"
      path.write_text(me, "utf-8")
    yield
  finally:
    if held.is_locked:
      path.unlink(missing_ok=True)
      held.release()


class Journal:
  """The progress of a run that writes one file, open and locked while entered.

  Attributes:
    begun: whether there is anything on disk.
    batches: finished batches by what `add` was given under "batch" (a number
      or a string), in the order they were added.
  """

  def __init__(
    self,
    output: str,
    settings: Mapping[str, Any],
    *,
    grows: bool = False,
    rows_of: Callable[[dict], Iterable[dict]] | None = None,
    wanted: Mapping[str, Any] | None = None,
  ):
    """Reads nothing yet.

    Args:
      output: the final file.
      settings: all that decides the results, of JSON's types.
      grows: whether the journal is kept beside a finished output: the same run,
        asked for again, then goes on with it, and what has no journal is not
        replaced. Else `check` decides whether a finished output is replaced.
      rows_of: the rows that a record gives, if the output is JSONL and grows
        with the journal. The batches of deleted rows are made again; others
        stay as they are. A record has the "ids" of its rows
        (`launch.prompts.row_id`) and their "keys", each of all that it is of.
      wanted: the ids of all rows that are to be there, by their keys.
    """
    self._output = resolve(output)
    self._path, lock_path = (
      self._output.with_name(self._output.name + end) for end in _BESIDE
    )
    self._lock = lock(lock_path, what=output)
    self._settings = json.loads(json.dumps(settings, sort_keys=True))
    self._grows, self._rows_of = grows or rows_of is not None, rows_of
    self._wanted = {key: _key(i) for key, i in (wanted or {}).items()}
    self.begun = False
    self.batches: dict[int | str, dict] = {}

  def __enter__(self):
    """Opens or resumes, and says on stderr what is there or made again.

    Raises:
      ValueError: if another process has it open; or, without --overwrite, for
        other settings, rows that were changed, and rows of other prompts.
    """
    with contextlib.ExitStack() as stack:
      stack.enter_context(self._lock)
      if processes.is_chief() and not cli.OVERWRITE.value:
        self._resume()
      cli.keeps(str(self._output))
      self._exit = stack.pop_all()
    return self

  def __exit__(self, *error):
    self._exit.__exit__(*error)

  def _resume(self) -> None:
    path = self._path
    lines = jsonl.whole(path)
    if not lines:
      if self._grows and _size(self._output):
        raise ValueError(
          f"{self._output} is there, and no {path.name} tells that it is of "
          "this run: --overwrite replaces it"
        )
      return
    header = lines[0] or {}
    if not header.keys() & self._settings.keys():
      raise ValueError(
        f"{path} is damaged, or the journal of something else: --overwrite "
        "begins anew"
      )
    if header != self._settings:
      if self._rows_of and not self._output.exists():
        return  # all its rows were deleted: nothing of it is left to keep
      raise ValueError(
        f"{path} is of a run with other settings "
        f"({provenance.changed(header, self._settings)}): give its command "
        "again to finish that run, another output, or --overwrite to replace "
        "it"
      )
    for number, record in enumerate(lines[1:], start=2):
      if record and "batch" in record:
        self.batches[record["batch"]] = record
      else:
        _say(f"{path}:{number}: damaged, and done again")
    if self._rows_of:
      self._resume_rows(self._rows_of)
    self._begin()

  def _begin(self) -> None:
    """Writes the journal as it is known; appending is then safe."""
    self.begun = True
    write(self._path, jsonl.dumps([self._settings, *self.batches.values()]))

  def _resume_rows(self, rows_of: Callable[[dict], Iterable[dict]]) -> None:
    """Keeps the batches of which all rows are there, and no other rows."""
    path, rows = self._output, {}
    delete = "delete that line to have it made again"
    anew = "or give --overwrite to begin anew"

    def refused(i: str, text: str) -> ValueError:
      text = f"the row of id {i} is {text}, {anew}"
      return ValueError(f"{path}:{rows[i][0]}: {text}")

    for number, row in enumerate(jsonl.whole(path), start=1):
      if row is None:
        raise ValueError(
          f"{path}:{number}: expected a JSON object; {delete}, {anew}"
        )
      rows[_key(row_id(row))] = number, row
    known, ours = set(), set(self._wanted.values())
    for name, record in [*self.batches.items()]:
      ids = [_key(i) for i in record["ids"]]
      if not rows.keys() >= set(ids):
        del self.batches[name]
        continue
      for i, key in zip(ids, record["keys"], strict=True):
        if self._wanted.get(key) != i:
          owner = "another prompt" if i in ours else "none of these prompts"
          raise refused(i, f"of {owner}: write elsewhere")
      for i, row in zip(ids, rows_of(record), strict=True):
        if json.dumps(rows[i][1]) != json.dumps(row):
          raise refused(i, f"not as it was written; {delete}")
      known.update(ids)
    stale = rows.keys() - known
    for i in stale - ours:
      raise refused(i, "of none of these prompts: write elsewhere")
    if stale:
      _say(f"{path}: {len(stale)} rows are made again")
    write(path, jsonl.dumps(row for i, (_, row) in rows.items() if i in known))
    _say(f"{path}: {len(known)} rows are there already and are kept")

  def add(self, record: dict) -> None:
    """Appends a finished batch; `record["batch"]` is its number or name."""
    if not self.begun:
      if self._rows_of:
        write(self._output, "")
      self._begin()
    if processes.is_chief():
      append(self._path, jsonl.dumps([record]))
      if self._rows_of:
        append(self._output, jsonl.dumps(self._rows_of(record)))
    self.batches[record["batch"]] = record

  def finish(self, rows: Iterable[dict] | None = None) -> None:
    """Writes all rows of the output, if they are given; ends the journal."""
    if rows is not None:
      write(self._output, jsonl.dumps(rows))
    if processes.is_chief() and not self._grows:
      self._path.unlink(missing_ok=True)


def _say(text: str) -> None:
  print(text, file=sys.stderr)


class Saved:
  """The learners of a run, after each of its parts, beside its output.

  A part's learners are saved *before* the part is in the journal, under the
  number of parts there will be then, and those before them stay until they are
  no longer needed. So whatever moment a run is killed at, the learners of as
  many parts as the journal has are there.
  """

  def __init__(self, output: str, learners: Mapping[str, Any]):
    """Reads nothing yet.

    Args:
      output: of the run.
      learners: `launch.online.Learner`s by the names of what learns.
    """
    self._output = resolve(output)
    self._learners = learners

  def _path(self, parts: int | str) -> pathlib.Path:
    return self._output.with_name(f"{self._output.name}.learned-{parts}")

  def load(self, parts: int) -> None:
    """Goes on where a run was that had finished so many parts.

    Raises:
      ValueError: if what it had learned is not there, or damaged.
    """
    if not self._learners:
      return
    if parts:
      path = self._path(parts)
      try:
        saved = serialization.msgpack_restore(path.read_bytes())
        for name, learner in self._learners.items():
          learner.restore(saved[name])
      except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
          f"what was learned in {parts} parts cannot be read from {path} "
          f"({error}): --overwrite begins anew"
        ) from None
    begins = glob.escape(f"{self._output.name}.learned-")
    for other in self._output.parent.glob(f"{begins}*"):
      if other != self._path(parts):
        other.unlink()

  def save(self, parts: int) -> None:
    """Saves what is known after so many parts."""
    if not self._learners:
      return
    saved = {name: one.snapshot() for name, one in self._learners.items()}
    write(self._path(parts), serialization.msgpack_serialize(saved))
    self._path(parts - 2).unlink(missing_ok=True)
