"""Python source as training text: its files and splits.

The corpus is what a Python machine already has: the running interpreter's
standard library and a named list of permissively licensed installed packages.
Tests, generated and vendored files are left out. A file's split is decided by
its path inside the library (`json/decoder.py`), so a file held out on one
machine is held out on every machine and for every Python version. A held-out
file that is a near-duplicate of training files is dropped from all splits.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import pathlib
import re
import sysconfig
from collections.abc import Iterator

import numpy as np

# All have permissive licenses: PSF-2.0 (the standard library), MIT (rich),
# BSD-3-Clause (numpy), and Apache-2.0.
_PACKAGES = (
  "stdlib", "absl", "etils", "flax", "ml_collections", "numpy", "optax",
  "orbax", "rich",
)  # fmt: skip

_EXCLUDED = re.compile(
  r"(^|/)(tests?|testing|\w*test_(util|data)\w*|idlelib|lib2to3|turtledemo|"
  r"site-packages|_vendor|vendored?|ensurepip|__pycache__|encodings|pydoc_data)"
  r"(/|$)|"
  r"(_test|_tests|_pb2|_tables?|_unicode_data\w*|sre_constants)\.py$|"
  r"(^|/)(test_\w+|_sysconfigdata[\w-]*|entities|keyword|token|opcode)\.py$"
)
_GENERATED = re.compile(
  r"(automatically generated|auto[- ]?generated|do not edit)", re.I
)
# Largest share of a held-out file's long lines that training files may have.
_MAX_SHARED, _LONG_LINE = 0.3, 20
_LONGEST = 100_000  # characters; longer files are mostly tables
# Lines at the top of a file, mostly licenses, in which no prompt starts.
_TOP = 20


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """A file of the corpus: its path inside the library, and the source."""

  name: str
  text: str

  @property
  def split(self) -> str:
    """Its split by hash of the name: "test", "validation" or "train"."""
    return split_by_hash(self.name)


def split_by_hash(name: str) -> str:
  """Returns "test" (5%), "validation" (2%) or "train", by hash of a name."""
  digest = hashlib.sha256(name.encode()).digest()
  bucket = int.from_bytes(digest[:4], "big") % 100
  return "test" if bucket < 5 else "validation" if bucket < 7 else "train"


def _candidates() -> Iterator[SourceFile]:
  """All readable files of the packages except tests."""
  for package in _PACKAGES:
    if package == "stdlib":
      root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    else:
      spec = importlib.util.find_spec(package)
      root = pathlib.Path(next(iter(spec.submodule_search_locations)))
    for path in sorted(root.rglob("*.py")):
      inside = path.relative_to(root).as_posix()
      if _EXCLUDED.search(inside):
        continue
      name = inside if package == "stdlib" else f"{package}/{inside}"
      try:
        yield SourceFile(name, path.read_text("utf-8"))
      except (UnicodeDecodeError, OSError):
        continue


def python_files(*, split: str | None = None) -> list[SourceFile]:
  """The files of a split, or all, without duplicates, sorted by name."""
  return [f for f in _files() if split in (None, f.split)]


@functools.cache
def _files() -> list[SourceFile]:
  files: dict[str, SourceFile] = {}
  for file in _candidates():
    fits = 200 < len(file.text) <= _LONGEST
    if fits and not _GENERATED.search(file.text[:2000]):
      files.setdefault(file.text, file)
  learned = {
    line
    for f in files.values() if f.split == "train"
    for line in long_lines(f.text)
  }  # fmt: skip
  kept = (
    f
    for f in files.values()
    if f.split == "train" or shared(f.text, learned) <= _MAX_SHARED
  )
  return sorted(kept, key=lambda f: f.name)


def long_lines(text: str) -> list[str]:
  """The lines that identify a file: at least 20 characters, no comments."""
  lines = (line.strip() for line in text.splitlines())
  return [x for x in lines if len(x) >= _LONG_LINE and not x.startswith("#")]


def shared(text: str, learned: set[str]) -> float:
  """The share of a text's long lines that are among `learned`."""
  lines = long_lines(text)
  return sum(line in learned for line in lines) / max(len(lines), 1)


def held_out_prompts(count: int, *, num_lines: int = 8) -> list[str]:
  """Prompts from held-out files, a few lines from inside each.

  Files take turns, no two prompts share a line of a file, and no prompt occurs
  as a whole in a training file. The result depends only on the installed
  packages.
  """
  rng = np.random.default_rng(0)
  files = python_files()
  learned = "".join(f.text for f in files if f.split == "train")
  learned_lines = set(learned.splitlines(keepends=True))

  def is_learned(text):
    inner = text.splitlines(keepends=True)[1:-1]  # the quicker test first
    return learned_lines.issuperset(inner) and text in learned

  waiting = []
  for file in files:
    if file.split != "test":
      continue
    lines = file.text.splitlines(keepends=True)
    starts = np.arange(_TOP, len(lines) - num_lines + 1, num_lines)
    waiting.append(
      ["".join(lines[i : i + num_lines]) for i in rng.permutation(starts)]
    )
  prompts: dict[str, None] = {}  # in order, without repetition
  while len(prompts) < count and any(waiting):
    for texts in waiting:
      if texts and not is_learned(text := texts.pop()):
        prompts.setdefault(text)
  if len(prompts) < count:
    raise ValueError(f"the test files only give {len(prompts)} prompts")
  return list(prompts)[:count]
