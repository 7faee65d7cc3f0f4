"""Pages: links lead somewhere, commands and drafters exist."""

import pathlib
import re
import shlex

from launch.assembly import registry
from launch.evaluation.systems import SYSTEMS
from specjax import calls, shapes

ROOT = pathlib.Path(__file__).resolve().parents[1]
# CHANGELOG.md names pages of its day.
PAGES = [
  *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
  *(
    path
    for folder in ("colab", "docs", "launch", "models")
    for path in (ROOT / folder).rglob("*.md")
  ),
]


def anchors(page: pathlib.Path) -> set[str]:
  """The anchors of a page's headings, as GitHub names them."""
  heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in heads}


def test_links_lead_to_files_and_headings():
  broken, count = set(), 0
  for page in PAGES:
    text = page.read_text("utf-8")
    for name, anchor in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", text):
      count += 1
      path = page.parent / name if name else page
      if not path.exists() or (
        anchor and path.suffix == ".md" and anchor not in anchors(path)
      ):
        broken.add((str(page), name, anchor))
  assert count > 100
  assert not broken


def commands() -> list[str]:
  """The commands of pages and docstrings, a line each, as a shell reads it."""
  files = [
    *(x for x in PAGES if x.parent.name not in ("evaluation", "reports")),
    *(ROOT / "configs").glob("*.py"),
    *(ROOT / "launch").rglob("*.py"),
  ]
  lines = []
  for path in files:
    text = re.sub(r"\\\n\s*", " ", path.read_text("utf-8"))
    lines += [x for x in text.splitlines() if x.startswith(("  ", "python"))]
  return lines


def test_drafters_and_systems_in_commands_are_calls_of_the_grammar():
  flag = re.compile(r"--(?:config\.drafter|drafter|systems|over)=(.*)", re.S)
  read = []
  for line in commands():
    if "$" in line or "package.module" in line or not flag.search(line):
      continue
    for word in shlex.split(line.replace("[", "").replace("]", "")):
      if given := flag.fullmatch(word):
        read += map(SYSTEMS.canonical, calls.parse_list(given[1]))
  assert len(read) > 40
  assert "with_rule(eagle3, block)" in read


def test_modules_in_commands_are_there():
  named = {
    name for x in commands() for name in re.findall(r"-m (launch[\w.]*)", x)
  }
  assert "launch.studies.rules" in named
  for name in named:
    path = ROOT.joinpath(*name.split("."))
    assert path.with_suffix(".py").exists() or path.is_dir(), name


def test_drafters_in_the_page_are_those_that_help_prints():
  page = (ROOT / "docs" / "drafting.md").read_text("utf-8")
  section = page.partition("## Drafters")[2].partition("\n## ")[0]
  shown = [x for x in section.splitlines() if x.startswith("| ")]
  rows = [
    f"| `{call.partition('(')[0]}` | {about} |"
    for call, about in registry.DRAFTERS.help()
  ]
  assert shown[1:] == rows
  for grammar in (shapes.GRAMMAR, registry.POLICIES, registry.WEIGHTS):
    for call, _ in grammar.help():
      name = call.partition("(")[0]
      assert re.search(rf"`{name}[`(]", page), name


def test_the_walk_from_make_decode_is_as_long_as_it_says():
  page = (ROOT / "docs" / "from_make_decode.md").read_text("utf-8")
  files = re.findall(r"^\d+\. \[.*?\]\(\.\./(\S+?)\)", page, re.MULTILINE)
  lines = sum(len((ROOT / f).read_text("utf-8").splitlines()) for f in files)
  count, said = re.search(
    r"these (\d+) files.* some ([\d,]+) lines", page
  ).groups()
  assert int(count) == len(files)
  assert abs(int(said.replace(",", "")) - lines) <= 100
