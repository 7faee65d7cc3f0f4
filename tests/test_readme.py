"""What the README says was run."""

import json
import pathlib
import re

import pytest

from launch.measuring import tables

README = pathlib.Path("README.md").read_text("utf-8")


def run_blocks(name):
  """Runs the Python blocks of a document, one after the other."""
  text = pathlib.Path(name).read_text("utf-8")
  names = {}
  for code in re.findall(r"```python\n(.*?)```", text, re.S):
    exec(compile(code, name, "exec"), names)
  return names


def test_the_library_examples_run_and_complete_the_prompt(capsys):
  names = run_blocks("README.md")
  printed = capsys.readouterr().out
  assert printed.startswith("import os\nimport sys\n\ndef main(")
  assert len(printed) > len("import os\nimport sys\n\ndef main(") + 20
  state = names["state"]
  assert int(state.length[0] - state.prompt_length[0]) == 64
  assert printed.rstrip().splitlines()[-1].startswith("(-1, 0, ")


def test_the_rule_of_the_contributors_guide_is_lossless(capsys):
  names = run_blocks("CONTRIBUTING.md")
  assert names["error"] < 1e-12
  # b = min(p, q / 2) = (.1, .15, .2) of which .45 a position are accepted.
  assert names["law"].expected_accepted == pytest.approx(0.45 + 0.45**2)
  assert "accepts 0.65" in capsys.readouterr().out
  assert names["checked"].method == "exact"
  assert names["checked"].num_drafts == 9


def test_the_table_is_drawn_from_the_committed_measurements():
  assert tables.table("docs/measurements") in README


def test_the_commands_of_the_rows_stand_under_the_table(tmp_path):
  source = pathlib.Path("docs/measurements/embedded-greedy.json")
  result = json.loads(source.read_text())
  result.pop("provenance", None)
  (tmp_path / "old.json").write_text(json.dumps(result))
  rows = tables.table(str(tmp_path)).count("\n")
  command = "python -m launch.benchmark --config=a.py '--config.rule=x y'"
  result["provenance"] = {"command": f"{command} --output=B.json --overwrite"}
  (tmp_path / "new.json").write_text(json.dumps(result))
  lines = tables.table(str(tmp_path)).splitlines()
  assert lines[-2:] == ["", f"- new: `{command}`"]
  assert len(lines) == rows + 4


def test_named_files_exist():
  for name in re.findall(r"\]\(([\w/.]+)\)", README):
    assert pathlib.Path(name).exists(), name


def test_the_table_tells_the_share_of_bandwidth_where_one_was_measured(
  tmp_path,
):
  source = pathlib.Path("docs/measurements/embedded-greedy.json")
  result = json.loads(source.read_text())
  del result["memory_bandwidth"]  # as on a mesh
  (tmp_path / "a.json").write_text(json.dumps(result))
  assert "bandwidth" not in tables.table(str(tmp_path))
  result["memory_bandwidth"] = {
    "share": 0.62, "device_bandwidth_source": "spec sheet"
  }  # fmt: skip
  (tmp_path / "b.json").write_text(json.dumps(result))
  header, rule, without, found = tables.table(str(tmp_path)).splitlines()
  place = header.split(" | ").index("memory bandwidth")
  assert without.split(" | ")[place] == "–"
  assert found.split(" | ")[place] == "62% (spec sheet)"
  assert len({line.count("|") for line in (header, rule, without, found)}) == 1
