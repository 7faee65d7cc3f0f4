"""Pages: links lead somewhere; commands, flags and drafters exist."""

import importlib
import pathlib
import re
import shlex

from absl import flags

from configs import smollm2
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


def test_commands_give_flags_and_settings_that_exist(monkeypatch):
  any_file = pathlib.Path(__file__)  # as if SmolLM2 were fetched
  monkeypatch.setattr(smollm2, "path", lambda: any_file)
  count = 0
  for line in commands():
    if not (found := re.search(r"-m (launch[\w.]*)(.*)", line)):
      continue
    name, given = found.groups()
    if name == "launch.MAIN":
      continue
    path = ROOT.joinpath(*name.split("."))
    module = f"{name}.__main__" if path.is_dir() else name
    importlib.import_module(module)
    read = {x.name for x in flags.FLAGS.get_key_flags_for_module(module)}
    read |= {"debug", "help", "helpfull"}
    config = {}
    for flag, value in re.findall(r"--([\w.]+)(?:=(\S*))?", given):
      count += 1
      if flag == "config":
        file, _, argument = value.partition(":")
        of = file.removesuffix(".py").replace("/", ".")
        get_config = importlib.import_module(of).get_config
        config = get_config(argument) if argument else get_config()
      elif flag.startswith("config."):
        held = config
        for part in flag.split(".")[1:]:
          assert part in held, line
          held = held[part]
      else:
        assert {flag, flag.removeprefix("no")} & read, (flag, line)
  assert count > 300


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
