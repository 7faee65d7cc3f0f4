"""Commands in pages, docstrings and scripts: settings and drafters exist."""

import pathlib
import re
import shlex

from launch import cli
from launch.assembly import registry
from launch.evaluation.systems import SYSTEMS
from specjax import calls, shapes

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Made from results, whose commands are spelt as when they were run.
MADE = ("results.md", "evaluation", "reports", "measurements")


def texts() -> dict[str, str]:
  """Pages that people wrote, by path."""
  files = [
    *ROOT.glob("*.md"),
    *(ROOT / "models" / "pretrained").glob("*.md"),
    *(ROOT / "docs").rglob("*.sh"),
    *(
      path
      for path in (ROOT / "docs").rglob("*.md")
      if path.relative_to(ROOT / "docs").parts[0] not in MADE
    ),
    *(
      path
      for folder in ("configs", "launch", "colab")
      for path in (ROOT / folder).rglob("*")
      if path.suffix in (".py", ".md", ".sh")
    ),
  ]
  return {str(p.relative_to(ROOT)): p.read_text("utf-8") for p in files}


def flags(text: str, name: str) -> list[str]:
  """Values of a flag in the indented commands of a text, as a shell reads it.

  Those of scripts' variables are not among them.
  """
  results = []
  for line in re.sub(r"\\\n\s*", " ", text).splitlines():
    command = line.startswith(("  ", "python"))
    if command and "$" not in line and f"--{name}=" in line:
      results += [
        word.partition("=")[2]
        for word in shlex.split(line.replace("[", "").replace("]", ""))
        if word.startswith(f"--{name}=")
      ]
  return results


def test_settings_in_pages_and_scripts_are_no_arguments_of_drafters():
  wrong = {
    (name, setting)
    for name, text in texts().items()
    for setting in re.findall(r"--config\.(\w+)=", text)
    if setting in cli._SAID_BY_DRAFTER or setting.startswith("online_")
  }
  assert not wrong


def test_drafters_and_systems_in_commands_are_calls_of_the_grammar():
  read = []
  for name, text in texts().items():
    if name.startswith("colab/") or name.endswith(".sh"):
      continue  # no shell reads these, or one with variables
    for flag in ("config.drafter", "drafter", "systems", "over"):
      for value in flags(text, flag):
        if "package.module" not in value:
          read += map(SYSTEMS.canonical, calls.parse_list(value))
  assert len(read) > 40
  assert "with_rule(eagle3, block)" in read


def test_drafters_in_the_page_are_those_that_help_prints():
  page = (ROOT / "docs" / "command-line.md").read_text("utf-8")
  section = page.partition("### What drafts")[2].partition("\n### ")[0]
  shown = [x for x in section.splitlines() if x.startswith("| ")]
  rows = [f"| `{call}` | {about} |" for call, about in registry.DRAFTERS.help()]
  assert [x for x in shown if not x.endswith("| is |")] == rows
  said = page.partition("### What drafts")[2].partition("\n### Heads")[0]
  for grammar in (shapes.GRAMMAR, registry.POLICIES, registry.WEIGHTS):
    for call, _ in grammar.help():
      name = call.partition("(")[0]
      assert re.search(rf"`{name}[`(]", said), name


def test_files_that_pages_link_to_exist():
  pages = [
    # CHANGELOG.md names pages of its day.
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *(
      path
      for folder in ("colab", "docs", "launch", "models")
      for path in (ROOT / folder).rglob("*.md")
    ),
  ]
  linked = {
    page.parent / name
    for page in pages
    for name in re.findall(
      r"\]\(([\w/.-]+)(?:#[\w-]+)?\)", page.read_text("utf-8")
    )
  }
  assert len(linked) > 100
  assert not {path for path in linked if not path.exists()}


def test_the_walk_from_make_decode_is_as_long_as_it_says():
  page = (ROOT / "docs" / "from_make_decode.md").read_text("utf-8")
  files = re.findall(r"^\d+\. \[.*?\]\(\.\./(\S+?)\)", page, re.MULTILINE)
  lines = sum(len((ROOT / f).read_text("utf-8").splitlines()) for f in files)
  assert len(files) <= 20
  assert lines <= 5_000
  count, said = re.search(
    r"these (\d+) files.* some ([\d,]+) lines", page
  ).groups()
  assert int(count) == len(files)
  assert abs(int(said.replace(",", "")) - lines) <= 100
