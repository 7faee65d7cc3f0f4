"""Where commands write, and how: no command opens an output by itself.

An output is a regular file, a link to one, or nothing yet; "-" is stdout, where
a command allows it. What somebody may want is not replaced: no input of the
same command, and, without --overwrite, no file but an empty one or the result
of this very command. Files are written whole, beside where they will be, and
then renamed: what reads them sees the old or the new one.

Of several processes the chief alone looks and writes.
"""

import json
import os
import pathlib
import shutil
import stat
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from launch import cli, processes, provenance, terminal

STDOUT = "-"
# What a journal keeps beside its output.
BESIDE = (".partial", ".journal", ".lock")

_KINDS = (
  (stat.S_ISDIR, "folder"),
  (stat.S_ISFIFO, "pipe"),
  (stat.S_ISCHR, "device"),
  (stat.S_ISBLK, "device"),
  (stat.S_ISSOCK, "socket"),
)


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
    grown: paths of files whose journal knows what is of this run.
    drawn: paths of figures and pages of the results: they are replaced with
      them.
    inputs: what the command reads, beside its config's and --prompts.
    resumes: whether the results have journals, too.
    stdout: whether one of the results may be "-".

  Raises:
    ValueError, OSError: that say which output, and why.
  """
  if not processes.is_chief():
    return
  results, grown, drawn = dict(results), dict(grown or {}), dict(drawn or {})
  given = {n: p for n, p in {**results, **grown, **drawn}.items() if p}
  dashes = [name for name, path in given.items() if path == STDOUT]
  if dashes and not (stdout and len(dashes) == 1 and dashes[0] not in drawn):
    raise ValueError(
      f"{' and '.join(dashes)} must be a file, not '-': "
      + ("stdout holds one result" if stdout else "stdout is not gone on with")
    )
  given = {name: path for name, path in given.items() if path != STDOUT}
  taken = _inputs() | {n: p for n, p in (inputs or {}).items() if p}
  for name, path in given.items():
    _check_kind(name, path)
    beside = BESIDE if resumes or name in grown else ()
    for one in [path, *(str(resolve(path)) + end for end in beside)]:
      for other, place in taken.items():
        if _is_same(one, place):
          raise ValueError(f"{name} would replace {other}: {path}")
      _check_streams(name, one)
      taken[f"{name} ({one})" if one != path else name] = one
  if cli.OVERWRITE.value:
    return
  for name in results.keys() & given.keys():
    _check_command(name, given[name])
  written = any(_size(given[name]) for name in results.keys() & given.keys())
  for name in drawn.keys() & given.keys():
    if _size(given[name]) and not written:
      raise ValueError(
        f"{name}: {given[name]} is there already: --overwrite replaces it"
      )


def check_folder(name: str, path: str) -> pathlib.Path:
  """Raises, before any work is done, if files cannot go into a folder `path`.

  It need not be there yet.

  Args:
    name: the flag.
    path: the folder.

  Returns:
    The same.

  Raises:
    ValueError: if it is no local path.
    NotADirectoryError: if it, or what it would be in, is a file.
    PermissionError: if it cannot be written to, or cannot be made.
  """
  if not processes.is_chief():
    return pathlib.Path(path)
  _check_local(name, path)
  there = pathlib.Path(path).absolute()
  while not there.exists():
    there = there.parent
  if not there.is_dir():
    raise NotADirectoryError(f"expected a folder, but {there} is a file")
  if not os.access(there, os.W_OK):
    raise PermissionError(f"cannot write to {there}")
  return pathlib.Path(path)


def check_no_model(name: str, path: str) -> None:
  """`check_folder`; ValueError also if a model is in it, or --overwrite."""
  folder = check_folder(name, path)
  names = ("config.json", "model.safetensors")
  there = [name for name in names if (folder / name).exists()]
  if there and processes.is_chief() and not cli.OVERWRITE.value:
    raise ValueError(
      f"{name}: {folder / there[0]} is there already: --overwrite replaces it"
    )


def resolve(path: str) -> pathlib.Path:
  """What a path leads to, which need not be there: links are followed."""
  return pathlib.Path(os.path.realpath(path))


def replace(path: str | pathlib.Path, content: str | bytes) -> None:
  """Writes a file so that it is never seen half-written.

  What a link leads to is written, and keeps its permissions.
  """
  end = resolve(str(path))
  new = end.with_name(f".{end.name}.{os.getpid()}.tmp")
  try:
    raw = content.encode("utf-8") if isinstance(content, str) else content
    with new.open("wb") as out:
      out.write(raw)
      out.flush()
      os.fsync(out.fileno())
    if end.exists():
      shutil.copymode(end, new)
    os.replace(new, end)
  except BaseException as error:
    new.unlink(missing_ok=True)
    raise _named(error, end) from None


def append(path: str | pathlib.Path, text: str) -> None:
  """Appends to a file, to the disk."""
  try:
    with pathlib.Path(path).open("a", encoding="utf-8") as out:
      out.write(text)
      out.flush()
      os.fsync(out.fileno())
  except OSError as error:
    raise _named(error, path) from None


def _named(error: BaseException, path: str | pathlib.Path) -> BaseException:
  """The error; a full disk does not tell by itself what it holds."""
  if isinstance(error, OSError) and error.errno and error.filename is None:
    return OSError(error.errno, error.strerror, str(path))
  return error


def write_text(path: str, text: str) -> None:
  """Writes a file, whole or not at all, or to stdout; the chief does."""
  if not processes.is_chief():
    return
  if path == STDOUT:
    sys.stdout.write(text)
    sys.stdout.flush()
  else:
    replace(path, text)


def write_new(path: str, content: str | bytes) -> None:
  """`write_text`, if nothing else is there; ValueError, or --overwrite.

  Bytes go to a file only.
  """
  if path != STDOUT and _size(path) and not cli.OVERWRITE.value:
    raw = content.encode() if isinstance(content, str) else content
    if pathlib.Path(path).read_bytes() == raw:
      return
    raise ValueError(f"{path} holds something else: --overwrite replaces it")
  if isinstance(content, str):
    write_text(path, content)
  elif processes.is_chief():
    replace(path, content)


def write_json(path: str, value: Any) -> None:
  """`write_text` of JSON."""
  write_text(path, json.dumps(value, indent=2) + "\n")


def show_json(path: str | None, value: Any) -> None:
  """Writes a result if there is a path, and shows it on stdout in any case."""
  if path:
    write_json(path, value)
  if path != STDOUT and processes.is_chief():
    terminal.console().print_json(json.dumps(value))


def beside(path: str | None) -> TextIO:
  """Where what is meant for readers goes: stderr, if stdout has the result."""
  return sys.stderr if path == STDOUT else sys.stdout


def _inputs() -> dict[str, str]:
  """What every command may read: its config, the prompts, the models."""
  found = {}
  if cli.PROMPTS.value:
    found["--prompts"] = cli.PROMPTS.value
  config = cli.CONFIG.value
  if config is None:
    return found
  found["--config"] = cli.config_file()
  from models import checkpoints

  for role in ("target", "draft", "corpus"):
    directory = config.get(role)
    if isinstance(directory, str) and os.path.exists(directory):
      for file in checkpoints.files(directory):
        found[f"config.{role} ({file})"] = str(file)
  return found


def _is_same(one: str, other: str) -> bool:
  if os.path.exists(one) and os.path.exists(other):
    return os.path.samefile(one, other)
  return resolve(one) == resolve(other)


def _size(path: str) -> int:
  return os.path.getsize(path) if os.path.exists(path) else 0


def _check_local(name: str, path: str) -> None:
  if "://" in path:
    raise ValueError(
      f"{name} must be a local path (a bucket can be mounted), got {path}"
    )


def _check_kind(name: str, path: str) -> None:
  """Raises for what is no regular file, or cannot become one."""
  _check_local(name, path)
  end = resolve(path)
  if os.path.exists(path):
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
      kind = next((kind for test, kind in _KINDS if test(mode)), "no file")
      raise ValueError(f"{name} must be a file, but {path} is a {kind}")
    if not os.access(path, os.W_OK):
      raise PermissionError(f"{name}: cannot write to {path}")
  if end.is_symlink():
    raise ValueError(f"{name} must be a file, but {path} is a link to itself")
  if not end.parent.is_dir():
    raise FileNotFoundError(f"no such folder for {path}: {end.parent}")
  if not os.access(end.parent, os.W_OK):
    raise PermissionError(f"{name}: cannot write to {end.parent}")


def _check_streams(name: str, path: str) -> None:
  """Raises if the shell sends stdout or stderr to the same file."""
  if not os.path.exists(path):
    return
  for stream, number in (("stdout", 1), ("stderr", 2)):
    try:
      same = os.path.samestat(os.stat(path), os.fstat(number))
    except OSError:  # closed
      continue
    if same:
      raise ValueError(f"{name} is where {stream} goes: {path}")


def _check_command(name: str, path: str) -> None:
  """Raises if there is something that this command did not write."""
  if not _size(path):
    return
  try:
    found = json.loads(pathlib.Path(path).read_bytes())
    found = found[0] if isinstance(found, list) else found
    theirs = found["provenance"]["command"]
    different = provenance.differences(theirs, provenance.command())
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
    raise ValueError(
      f"{name}: {path} is there, and does not say that this command wrote it: "
      "--overwrite replaces it"
    ) from None
  if different:
    raise ValueError(
      f"{name}: {path} is the result of another command ({different}): "
      "--overwrite replaces it"
    )
