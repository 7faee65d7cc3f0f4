"""What the README says was run."""

import pathlib
import re

from launch import measurements

README = pathlib.Path("README.md").read_text("utf-8")


def test_the_library_example_runs_and_completes_the_prompt(capsys):
  (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
  exec(compile(code, "README.md", "exec"), {})
  printed = capsys.readouterr().out
  assert printed.startswith("import os\nimport sys\n\ndef main(")
  assert len(printed) > len("import os\nimport sys\n\ndef main(") + 20


def test_the_table_is_drawn_from_the_committed_measurements():
  assert measurements.table("docs/measurements") in README


def test_named_files_exist():
  for name in re.findall(r"\]\(([\w/.]+)\)", README):
    assert pathlib.Path(name).exists(), name
