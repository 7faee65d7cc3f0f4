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


def test_links_resolve_to_existing_files_and_headings():
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
  assert count > 50
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


def test_drafters_and_systems_in_documented_commands_parse():
  flag = re.compile(r"--(?:config\.drafter|drafter|systems|over)=(.*)", re.S)
  read = []
  for line in commands():
    if "$" in line or "package.module" in line or not flag.search(line):
      continue
    for word in shlex.split(line.replace("[", "").replace("]", "")):
      if given := flag.fullmatch(word):
        read += map(SYSTEMS.canonical, calls.parse_list(given[1]))
  assert len(read) > 10


def test_documented_commands_use_existing_flags_and_settings(monkeypatch):
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
  assert count > 100


def test_documented_drafter_table_matches_help():
  """In whatever page has it; trees, policies and weights stand there too."""
  rows = [
    f"| `{call.partition('(')[0]}` | {about} |"
    for call, about in registry.DRAFTERS.help()
  ]
  texts = [page.read_text("utf-8") for page in PAGES]
  (text,) = [text for text in texts if rows[0] in text]
  table = text[text.index(rows[0]) :].partition("\n\n")[0]
  assert table.splitlines() == rows
  for grammar in (shapes.GRAMMAR, registry.POLICIES, registry.WEIGHTS):
    for call, _ in grammar.help():
      name = call.partition("(")[0]
      assert re.search(rf"`{name}[`(]", text), name
