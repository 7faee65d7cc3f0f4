"""A machine without a TPU: commands that only note how they were called."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]

# Notes its arguments in $FAKE/calls and answers with the next of the lines that
# $FAKE/answers.json has for the first key that the arguments contain: text, or
# an exit code (404 is exit code 1 and that something was not found). The last
# line of a key is repeated.
_FAKE = """#!{python} -IS
import json, os, pathlib, sys
here = pathlib.Path(os.environ["FAKE"])
call = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
for word in call:
  name, _, path = word.rpartition("=")
  if name.endswith("startup-script"):
    (here / "startup.sh").write_text(pathlib.Path(path).read_text())
if call[-2:-1] == ["-"]:
  call.append(sys.stdin.read())
with (here / "calls").open("a") as out:
  out.write(json.dumps(call) + "\\n")
file = here / "answers.json"
answers = json.loads(file.read_text())
for key, lines in answers.items():
  if key in " ".join(call):
    answer = lines.pop(0) if len(lines) > 1 else lines[0]
    file.write_text(json.dumps(answers))
    if isinstance(answer, int):
      none = "NOT_FOUND: One or more URLs matched no objects."
      print(none if answer == 404 else "fake failure", file=sys.stderr)
      sys.exit(1 if answer == 404 else answer)
    print(answer)
    break
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """A folder of fake commands, and the record of their calls.

  Attributes:
    folder: has calls and answers.json, and on PATH bin/.
  """

  folder: pathlib.Path

  def fake(self, name: str) -> None:
    """Puts a command on PATH."""
    file = self.folder / "bin" / name
    file.write_text(_FAKE.format(python=sys.executable))
    file.chmod(0o755)

  def answer(self, **answers) -> None:
    """Answers to calls, by a part of their arguments (_ for a blank)."""
    (self.folder / "answers.json").write_text(
      json.dumps({k.replace("_", " "): v for k, v in answers.items()})
    )

  def calls(self) -> list[list[str]]:
    """The calls so far, oldest first."""
    file = self.folder / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]

  def run(self, script, *args, cwd=ROOT, **environment):
    """Runs a script to its end."""
    return subprocess.run(
      ["bash", str(script), *map(str, args)],
      capture_output=True, text=True, timeout=120, cwd=cwd, check=False,
      env={
        "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(self.folder),
        "FAKE": str(self.folder),
        **environment,
      },
    )  # fmt: skip


@pytest.fixture
def machine(tmp_path):
  (tmp_path / "bin").mkdir()
  made = Machine(folder=tmp_path)
  made.fake("gcloud")
  made.answer()
  return made
