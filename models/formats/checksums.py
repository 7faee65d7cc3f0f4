"""Checksums of a folder's files, written with it and checked before use.

A file `checksums.json` in the folder has the SHA-256 of every other. What was
saved before there were checksums has none, and is taken as it is.
"""

import concurrent.futures
import hashlib
import json
import pathlib
from collections.abc import Iterable

NAME = "checksums.json"
# Orbax writes these as the last thing of all, and restores without them.
_LATER = ("_CHECKPOINT_METADATA", "commit_success.txt")


def write(folder: pathlib.Path) -> None:
  """Writes the checksums of a folder that is complete."""
  files = hash_files(folder, _files(folder))
  (folder / NAME).write_text(json.dumps(files, indent=1) + "\n", "utf-8")


def check(folder: pathlib.Path) -> None:
  """Raises ValueError, naming files, if a folder is not as it was written."""
  try:
    wanted = json.loads((folder / NAME).read_bytes())
  except FileNotFoundError:
    return
  except ValueError:
    raise ValueError(f"{NAME} is damaged") from None
  hashes = hash_files(folder, _files(folder))
  if not isinstance(wanted, dict):
    raise ValueError(f"{NAME} is damaged")
  wrong = sorted(
    name
    for name in wanted.keys() | hashes.keys()
    if wanted.get(name) != hashes.get(name)
  )
  if wrong:
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise ValueError(
      f"{', '.join(wrong[:3])}{more} changed since they were written"
    )


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  return [
    file
    for file in folder.rglob("*")
    if file.is_file()
    and file.relative_to(folder).as_posix() not in (NAME, *_LATER)
  ]


def hash_file(path: pathlib.Path) -> str:
  """The SHA-256 of a file."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(root: pathlib.Path, files: Iterable[pathlib.Path]) -> dict:
  """The SHA-256 of each file by its path under `root`, sorted."""
  files = sorted(files, key=lambda file: file.relative_to(root).as_posix())
  with concurrent.futures.ThreadPoolExecutor() as threads:
    hashes = threads.map(hash_file, files)
    return {
      file.relative_to(root).as_posix(): digest
      for file, digest in zip(files, hashes, strict=True)
    }
