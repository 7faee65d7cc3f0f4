"""The README's code, run, and its claims."""

import pathlib
import re

import pytest

pytestmark = pytest.mark.usefixtures("quick_to_compile")


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
  assert printed.startswith(" (self.__class__.__name__, self.name)")
  streamed = printed.splitlines()
  assert sum(line.startswith(("0 ", "1 ")) for line in streamed) == 24
  assert names["decoder"].rule.name == "recursive"


def test_the_rule_of_the_contributors_guide_is_lossless(capsys):
  names = run_blocks("CONTRIBUTING.md")
  assert names["rule_check"].error < 1e-12
  assert "cases, error" in capsys.readouterr().out
  assert names["checked"].method == "exact"
  assert names["checked"].num_drafts == 9
  drafting = names["DOUBLED"]("DIR", tokens=3)
  assert drafting.reads == "model"
  assert drafting.tree.num_drafted == 6
  drafting = names["SUCCESSORS"]("table.npy", tokens=2)
  assert (drafting.checkpoint, drafting.tree.num_drafted) == ("table.npy", 2)
