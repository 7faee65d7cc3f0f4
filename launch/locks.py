"""One writer at a time: a lock file beside what is written.

The kernel keeps the lock (`flock`), so it ends with its holder, however that
ends, and a file that a killed process left behind locks nothing. What the file
says, which process of which machine holds it since when, is for whoever is
refused. Machines that share a folder exclude each other as far as its file
system passes `flock` on: NFS does, a mounted bucket does not.
"""

import errno
import fcntl
import json
import os
import pathlib
import socket
import sys
import time
from typing import TextIO

from launch import processes, provenance

# What a file system without locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Lock:
  """A lock that is held while it is entered; the chief alone takes it.

  Args:
    path: the lock file; it is there while the lock is held.
    what: what it is the lock of, for messages.
  """

  def __init__(self, path: pathlib.Path, *, what: str):
    self._path = path
    self._what = what
    self._file: TextIO | None = None

  def __enter__(self):
    """Takes the lock.

    Raises:
      ValueError: that names the holder, if another process has it.
    """
    if not processes.is_chief():
      return self
    host = socket.gethostname()
    while True:
      file = self._path.open("a+", encoding="utf-8")
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        holder = _read(file)
        file.close()
        raise ValueError(
          f"{self._what} is being written by {_describe(holder)}: wait for it "
          f"or end it, or write elsewhere ({self._path} is its lock)"
        ) from None
      except OSError as error:
        file.close()
        if error.errno not in _NO_LOCKS:
          raise
        _say(
          f"cannot lock {self._what} ({error.strerror}): let no other process "
          "write to it"
        )
        return self
      if _is_at(self._path, file):
        break
      file.close()  # the holder before has just deleted it
    before = _read(file)
    if before:
      _say(
        f"took over the lock of {self._what}, which was not given back by "
        + _describe(before)
        + ("" if before.get("host") == host else "; if that runs, end it")
      )
    file.truncate(0)
    json.dump(
      {
        "host": host,
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": provenance.command(),
      },
      file,
    )
    file.flush()
    self._file = file
    return self

  def __exit__(self, *_):
    if self._file is not None:
      self._path.unlink(missing_ok=True)
      self._file.close()
      self._file = None


def _is_at(path: pathlib.Path, file: TextIO) -> bool:
  """Whether an open file is still the one at a path."""
  try:
    return os.path.samestat(path.stat(), os.fstat(file.fileno()))
  except FileNotFoundError:
    return False


def _read(file: TextIO) -> dict:
  """What the file says of its holder; nothing if it says nothing sensible."""
  file.seek(0)
  try:
    found = json.loads(file.read())
  except ValueError:
    return {}
  return found if isinstance(found, dict) else {}


def _describe(holder: dict) -> str:
  if not holder:
    return "another process"
  return (
    f"process {holder.get('pid')} on {holder.get('host')}, started "
    f"{holder.get('started')}: {holder.get('command')}"
  )


def _say(text: str) -> None:
  print(text, file=sys.stderr)
