"""Python source as training text: its files and their splits.

The corpus is what a Python machine already has: the running interpreter's
standard library and a named list of permissively licensed installed packages.
Tests, generated and vendored files are left out. A file's split is decided by
its path inside the library (`json/decoder.py`), so a file held out on one
machine is held out on every machine and for every Python version. Files that
are near-duplicates of training files are not held out: they are in no split.
"""

import dataclasses
import hashlib
import importlib.util
import pathlib
import re
import sysconfig
from collections.abc import Iterator

import numpy as np

# All permissive. "stdlib" is the standard library.
LICENCES = {
  "stdlib": "PSF-2.0",
  "absl": "Apache-2.0",
  "etils": "Apache-2.0",
  "flax": "Apache-2.0",
  "ml_collections": "Apache-2.0",
  "numpy": "BSD-3-Clause",
  "optax": "Apache-2.0",
  "orbax": "Apache-2.0",
  "rich": "MIT",
}
PACKAGES = tuple(LICENCES)

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
# A held-out file shares at most so much of its long lines with training files.
_MAX_SHARED, _LONG_LINE = 0.3, 20
_LONGEST = 100_000  # characters; longer files are tables, mostly
# Lines at the top of a file, licences mostly, that no prompt begins in.
_TOP = 20


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """A file of the corpus.

  Attributes:
    name: path inside the library, which decides the split.
    package: one of `PACKAGES`.
    text: the source.
  """

  name: str
  package: str
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


def _roots(packages: tuple[str, ...]) -> Iterator[tuple[str, pathlib.Path]]:
  for package in packages:
    if package == "stdlib":
      yield package, pathlib.Path(sysconfig.get_paths()["stdlib"])
      continue
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
      raise ValueError(f"package {package!r} is not installed here")
    yield package, pathlib.Path(next(iter(spec.submodule_search_locations)))


def python_files(
  packages: tuple[str, ...] = PACKAGES, *, split: str | None = None
) -> list[SourceFile]:
  """Reads the corpus, de-duplicated, in a fixed order.

  Args:
    packages: some of `PACKAGES`.
    split: only files of this split; None for all.

  Returns:
    The files, sorted by name, without held-out near-duplicates of training
    files.
  """
  files, seen = [], set()
  for package, root in _roots(packages):
    for path in sorted(root.rglob("*.py")):
      inside = path.relative_to(root).as_posix()
      name = inside if package == "stdlib" else f"{package}/{inside}"
      if _EXCLUDED.search(inside):
        continue
      try:
        text = path.read_text("utf-8")
      except (UnicodeDecodeError, OSError):
        continue
      digest = hashlib.sha256(text.encode()).digest()
      if (
        not 200 < len(text) <= _LONGEST
        or digest in seen
        or _GENERATED.search(text[:2000])
      ):
        continue
      seen.add(digest)
      files.append(SourceFile(name, package, text))
  learned = {
    line for f in files if f.split == "train" for line in long_lines(f.text)
  }
  return sorted(
    (
      f
      for f in files
      if split in (None, f.split)
      and (f.split == "train" or shared(f.text, learned) <= _MAX_SHARED)
    ),
    key=lambda f: f.name,
  )


def long_lines(text: str) -> list[str]:
  """The lines that tell files apart: of 20 characters, no comments."""
  lines = (line.strip() for line in text.splitlines())
  return [x for x in lines if len(x) >= _LONG_LINE and not x.startswith("#")]


def shared(text: str, learned: set[str]) -> float:
  """The share of a text's long lines that are among `learned`, 0 if none is."""
  lines = long_lines(text)
  return sum(line in learned for line in lines) / max(len(lines), 1)


def held_out_prompts(
  count: int, *, num_lines: int = 8, split: str = "test"
) -> list[str]:
  """Prompts from held-out files: some lines from inside each.

  Files take turns, no two prompts share a line of a file, and no prompt stands
  as a whole in a training file. They are the same on every call with the same
  packages installed.

  Raises:
    ValueError: if the split has fewer.
  """
  rng = np.random.default_rng(0)
  files = python_files()
  learned = "".join(f.text for f in files if f.split == "train")
  learned_lines = set(learned.splitlines(keepends=True))

  def is_learned(text):
    whole = text.splitlines(keepends=True)[1:-1]  # the quicker question first
    return learned_lines.issuperset(whole) and text in learned

  waiting = []
  for file in files:
    if file.split != split:
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
    raise ValueError(
      f"the {split} files of {', '.join(PACKAGES)} give {len(prompts)} "
      f"prompts of {num_lines} lines, not {count}"
    )
  return list(prompts)[:count]
