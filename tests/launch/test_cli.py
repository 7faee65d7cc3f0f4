"""`launch.cli`: flags that are read and no others, help, and honest errors."""

import importlib
import pathlib
import re

import pytest
from commands import execute

from launch import cli, processes
from specjax import rules

_ROOT = pathlib.Path(__file__).parents[2]
_SOURCES = {
  ".".join(path.relative_to(_ROOT).with_suffix("").parts): path.read_text()
  for path in sorted((_ROOT / "launch").rglob("*.py"))
}
_RUNS = re.compile(r"^  cli\.run\(", re.MULTILINE)
COMMANDS = [name for name, text in _SOURCES.items() if _RUNS.search(text)]


def command_of(name):
  for other in COMMANDS:  # one process with the flags of all
    importlib.import_module(other)
  return importlib.import_module(name).run


def shown(capsys, command, *args):
  with pytest.raises(SystemExit) as end:
    execute(command, *args)
  assert end.value.code == 0
  return capsys.readouterr().out


def refused(capsys, command, *args):
  """The one line of a command that ends with exit code 2."""
  assert execute(command, *args) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ")
  return line


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_exactly_the_flags_a_command_reads(name, capsys):
  text = shown(capsys, command_of(name), "--help")
  assert f"python -m {name.removesuffix('.__main__')} " in text
  listed = set(re.findall(r"^  --(?:\[no\])?(\w+):", text, re.M))
  own = re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', _SOURCES[name])
  declared = re.search(r"^cli\.reads\((.*?)\)", _SOURCES[name], re.M | re.S)
  shared = re.findall(r"cli\.([A-Z_]+)", declared[1])
  assert listed >= {*own, *(x.lower() for x in shared)}
  used = _SOURCES[name].replace(declared[0], "")
  used = set(re.findall(r"cli\.([A-Z_]+)\b", used)) - {"UNFINISHED"}
  assert used - {"OVERWRITE"} == set(shared) - {"OVERWRITE"}


def test_help_fits_on_one_screen_and_helpfull_shows_the_rest(capsys):
  decode = command_of("launch.decode")
  short = shown(capsys, decode, "--help")
  assert short.count("\n") <= 40
  full = shown(
    capsys, decode, "--helpfull", "--config=configs/embedded.py",
    "--config.temperature=0.5",
  )  # fmt: skip
  assert "\ntemperature: 0.5\n" in full
  assert "\ndrafter: model(tokens=6)\n" in full
  assert "--heartbeat_timeout" in full
  assert "eagle3(" in shown(capsys, decode, "--help=drafters")


@pytest.mark.parametrize(
  ("given", "words"),
  [
    (["--ouput=x"], "Unknown command line flag 'ouput'. Did you mean"),
    (["--target=x"], "this command does not read --target"),
    (["--config=no.py"], "No such file or directory: 'no.py'"),
    (["--config.temprature=1"], 'Did you mean "temperature"'),
    (["--nobaseline", "more"], "unexpected ['more']"),
  ],
)
def test_flag_errors_are_reported_in_one_line(capsys, given, words):
  if not given[0].startswith("--config="):
    given = ["--config=configs/embedded.py", *given]
  assert words in refused(capsys, command_of("launch.decode"), *given)


def no_such_rule(_):
  rules.get("nonsense")


def no_such_file(_):
  pathlib.Path("/nowhere/at/all").read_text()


def two_lines(_):
  raise cli.UserError("one\n  two")


@pytest.mark.parametrize(
  ("act", "words"),
  [
    (no_such_rule, "unknown rule 'nonsense'"),
    (no_such_file, "/nowhere/at/all: No such file or directory"),
    (two_lines, "error: one two"),
  ],
)
def test_user_errors_print_one_line_and_debug_adds_a_traceback(
  capsys, act, words
):
  assert words in refused(capsys, act)
  assert execute(act, "--debug") == 2
  assert "Traceback" in capsys.readouterr().err


def test_unjoined_processes_exit_with_1_and_bugs_propagate():
  def alone(_):
    raise processes.UnjoinedError("nobody came")

  def bug(_):
    raise KeyError("x")

  assert execute(alone) == 1  # a worker of a slice tries it again
  with pytest.raises(KeyError):
    execute(bug)
