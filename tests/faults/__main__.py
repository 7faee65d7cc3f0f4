"""Which one-line faults the tests catch: `python -m tests.faults [FILE...]`.

Each fault of faults.toml is put into a copy of the checkout, and the tests that
stand beside it must fail there. Prints a line a fault and, last, those that
survived; exits with 1 if any did. Of all faults, or of those in some files.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("specjax", "models", "configs", "launch", "tests", "docs", "colab")


def copied(to: pathlib.Path) -> None:
  """The checkout without what was built."""
  for name in FOLDERS:
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / name, to / name, ignore=skip)
  for path in ROOT.glob("*.*"):
    if path.is_file():
      shutil.copy(path, to)


def outcome(fault: dict[str, str], root: pathlib.Path) -> str:
  """What became of it: "caught", "SURVIVED", or why neither can be said."""
  path = root / fault["file"]
  text = path.read_text(encoding="utf-8")
  if text.count(fault["before"]) != 1:
    return f"STALE: {text.count(fault['before'])} such places"
  path.write_text(text.replace(fault["before"], fault["after"]), "utf-8")
  command = [
    sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
    "-m", "not slow", *fault["tests"].split(),
  ]  # fmt: skip
  try:
    done = subprocess.run(
      command, cwd=root, capture_output=True, text=True, timeout=1200
    )
  except subprocess.TimeoutExpired:
    return "caught"  # a loop that does not end
  finally:
    path.write_text(text, "utf-8")
  if done.returncode in (0, 1):
    return ("SURVIVED", "caught")[done.returncode]
  return f"STALE: pytest says {done.stdout.splitlines()[-1:]}"


def main(files: list[str]) -> int:
  """Runs the faults; returns the exit status."""
  listed = tomllib.loads(
    pathlib.Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
  )["fault"]
  faults = [x for x in listed if not files or x["file"] in files]
  left = []
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    copied(root)
    for fault in faults:
      start = time.perf_counter()
      said = outcome(fault, root)
      seconds = time.perf_counter() - start
      line = f"{said:9} {seconds:4.0f} s  {fault['file']}: {fault['what']}"
      print(line, flush=True)
      if said != "caught":
        left.append(line)
  print(
    f"{len(faults) - len(left)} of {len(faults)} are caught", *left, sep="\n"
  )
  return bool(left)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
